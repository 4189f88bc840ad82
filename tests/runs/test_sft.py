"""Supervised fine-tuning: transformers' loss, the same weights after an interruption, a model that opens."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from antiphon.api.engine import EngineRequest
from antiphon.cli.replay import replay
from antiphon.cli.report import report
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_file
from antiphon.core.errors import AntiphonError, ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.sft_config import SftConfig, load_sft_config
from antiphon.environments.registry import environment_of
from antiphon.environments.scoring.messages import Failed, Verdict
from antiphon.lineage.kept import Kept
from antiphon.lineage.tracking.mlflow_client import client_at
from antiphon.lineage.tracking.tracked_run import TrackedRun
from antiphon.models.codec import TextCodec
from antiphon.runs.finding import RECORD
from antiphon.runs.heldout_task import HeldoutTask
from antiphon.runs.preflight import check_methods
from antiphon.runs.sft import LOG, MODEL, Line, SftPlan, plan_sft, train
from antiphon.runs.sft_replay import replay_sft
from antiphon.services.rollout.suite_worker import SAMPLES, SuiteSample
from antiphon.system.files import PREFIX
from tests.support.processes import children_that_run

MODEL_FOLDER = Path(__file__).parents[2] / "examples" / "models" / "chain-sum"
FIELDS = ("train", "heldout")
EXAMPLE = Path(__file__).parents[2] / "examples" / "sft" / "sums.yaml"


def plan_of(home: Path, *overrides: str) -> SftPlan:
    few = "data.rows_per_step=48", "learner.checkpoint_interval=2", "data.heldout_interval=3"
    return plan_sft(load_sft_config(EXAMPLE, ["data.epochs=1", *few, *overrides]), home)


def drawn_losses(plan: SftPlan) -> list[tuple[int, float]]:
    known = json.loads((plan.folder / "mlflow.json").read_text())
    client = client_at(known["tracking_uri"])
    assert client.get_run(known["run_id"]).info.status == "FINISHED"
    return [(one.step, one.value) for one in client.get_metric_history(known["run_id"], "sft/loss")]


def weights(plan: SftPlan) -> str:
    return digest_file(plan.folder / MODEL / "model.safetensors")


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, parted = (plan_of(tmp_path / name) for name in ("whole", "parted"))
    lines = train(whole, tmp_path / "whole", lambda line: None)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and lines[-1]["loss"] < lines[0]["loss"]
    assert [line["step"] for line in lines if "heldout_loss" in line] == [3, 6]

    def interrupt(line: Line) -> None:
        if line["step"] == 4:
            raise KeyboardInterrupt

    left = parted.folder / f"{PREFIX}left"  # by a process that was killed
    left.mkdir(parents=True)
    for _ in range(2):  # 4 is learned again from the checkpoint of 4, and then no more
        try:
            train(parted, tmp_path / "parted", interrupt)
        except KeyboardInterrupt:
            continue
    again = train(parted, tmp_path / "parted", lambda line: None)
    assert again == lines and weights(parted) == weights(whole) and not left.exists()
    assert drawn_losses(parted) == [(line["step"], line["loss"]) for line in lines]  # each step once
    assert train(parted, tmp_path / "parted", lambda line: pytest.fail("it is done")) == lines
    others = plan_of(tmp_path / "parted", f"data.heldout={EXAMPLE.with_name('train.jsonl')}")
    assert others.folder == parted.folder
    with pytest.raises(ConfigError, match=r"data\.heldout holds other rows than sums-sft"):
        train(others, tmp_path / "parted", lambda line: None)
    shown = AutoModelForCausalLM.from_pretrained(whole.folder / MODEL, dtype=torch.float32)
    losses = []
    for one in whole.heldout:
        ids = torch.from_numpy(one.token_ids[None].astype(np.int64))
        labels = torch.full_like(ids, -100)
        for start, stop in one.learned:
            labels[0, start:stop] = ids[0, start:stop]
        with torch.no_grad():
            losses.append((float(shown(input_ids=ids, labels=labels).loss), one.learned_tokens))
    mean = sum(loss * tokens for loss, tokens in losses) / sum(tokens for _, tokens in losses)
    assert lines[-1]["heldout_loss"] == pytest.approx(mean, rel=1e-5)


def state(plan: SftPlan) -> torch.Tensor:
    found = load_file(plan.folder / MODEL / "model.safetensors")
    return torch.cat([found[name].flatten().double() for name in sorted(found)])


@pytest.mark.engine
def test_two_ranks_learn_what_one_does_and_continue_to_the_same_bits(tmp_path: Path) -> None:
    few = "data.rows_per_step=52", "data.heldout_interval=2", "learner.micro_batch_tokens=256"
    one = plan_of(tmp_path / "one", *few)
    alone = train(one, tmp_path / "one", lambda line: None)
    whole, parted = (plan_of(tmp_path / name, *few, "learner.ranks=2") for name in ("whole", "parted"))
    lines = train(whole, tmp_path / "whole", lambda line: None)
    assert len(lines) == 5 and float((state(one) - state(whole)).abs().max()) < 2e-5
    for line, single in zip(lines, alone, strict=True):
        assert line == pytest.approx(single, rel=1e-4)

    def kill(line: Line) -> None:
        if line["step"] == 3:
            (other,) = children_that_run("ranks.follower")
            other.kill()

    with pytest.raises(UnavailableError, match="rank 1 of the learner was ended by SIGKILL"):
        train(parted, tmp_path / "parted", kill)
    assert train(parted, tmp_path / "parted", lambda line: None) == lines
    assert weights(parted) == weights(whole)


def test_the_first_steps_loss_is_that_of_transformers(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "data.rows_per_step=8")
    first: list[float] = []

    def stop(line: Line) -> None:
        first.append(line["loss"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(plan, tmp_path, stop)
    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    total, count = 0.0, 0
    for row in plan.batch(0):
        ids = torch.tensor([[*row.prompt_token_ids.tolist(), *row.token_ids.tolist()]])
        labels = ids.clone()
        labels[0, : len(row.prompt_token_ids)] = -100
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * row.sampled_tokens
        count += row.sampled_tokens
    assert first[0] == pytest.approx(total / count, rel=1e-6)


def test_each_epoch_learns_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "data.epochs=3", "data.rows_per_step=100")
    places = [row.group_id for step in range(plan.steps) for row in plan.batch(step)]
    assert places == [f"row-{number}" for number in range(3 * 256)] and plan.steps == 8
    orders = [plan.order(epoch).tolist() for epoch in range(3)]
    assert all(sorted(one) == list(range(256)) for one in orders) and orders[0] != orders[1] != orders[2]


def test_curves_wait_for_an_mlflow_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, log, calls = plan_of(tmp_path), TrackedRun.log_summary, []

    def failing(self: TrackedRun, step: int, metrics: dict[str, float], at: float) -> None:
        calls.append(step)
        if len(calls) < 4:
            raise OSError("no route to host")
        log(self, step, metrics, at)

    monkeypatch.setattr(TrackedRun, "log_summary", failing)
    monkeypatch.setattr("antiphon.runs.sft.AWAY_S", 0.0)
    lines = train(plan, tmp_path, lambda line: None)
    assert calls[:4] == [1, 1, 1, 1] and len(lines) == 6
    assert drawn_losses(plan) == [(line["step"], line["loss"]) for line in lines]


def test_an_mlflow_that_is_away_is_asked_again_after_a_pause_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, log, calls = plan_of(tmp_path), TrackedRun.log_summary, []

    def failing(self: TrackedRun, step: int, metrics: dict[str, float], at: float) -> None:
        calls.append(step)
        if len(calls) == 1:
            raise OSError("no route to host")
        log(self, step, metrics, at)

    monkeypatch.setattr(TrackedRun, "log_summary", failing)
    monkeypatch.setattr("antiphon.runs.sft.AWAY_S", 1e9)
    lines = train(plan, tmp_path, lambda line: None)
    assert calls == [1, 1, 2, 3, 4, 5, 6]  # all of the second look are at the end
    assert drawn_losses(plan) == [(line["step"], line["loss"]) for line in lines]


def test_an_mlflow_that_refuses_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, opened = plan_of(tmp_path, "data.rows_per_step=256"), []

    def gone(*place: Any) -> TrackedRun:
        opened.append(place)
        raise (UnavailableError, ContractError)[len(opened) % 2]("its run was deleted")

    monkeypatch.setattr("antiphon.runs.sft.open_run", gone)
    assert len(train(plan, tmp_path, lambda line: None)) == 1
    assert len(opened) == 2 and (plan.folder / MODEL / "config.json").is_file()


def test_adapters_are_trained_and_written_merged(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "learner.lora.rank=4", "data.heldout=[]")
    lines = train(plan, tmp_path, lambda line: None)
    assert lines[-1]["loss"] < lines[0]["loss"] and all("heldout_loss" not in line for line in lines)
    assert weights(plan) != digest_file(plan.model / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(plan.folder / MODEL)


def test_a_replay_repeats_every_bit_and_names_what_differs(tmp_path: Path) -> None:
    files = {field: tmp_path / f"{field}.jsonl" for field in FIELDS}
    for field, file in files.items():
        shutil.copy(EXAMPLE.with_name(f"{field}.jsonl"), file)
    plan = plan_of(tmp_path, *(f"data.{field}={file}" for field, file in files.items()))
    lines = train(plan, tmp_path, lambda line: None)
    said: list[str] = []
    replay_sft(plan.folder, tmp_path, 1, said.append)
    replay_sft(plan.folder, tmp_path, 6, said.append)
    digest = json.loads((plan.folder / RECORD).read_bytes())["weights"][:12]
    assert said == [
        f"{plan.folder.name}: steps 1 to 6, from the base",
        f"6 steps repeated: every figure has the same bits, and the weights {digest}",
        f"{plan.folder.name}: steps 5 to 6, from v4",
        f"2 steps repeated: every figure has the same bits, and the weights {digest}",
    ]
    with pytest.raises(ConfigError, match="--from 7 is none of the 6 steps"):
        replay_sft(plan.folder, tmp_path, 7, said.append)
    lines[4]["loss"] += 1e-9
    (plan.folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(IntegrityError, match="step 5: loss was"):
        replay_sft(plan.folder, tmp_path, 5, said.append)
    files["heldout"].write_text(files["heldout"].read_text().replace("1", "2", 1))
    with pytest.raises(IntegrityError, match=r"data\.heldout holds other rows than sums-sft"):
        replay_sft(plan.folder, tmp_path, 1, said.append)


def test_the_page_shows_curves_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"step": step, "tokens": 8.0, "loss": 2.0 / step, "gradient_norm": 1.0, "learning_rate": 0.1}
        for step in (1.0, 2.0, 3.0)
    ]
    lines[-1] |= {"heldout_loss": 0.75, "heldout_score": 0.5}
    record = {
        "config": {"run": {"name": "<sums>"}},
        "steps": 4,
        "rows": {"train": "ab" * 32, "heldout": "cd" * 32},
        "weights": "",
    }
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    folder = tmp_path / "sft" / "sums-s0"
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(json.dumps(record))
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    report("sums-s0")
    page = (folder / "report.html").read_text()
    for words in ("3 of 4 steps", "24 tokens learned", "0.75", "ab" * 32, "&lt;sums&gt;"):
        assert words in page
    charts = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    assert sorted(charts) == ["gradient_norm", "heldout_loss", "heldout_score", "learning_rate", "loss"]
    assert charts["loss"]["drawn"][0]["series"][0]["points"] == [[1, 2], [2, 1], [3, 0.6666667]]
    with pytest.raises(
        ConfigError, match="sums-s0 is a supervised training, whose replay takes --from alone"
    ):
        replay("sums-s0", step=2)


class Answers:
    """Stands for the workers: gives the right answer to every second prompt."""

    def __init__(self, environment: Any) -> None:
        self._environment, self._codec = environment, TextCodec.load(str(MODEL_FOLDER))

    def __call__(
        self, config: RunConfig, database: Path, requests: Sequence[EngineRequest], workers: int
    ) -> None:
        assert workers == 1 and config.model.path == "weights"
        with Kept(database, SAMPLES, SuiteSample) as kept:
            for place, one in enumerate(requests):
                key = one.request_id.split()[0]
                answer = "7" if place % 2 else self._environment.problem_by_key(key).answer
                ids = self._codec.encode(f"<answer>{answer}</answer>", add_special_tokens=False)
                kept.add(one.request_id, SuiteSample(np.asarray(ids, np.int32).tobytes(), "stop"))


def task_config(**sections: Any) -> RunConfig:
    tree = {"data": {"train": "x"}, "model": {"path": str(MODEL_FOLDER)}, **sections}
    return SftConfig.model_validate(tree).as_evaluation()


def test_a_score_is_the_mean_reward_of_the_held_out_prompts() -> None:
    config = task_config(environment={}, evaluation={"prompts": 6})
    task = HeldoutTask(config, MODEL_FOLDER, Answers(environment_of(config.environment)))
    assert task.score(Path("weights")) == 0.5


@pytest.mark.parametrize("failing", [1, 60])
def test_few_answers_that_cannot_be_judged_count_as_wrong(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    config = task_config(environment={}, evaluation={"prompts": 60})
    task = HeldoutTask(config, MODEL_FOLDER, Answers(environment_of(config.environment)))

    async def judged(*given: Any) -> list[list[Verdict]]:
        return [[Failed("it fell over")]] * failing + [[1.0]] * (60 - failing)

    monkeypatch.setattr("antiphon.runs.heldout_task.judged", judged)
    if failing == 1:
        assert task.score(Path("weights")) == pytest.approx(59 / 60)
        return
    with pytest.raises(AntiphonError, match=r"60 of 60 held-out answers could not be judged.*it fell over"):
        task.score(Path("weights"))


def test_a_task_with_turns_is_refused() -> None:
    config = task_config(environment={"name": "poker"}, rollout={"max_model_tokens": 2048})
    with pytest.raises(ConfigError, match=r"environment\.name=poker has turns"):
        HeldoutTask(config, MODEL_FOLDER)


@pytest.mark.engine
def test_the_weights_are_scored_on_a_task_while_they_train(tmp_path: Path) -> None:
    few = "evaluation.prompts=16", "evaluation.temperature=0", "evaluation.interval=3"
    task = {
        "name": "file",
        "parameters": {field: str(EXAMPLE.with_name(f"{field}.jsonl")) for field in FIELDS},
    }
    task["parameters"] |= {"question": "prompt", "answer": "completion", "score": "number"}
    plan = plan_of(tmp_path, *few, f"environment={json.dumps(task)}")
    lines = train(plan, tmp_path, lambda line: None)
    scores = {line["step"]: line["heldout_score"] for line in lines if "heldout_score" in line}
    print(scores)
    assert list(scores) == [3, 6] and all(0.0 <= score <= 1.0 for score in scores.values())
    assert not list(plan.folder.glob("scored-*"))
    assert plan.folder.name == plan_of(tmp_path).folder.name  # what only measures does not name a training


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "data.train names no file"),
        (
            {"data": {"train": "x"}, "sampling": {"max_tokens": 9}},
            "sampling has no effect without environment",
        ),
        ({"model": {"renderer": "qwen3"}, "data": {"train": "x"}}, "model.renderer=qwen3 has no effect"),
        (
            {"learner": {"warmup_steps": 50}, "data": {"train": str(EXAMPLE.with_name("train.jsonl"))}},
            "learner.warmup_steps=50 is no shorter than run.steps=8",
        ),
        ({"data": {"train": "nowhere.jsonl"}}, "data.train: there is no file nowhere.jsonl"),
        ({"data": {"train": "x", "rows": 2}}, "unknown key data.rows"),
        ({"model": {"path": "nowhere"}, "data": {"train": "x"}}, "model.path='nowhere' is no folder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_read(
    tmp_path: Path, tree: dict[str, Any], said: str
) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as caught:
        plan_sft(load_sft_config(file), tmp_path)
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == [file]


def test_no_run_learns_from_demonstrations() -> None:
    algorithm = SftConfig.model_validate({"data": {"train": "x"}}).as_run(1, 0.1).algorithm
    with pytest.raises(ConfigError, match="use `antiphon sft`"):
        check_methods(algorithm)
