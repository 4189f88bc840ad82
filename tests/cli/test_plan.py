"""plan: what it prints is what the page shows; errors are one sentence, with exit code 3."""

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import scipy.optimize

from antiphon.cli.app import execute

ROOT = Path(__file__).parents[2]
COMMAND = "antiphon plan examples/plan/eight-billion.yaml --offers examples/plan/rented-gpus.yaml"


PLAN = {
    "plan_train_s": 1.5,
    "plan_broadcast_s": 0.1,
    "plan_group_s": 1.0,
    "plan_place_s": 1.0,
    "plan_acceptance": 0.5,
    "plan_supply_tokens_per_s": 7680.0,
    "plan_need_tokens_per_s": 256 * 60 / 1.5,
}
"""What a run of the quickstart measured whose completions have 60 tokens, those of evaluations among them."""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "concepts" / "capacity.md").read_text(encoding="utf-8")
    assert execute(COMMAND.split()[1:]) == 0
    head, _, bounds = capsys.readouterr().out.split("\n\n")[:3]
    assert f"$ ./{COMMAND}\n{head}\n\n{bounds}\n" in page


def test_json_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawing = tmp_path / "plan.svg"
    assert execute([*COMMAND.split()[1:], "--json", "--plot", str(drawing)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["least_staleness"] == 2 and told["learner_idle_share"] == 0.0
    assert {"regime", "publish_interval", "run_ahead", "required_supply", "workers", "run_usd"} <= told.keys()
    assert drawing.read_text(encoding="utf-8").startswith("<svg")


def test_a_solver_that_prints_breaks_no_json(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HiGHS does below Python for some mixed fleets with losses and zones, whatever its options say."""
    solve, libc = scipy.optimize.milp, ctypes.CDLL(None)

    def talkative(*args: Any, **options: Any) -> Any:
        libc.puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        return solve(*args, **options)

    monkeypatch.setattr(scipy.optimize, "milp", talkative)
    assert execute([*COMMAND.split()[1:], "--json"]) == 0
    libc.fflush(None)
    assert json.loads(capfd.readouterr().out)["least_staleness"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["loop.max_staleness=0", "--idle", "0.05"], "of the time at least"),
        (["--budget", "10"], "more than $10.00"),
        (["--idle", "-1"], "--idle -1 cannot be met"),
        (["--confidence", "1.5"], "a confidence of 1.5"),
    ],
)
def test_what_nothing_can_meet_has_exit_code_3(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute([*COMMAND.split()[1:], *arguments]) == 3
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_without_a_run_or_offers_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["plan", "examples/quickstart.yaml"]) == 3
    assert "give --offers FILE" in capsys.readouterr().err


def test_a_recorded_run_gives_the_rates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "quickstart-1"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_bytes((ROOT / "examples" / "quickstart.yaml").read_bytes())
    batch = {
        "trajectories": 128,
        "groups_filtered": 16,
        "groups_dropped_stale": 0,
        "completion_tokens_mean": 60.0,
    }
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(5):
            timings = {"wall_s": 2.0 * step, "workers": {"a": 128}, **PLAN}
            file.write(json.dumps({"step": step, "batch": batch, "timings": timings}) + "\n")
    assert execute(["plan", "examples/quickstart.yaml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["train_s"] == 1.5 and told["acceptance"] == 0.5
    assert told["classes"]["worker"]["source"] == "measured"
    assert told["classes"]["worker"]["tokens_per_s"] == 7680.0
    assert (told["broadcast_s"], told["group_s"]) == (0.1, 1.0)
    alone = next(one for one in told["by_workers"] if one["workers"] == {"worker": 1})
    assert alone["step_s"] == pytest.approx(256 * 60 / 7680.0)
    # What is left out has used its place: a step trains on half of its 256 completions.
    assert told["required_supply"] == pytest.approx(256 / 1.5)
    assert "measured by run quickstart-1, 5 steps" in told["notes"]


def test_a_raised_bound_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([*COMMAND.split()[1:], "loop.max_staleness=6"]) == 0
    assert "learner.learning_rate=1e-06 is not lowered" in capsys.readouterr().out


def test_memory_is_told_and_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    path = COMMAND.split()[2]
    ranked = ["learner.ranks=8", "learner.zero_stage=3", "learner.dtype=bfloat16"]
    ranked += ["learner.gradient_checkpointing=true"]
    assert execute(["plan", path, "--memory", "--gpu", "H100", *ranked]) == 0
    said = capsys.readouterr().out
    assert "8.191 billion" in said and "each rank, of 8" in said and "the fullest GPU" in said
    assert execute(["plan", path, "--memory", "--gpu", "H100", "--json"]) == 3
    found = capsys.readouterr()
    assert json.loads(found.out)["needed_bytes"] > 80e9
    assert (
        "needed on a GPU, which has 80.0 GB; less is needed with learner.lora.rank=16 learner." in found.err
    )
    assert execute(["plan", path, "--memory", "model.path=nobody/knows"]) == 3
    assert "nothing is known of model.path=nobody/knows" in capsys.readouterr().err
    assert execute(["plan", "examples/quickstart.yaml", "--memory"]) == 0
    assert "this machine" in capsys.readouterr().out
