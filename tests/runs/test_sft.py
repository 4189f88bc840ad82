"""Supervised fine-tuning: transformers' loss, the same weights after an interruption, a model that opens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.core.digests import digest_file
from antiphon.core.errors import ConfigError
from antiphon.core.sft_config import SftConfig, load_sft_config
from antiphon.lineage.tracking.mlflow_client import client_at
from antiphon.lineage.tracking.tracked_run import TrackedRun
from antiphon.runs.preflight import check_methods
from antiphon.runs.sft import MODEL, Line, SftPlan, plan_sft, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft" / "sums.yaml"


def plan_of(home: Path, *overrides: str) -> SftPlan:
    few = "data.rows_per_step=48", "learner.checkpoint_interval=2", "data.heldout_interval=3"
    return plan_sft(load_sft_config(EXAMPLE, ["data.epochs=1", *few, *overrides]), home)


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

    for _ in range(2):  # 4 is learned again from the checkpoint of 4, and then no more
        try:
            train(parted, tmp_path / "parted", interrupt)
        except KeyboardInterrupt:
            continue
    again = train(parted, tmp_path / "parted", lambda line: None)
    assert again == lines and weights(parted) == weights(whole)
    assert train(parted, tmp_path / "parted", lambda line: pytest.fail("it is done")) == lines
    shown = AutoModelForCausalLM.from_pretrained(whole.folder / MODEL, dtype=torch.float32)
    row = whole.heldout[0]
    losses = []
    for one in whole.heldout:
        ids = torch.tensor([one.token_ids])
        labels = torch.full_like(ids, -100)
        for start, stop in one.learned:
            labels[0, start:stop] = ids[0, start:stop]
        with torch.no_grad():
            losses.append((float(shown(input_ids=ids, labels=labels).loss), one.learned_tokens))
    mean = sum(loss * tokens for loss, tokens in losses) / sum(tokens for _, tokens in losses)
    assert lines[-1]["heldout_loss"] == pytest.approx(mean, rel=1e-5) and row.learned_tokens


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
    lines = train(plan, tmp_path, lambda line: None)
    assert calls[:4] == [1, 1, 1, 1] and len(lines) == 6
    known = json.loads((plan.folder / "mlflow.json").read_text())
    client = client_at(known["tracking_uri"])
    drawn = client.get_metric_history(known["run_id"], "sft/loss")
    assert [(point.step, point.value) for point in drawn] == [(line["step"], line["loss"]) for line in lines]
    assert client.get_run(known["run_id"]).info.status == "FINISHED"


def test_adapters_are_trained_and_written_merged(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "learner.lora.rank=4", "data.heldout=[]")
    lines = train(plan, tmp_path, lambda line: None)
    assert lines[-1]["loss"] < lines[0]["loss"] and all("heldout_loss" not in line for line in lines)
    assert weights(plan) != digest_file(plan.model / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(plan.folder / MODEL)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "data.train names no file"),
        ({"data": {"train": "nowhere.jsonl"}}, "data.train: there is no file nowhere.jsonl"),
        ({"data": {"train": "x"}, "learner": {"ranks": 2}}, "learner.ranks=2 is not possible"),
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
