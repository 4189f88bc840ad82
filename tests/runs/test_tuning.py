"""Tuning: real engines and learners are tried, what one cannot have is said, and nothing is written."""

import json
from pathlib import Path

import pytest

from antiphon.cli.app import execute
from antiphon.core.capacity.engine_tuning import Settings, Trial, Unit
from antiphon.core.config import RunConfig, dump_config, load_config
from antiphon.core.errors import AntiphonError
from antiphon.runs import tuning

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")


@pytest.fixture
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.long(in_ci=True)
@pytest.mark.usefixtures("at_the_root")
def test_a_real_engine_and_two_learners_are_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tuning, "values_to_try", lambda config: {"model.dtype": ("float32",)})
    monkeypatch.setattr(tuning, "_threads_to_try", lambda: [1, 2])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert execute(["tune", QUICKSTART, "--seconds", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    now, one, two = told["trials"]
    assert told["unit"] == "cpu_seconds" and told["completions"] == 60 * 32 * 8
    assert set(told["overrides"]) <= {"learner.threads=2"}
    assert "model.dtype=float32" in now["overrides"] and not now["failed"]
    assert now["tokens"] > 1000 and now["sampling"]["cpu_seconds"] <= 2 * now["sampling"]["seconds"]
    assert 0 < now["completion_tokens"] <= 192 and now["cost"] > now["start"]["cpu_seconds"] > 0
    for threads, learner in ((1, one), (2, two)):
        assert learner["overrides"] == [f"learner.threads={threads}"] and not learner["failed"]
        assert learner["tokens"] >= 32 * 8 and learner["cost"] > learner["start"]["cpu_seconds"] > 0
        assert learner["step_s"] is None and 0 < learner["completion_tokens"] <= 192


@pytest.mark.usefixtures("at_the_root")
def test_an_engine_that_cannot_be_is_named_and_the_others_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def tried(config: RunConfig, choice: Settings, seconds: float, folder: Path, *_: float) -> Trial:
        if choice["rollout.block_size"] == 16:
            raise AntiphonError("the trial with blocks of 16 ended with status 1")
        one_second: dict[Unit, float] = {"seconds": 1.0, "cpu_seconds": 1.0}
        return Trial(one_second, one_second, 1000, 50.0)

    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "values_to_try", lambda config: {"rollout.block_size": (16, 32)})
    monkeypatch.setattr(tuning, "_threads_to_try", lambda: [1])
    monkeypatch.setattr(tuning, "try_out", tried)
    assert execute(["tune", QUICKSTART, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    now, impossible = told["trials"]
    assert "rollout.block_size=32" in now["overrides"] and not now["failed"] and told["overrides"] == []
    assert "rollout.block_size=16" in impossible["overrides"]
    assert impossible["failed"] == "the trial with blocks of 16 ended with status 1"


@pytest.mark.usefixtures("at_the_root")
def test_seconds_a_step_are_those_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By a recorded run that replaced half of its groups: 512 completions a step, 2 s of sampling."""
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    refill = ["loop.filter=refill", "loop.refill_limit=4"]
    config = load_config(Path(QUICKSTART), refill)
    (directory := tmp_path / "runs" / "quickstart-1").mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    batch = {"trajectories": 256, "groups_filtered": 32, "groups_dropped_stale": 0}
    plan = {"plan_train_s": 0.2, "plan_broadcast_s": 0.1, "plan_group_s": 0.5, "plan_place_s": 1.5}
    plan |= {"plan_supply_tokens_per_s": 51200.0, "plan_need_tokens_per_s": 512.0 * 200.0 / 0.2}
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(4):
            timings = {
                "train_s": 0.2,
                "wall_s": 2.0 * step,
                "workers": {"a": 256},
                "plan_acceptance": 0.5,
                **plan,
            }
            file.write(json.dumps({"step": step, "batch": batch, "timings": timings}) + "\n")
    monkeypatch.setattr(tuning, "values_to_try", lambda config: {"rollout.compiled": (True,)})
    monkeypatch.setattr(tuning, "_threads_to_try", lambda: [1])

    def tried(config: RunConfig, choice: Settings, seconds: float, folder: Path, *_: float) -> Trial:
        took = 1.0 if choice["rollout.compiled"] else 2.0
        return Trial(
            {"seconds": 1.0, "cpu_seconds": 1.0}, {"seconds": took, "cpu_seconds": took}, 1000, 200.0
        )

    monkeypatch.setattr(tuning, "try_out", tried)
    assert execute(["tune", QUICKSTART, *refill, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["completions"] == 60 * 512
    assert [trial["step_s"] for trial in told["trials"]] == pytest.approx([2.0, 1.0])
    assert execute(["plan", QUICKSTART, *refill, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert pytest.approx(2.0) in [
        one["step_s"] for one in planned["by_workers"] if one["workers"] == {"worker": 1}
    ]


@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize(("alone", "threads"), [(False, 4), (True, 1)])
def test_learner_threads_that_save_seconds_are_chosen_where_it_trains(
    alone: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its completions are as long as those that the engine sampled."""
    monkeypatch.setattr(tuning, "values_to_try", lambda config: {})
    monkeypatch.setattr(tuning, "_threads_to_try", lambda: [1, 2, 4])
    tried = []

    def try_out(
        config: RunConfig,
        choice: Settings,
        seconds: float,
        folder: Path,
        completion_tokens: float = 0.0,
    ) -> Trial:
        number = choice.get("learner.threads", 1)
        if "learner.threads" in choice:
            tried.append((number, completion_tokens))
        took = {"seconds": 1.0 / number, "cpu_seconds": 1.0}
        return Trial({"seconds": 1.0, "cpu_seconds": 1.0}, took, 1000, 77.0)

    monkeypatch.setattr(tuning, "try_out", try_out)
    config = load_config(Path(QUICKSTART), ["rollout.workers=0"])
    found = tuning.tune(config, 1.0, "seconds", 1000, alone, lambda *_: None)
    assert found == (tuning.current_settings(config)[0], {"learner.threads": threads})
    assert tried == ([] if alone else [(1, 77.0), (2, 77.0), (4, 77.0)])


@pytest.mark.usefixtures("at_the_root")
def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    config = load_config(Path(QUICKSTART), ["model.path=examples/models/none", "services.start_timeout_s=60"])
    with pytest.raises(
        AntiphonError, match=r"with float32, 1 thread, blocks of 32, eager ended .*examples/models/none"
    ):
        tuning.try_out(config, tuning.current_settings(config)[0], 1.0, tmp_path)


@pytest.mark.usefixtures("at_the_root")
def test_a_trial_needs_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["tune", QUICKSTART, "--seconds", "0"]) == 2
    assert "--seconds 0 is too short" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "alone", "unit"),
    [
        ([], False, "cpu_seconds"),
        ([], True, "seconds"),
        (["rollout.workers=0"], False, "seconds"),
    ],
)
def test_what_is_spared(
    overrides: list[str], alone: bool, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "device", lambda: "cpu")
    assert tuning.spared_unit(load_config(Path(QUICKSTART), overrides), alone) == unit


def test_the_values_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(Path(QUICKSTART))
    monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(tuning, "why_not_compiling", lambda: "g++")
    monkeypatch.setattr(tuning, "device", lambda: "cpu")
    found = tuning.values_to_try(config)
    assert found["rollout.threads"] == [1, 2, 4, 6] and found["rollout.compiled"] == (False,)
    monkeypatch.setattr(tuning, "device", lambda: "gpu")
    found = tuning.values_to_try(config)
    assert found["rollout.threads"] == [] and 16 in found["rollout.block_size"]
    assert found["rollout.compiled"] == (False, True)
