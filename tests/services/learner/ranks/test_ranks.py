"""Ranks: the gradient of one rank, the same bits again, one verdict, and nothing left when one ends."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.records import BatchRow, FinishReason, Probe, VersionSpan
from antiphon.services.learner.step import Trainer
from antiphon.services.learner.training import TrainedStep
from antiphon.weights.snapshot import weights_digest
from tests.support.rank_groups import RankGroup
from tests.support.replay_artifacts import VOCABULARY, make_config, save_model

pytestmark = pytest.mark.engine
OWN_OBJECTIVE = Path(__file__).parents[4] / "examples" / "own-objective"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def config_of(model: Path, **changes: Any) -> RunConfig:
    few = {"learner__micro_batch_tokens": 64, "learner__warmup_steps": 0}
    return make_config(model, **few, **changes)


def rows_of(seed: int, count: int = 12) -> list[BatchRow]:
    rng = np.random.default_rng(seed)
    return [
        BatchRow(
            rng.integers(0, VOCABULARY, length).astype(np.int32),
            rng.uniform(-4.0, -3.0, length).astype(np.float32),
            (VersionSpan(seed, 0, length),),
            FinishReason.STOP,
            group_id=f"g{place // 4}",
            prompt_key="p",
            sample_index=place % 4,
            prompt_token_ids=np.arange(4, dtype=np.int32),
            reward=1.0,
            advantage=float(rng.standard_normal()),
        )
        for place in range(count)
        for length in [int(rng.integers(2, 20))]
    ]


def referred(rows: list[BatchRow]) -> list[BatchRow]:
    rng = np.random.default_rng(7)
    apart = [0.5 * rng.standard_normal(row.logprobs.size).astype(np.float32) for row in rows]
    return [replace(row, reference_logprobs=row.logprobs + one) for row, one in zip(rows, apart, strict=True)]


def weights(held: TrainedStep) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in held.weights.copies().values()])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of five experts: two ranks part a fused tensor within one of them."""
    return save_model(tmp_path_factory.mktemp("mixture"), experts=5)


@pytest.mark.parametrize(
    ("stage", "lora", "objective", "bonus", "kind"),
    [
        (2, {}, "cispo", 0.1, "model"),
        (2, {"rank": 4}, "grpo", 0.0, "model"),
        (3, {}, "topr:topr", 0.0, "model"),
        (3, {"rank": 4}, "grpo", 0.1, "model"),
        (3, {}, "dr_grpo", 0.1, "model"),
        (2, {}, "gspo", 0.0, "mixture"),
        (3, {}, "gspo", 0.0, "mixture"),
    ],
)
def test_two_ranks_do_the_step_of_one_and_go_on_from_their_checkpoint_bit_for_bit(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: int,
    lora: dict[str, Any],
    objective: str,
    bonus: float,
) -> None:
    """liger divides by the number of ranks in some objectives: only the norm shows it, as Adam hides it."""
    model = request.getfixturevalue(kind)
    monkeypatch.syspath_prepend(str(OWN_OBJECTIVE))
    monkeypatch.setenv("PYTHONPATH", str(OWN_OBJECTIVE))
    changes = {
        "algorithm__updates_per_step": 2,
        "algorithm__objective": objective,
        "algorithm__entropy_bonus": bonus,
        "learner__lora": lora,
    }
    config = config_of(model, learner__ranks=2, learner__zero_stage=stage, **changes)
    found, digests = [], []
    with RankGroup(tmp_path / "two", config) as two:
        assert two.trainer.start(0).weights.digest() == weights_digest(load_file(model / "model.safetensors"))
        for step in range(3):
            held = two.train(step, rows_of(step))
            found.append((held.metrics, weights(held), held.drifts))
            digests.append(held.weights.digest())
            if step == 1:
                two.trainer.save()
        assert two.trainer.start(2).version == 2
        assert two.train(2, rows_of(2)).weights.digest() == digests[2]
    alone = config_of(model, **changes)
    with RankGroup(tmp_path / "one", alone) as one:
        one.trainer.start(0)
        for step, (metrics, theirs, drifts) in enumerate(found):
            held = one.train(step, rows_of(step))
            ours = weights(held)
            assert float((ours - theirs).norm() / ours.norm()) <= 2e-5
            assert metrics["gradient_norm"] == pytest.approx(held.metrics["gradient_norm"], rel=1e-5)
            assert metrics["loss"] == pytest.approx(held.metrics["loss"], abs=1e-5)
            assert metrics["trajectories"] == 12 and set(drifts) == set(held.drifts)
    with pytest.raises(ConfigError, match=r"made by 2 ranks, but learner.ranks is 1; continue with .*=2"):
        Trainer(config_of(model), two.trainer._checkpoints).start(2)


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["whole", "adapters"])
def test_two_ranks_make_the_same_of_a_reference_models_column_as_one(
    model: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    changes = {
        "reference__kl": 0.3,
        "reference__distillation": 0.5,
        "loop__filter": "none",
        "learner__lora": lora,
    }
    found: list[tuple[TrainedStep, torch.Tensor]] = []
    for ranks in (1, 2):
        config = config_of(model, learner__ranks=ranks, learner__zero_stage=2, **changes)
        with RankGroup(tmp_path / str(ranks), config) as group:
            group.trainer.start(0)
            held = group.train(0, referred(rows_of(0)))
            found.append((held, weights(held)))
    (one, ours), (two, theirs) = found
    assert float((ours - theirs).norm() / ours.norm()) <= 2e-5
    for name in ("gradient_norm", "loss", "reference_kl_k1", "reference_kl_k3"):
        assert one.metrics[name] == pytest.approx(two.metrics[name], rel=1e-5, abs=1e-5)
    assert one.metrics["reference_kl_k3"] > 0.01


def test_a_rank_of_stage_3_that_finds_too_little_says_so(model: Path, tmp_path: Path) -> None:
    lacking = tmp_path / "lacking"
    shutil.copytree(model, lacking)
    tensors = load_file(lacking / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, lacking / "model.safetensors")
    config = config_of(lacking, learner__ranks=2, learner__zero_stage=3)
    words = r"lacks 1 tensors, model\.norm\.weight"
    with RankGroup(tmp_path / "three", config) as three, pytest.raises(ConfigError, match=words):
        three.trainer.start(0)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (False, "there is no module half_loss"),
        (True, r"half_loss:loss has source \w{12} on rank 0, but \w{12} on rank 1; put the same"),
    ],
)
def test_an_objective_that_a_rank_lacks_or_has_otherwise_hangs_nobody(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, words: str
) -> None:
    code = "def loss(logprobs, behaviour_logprobs, advantages, mask):\n    return -logprobs * mask\n"
    for folder, text in (("here", code), ("there", f"{code}# again\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "half_loss.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    if there:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"))
    config = config_of(model, learner__ranks=2, algorithm__objective="half_loss:loss")
    with RankGroup(tmp_path / "two", config) as group, pytest.raises(ConfigError, match=words):
        group.trainer.start(0)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Probe]:
    """Digest and probe of version 0, by one rank."""
    with RankGroup(tmp_path_factory.mktemp("one"), config_of(model)) as one:
        weights = one.trainer.start(0).weights
        digest, probe = weights.digest(), weights.probe()
    assert probe is not None
    return digest, probe


@pytest.fixture(scope="module")
def two(
    model: Path, alone: tuple[str, Probe], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankGroup]:
    """Two ranks for the tests below, each of which has them begin again: they take seconds to start."""
    config = config_of(model, learner__ranks=2, learner__zero_stage=3)
    with RankGroup(tmp_path_factory.mktemp("two"), config) as group:
        yield group


def test_a_rank_of_stage_3_loads_its_part_alone_and_digests_it(
    alone: tuple[str, Probe], two: RankGroup
) -> None:
    digest, probe = alone
    weights = two.trainer.start(0).weights
    assert weights.digest() == digest
    found = weights.probe()
    assert found is not None and found.logprobs == pytest.approx(probe.logprobs, abs=1e-5)
    two.trainer.save()
    listed = json.loads((two.trainer._checkpoints.folder(0) / "contents.json").read_text())
    ranks = {name: re.search(r"rank_(\d)", name) for name in listed}
    assert {match[1] for match in ranks.values() if match} == {"0", "1"}
    assert two.trainer._checkpoints.problem(0) is None


def test_fewer_rows_than_ranks_hang_nobody(two: RankGroup) -> None:
    two.trainer.start(0)
    for step, count in enumerate((0, 1, 2, 3, 12)):
        assert two.train(step, rows_of(step, count)).metrics["trajectories"] == count


def test_what_one_rank_finds_all_raise_and_then_they_begin_again(two: RankGroup) -> None:
    digest = two.trainer.start(0).weights.digest()
    blamed = set()
    for place in range(12):
        rows = rows_of(0)
        rows[place] = replace(rows[place], advantage=float("nan"))
        with pytest.raises(IntegrityError) as refused:
            two.train(0, rows)
        words = rf"micro-batch \d+ of rank ([01]): the advantage of sample {place % 4} of group g"
        said = re.search(words, str(refused.value))
        assert said is not None
        blamed.add(said[1])
        assert two.trainer.version == -1
        if blamed == {"0", "1"}:
            break
        two.trainer.start(0)
    assert blamed == {"0", "1"}
    with pytest.raises(IntegrityError, match="the learner holds no version"):
        two.train(0, rows_of(0))
    assert two.trainer.start(0).weights.digest() == digest
    two.train(0, rows_of(0))


def test_an_error_in_the_middle_of_a_reading_leaves_the_ranks_together(two: RankGroup) -> None:
    held = two.trainer.start(0)
    digest = held.weights.digest()

    def refuse(part: memoryview) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        held.weights.read(lambda length: None, refuse)
    checked = replace(held.weights, check=lambda name, values: refuse(memoryview(b"")))
    with pytest.raises(OSError, match="no space"):
        checked.digest()
    assert held.weights.digest() == digest
    two.train(0, rows_of(0))
