"""A client's calls on several ranks: the gradient of one rank, and the same bits however the data came."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.core.client_records import AdamParameters, LoadOrder, SavedWeights, TrainingCall
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.lineage.client_steps import encode_call, encode_step
from antiphon.services.learner.step import Trainer
from antiphon.services.learner.training import TrainedStep
from tests.support.client_calls import chunks, client_config, make_call, make_data
from tests.support.rank_groups import RankGroup
from tests.support.replay_artifacts import save_model

pytestmark = pytest.mark.engine
ADAM = AdamParameters(learning_rate=1e-3, eps=1e-6, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def group_of(folder: Path, model: Path, ranks: int = 2, **changes: Any) -> RankGroup:
    return RankGroup(folder, client_config(model, learner__ranks=ranks, **changes))


def give(trainer: Trainer, calls: Sequence[TrainingCall]) -> list[np.ndarray[Any, Any]]:
    """Have calls done one after the other; return the logprobs of all data."""
    found: list[np.ndarray[Any, Any]] = []
    for call in calls:
        found += trainer.call(call, digest_bytes(encode_call(call))).logprobs
    return found


def step(group: RankGroup, calls: Sequence[TrainingCall], adam: AdamParameters = ADAM) -> TrainedStep:
    return group.train_on(group.trainer.version, encode_step(calls, adam))


def weights(held: TrainedStep) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in held.weights.copies().values()])


@pytest.mark.parametrize(
    ("stage", "lora"), [(1, {}), (2, {}), (3, {}), (2, {"rank": 4}), (3, {"rank": 4})], ids=str
)
def test_two_ranks_do_a_clients_step_as_one_whatever_the_cut_into_calls(
    model: Path, tmp_path: Path, stage: int, lora: dict[str, Any]
) -> None:
    changes = {"learner__zero_stage": stage, "learner__lora": lora}
    whole, later = make_call(1, 30, "ppo"), make_call(2, 3)
    mixed = [make_call(3, 5), make_call(4, 5, "cispo"), make_call(5, 1)]
    with group_of(tmp_path / "one", model, 1, **changes) as one:
        one.trainer.start(0)
        answers = give(one.trainer, [whole])
        alone = [step(one, [whole])]
        norms, values = [alone[0].metrics["gradient_norm"]], [weights(alone[0])]
        for calls in (mixed, []):
            made = step(one, calls)
            norms.append(made.metrics["gradient_norm"])
            values.append(weights(made))
        figures = made.metrics
    with group_of(tmp_path / "two", model, **changes) as two:
        trainer = two.trainer
        found = []
        for count in (1, 7, 30):
            trainer.start(0)
            parts = chunks(whole, count)
            answered = give(trainer, parts)
            for own, other in zip(answered, answers, strict=True):
                np.testing.assert_allclose(own, other, atol=1e-4)
            looked = trainer.call(
                TrainingCall("cross_entropy", {}, make_data(9, 3), forward_only=True), "0" * 64
            )
            assert len(looked.logprobs) == 3 and len(trainer.held_calls()) == count
            made = step(two, parts)
            found.append((made.weights.digest(), {**made.metrics, "train_s": 0.0}))
        assert found[0] == found[1] == found[2]
        assert found[0][1]["micro_batches"] == alone[0].metrics["micro_batches"]
        ours = [made]
        held = [(made.metrics["gradient_norm"], weights(made))]
        give(trainer, [make_call(8, 9)])  # of a client that then takes another step: they are dropped
        for calls in (mixed, []):  # the last has no data at all
            made = step(two, calls)
            held.append((made.metrics["gradient_norm"], weights(made)))
        assert {**made.metrics, "train_s": 0.0} == pytest.approx({**figures, "train_s": 0.0}, abs=1e-5)
        goes_on = step(two, [later]).weights.digest()
        trainer.start(0)  # after a restart
        for calls in ([whole], mixed, []):
            step(two, calls)
        assert step(two, [later]).weights.digest() == goes_on
    assert ours[0].exactness == "exact on CPU x 2"
    for norm, expected, (theirs, changed) in zip(norms, values, held, strict=True):
        assert theirs == pytest.approx(norm, rel=1e-5)
        assert float((changed - expected).norm() / expected.norm()) <= 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_refused_leaves_nothing_on_any_rank(model: Path, tmp_path: Path, stage: int) -> None:
    loss = "importance_sampling"
    good, data = make_call(6, 8, loss), list(make_data(7, 12, loss))
    with group_of(tmp_path, model, learner__zero_stage=stage) as two:
        trainer = two.trainer
        trainer.start(0)
        expected = step(two, [good]).weights.digest()
        for place in (0, 11):  # a micro-batch of rank 0, and one later of whichever has it
            trainer.start(0)
            give(trainer, [good])
            far = data[place].inputs["logprobs"] * 0 - 500
            bad = [*data]
            bad[place] = replace(data[place], inputs={**data[place].inputs, "logprobs": far})
            with pytest.raises(IntegrityError, match=r"importance_sampling is .*(inf|nan)"):
                give(trainer, [TrainingCall(loss, {}, tuple(bad))])
            assert not trainer.held_calls()
            assert step(two, [good]).weights.digest() == expected
        trainer.start(0)
        give(trainer, [good])
        first = data[0]
        no_number = {**first.inputs, "logprobs": first.inputs["logprobs"] * np.nan}
        for wrong, words in (
            (TrainingCall("dpo", {}, good.data), "no loss 'dpo'"),
            (TrainingCall("ppo", {}, make_data(0, 2)), "datum 0 has no logprobs"),
            (TrainingCall(loss, {}, (first, replace(first, inputs=no_number))), "logprobs of datum 1 is nan"),
            (TrainingCall(loss, {}, (replace(first, targets=first.targets[1:]),)), "give as many of each"),
        ):
            with pytest.raises(ContractError, match=words):
                trainer.call(wrong, "0" * 64)
        assert len(trainer.held_calls()) == 1
        with pytest.raises(IntegrityError, match="learning_rate=nan"):
            step(two, [good], AdamParameters(learning_rate=float("nan")))
        trainer.forget_calls()
        give(trainer, [good])
        assert step(two, [good]).weights.digest() == expected


@pytest.mark.parametrize(("stage", "lora"), [(1, {}), (2, {"rank": 4}), (3, {})], ids=str)
def test_two_ranks_save_and_load_with_and_without_the_optimizer(
    model: Path, tmp_path: Path, stage: int, lora: dict[str, Any]
) -> None:
    call, changes = make_call(), {"learner__zero_stage": stage, "learner__lora": lora}
    with group_of(tmp_path / "one", model, 1, **changes) as one:
        one.trainer.start(0)
        alone = step(one, [call]).weights.digest()
        one.trainer.save_to(one.saved.checkpoints("a"))
        one.saved.write("weights", "a", 1, alone)
    with group_of(tmp_path / "two", model, **changes) as two:
        trainer, source = two.trainer, SavedWeights("two", "weights", "a")
        trainer.start(0)
        kept = step(two, [call]).weights.digest()
        trainer.save_to(two.saved.checkpoints("a"))
        two.saved.write("weights", "a", 1, kept)
        goes_on = step(two, [call]).weights.digest()

        def load(optimizer: bool, digest: str = kept, source: SavedWeights = source) -> TrainedStep:
            give(trainer, [make_call(8)])  # dropped by the load
            return two.train_on(trainer.version, encode_step([], LoadOrder(source, optimizer, digest)))

        loaded = load(True)
        assert loaded.weights.digest() == kept and loaded.version == 3 and loaded.loaded
        assert step(two, [call]).weights.digest() == goes_on
        trainer.save()
        for _ in range(2):
            load(False)
            anew = step(two, [call]).weights.digest()
            assert anew != goes_on
        for order, words in (
            ((True, kept, SavedWeights("two", "weights", "b")), "two/weights/b is not there"),
            ((True, "0" * 64), "saved again since"),
            ((True, alone, SavedWeights("one", "weights", "a")), "saved by 1 ranks, but learner.ranks is 2"),
        ):
            with pytest.raises(IntegrityError, match=words):
                load(*order)
            assert trainer.start(4).version == 4  # as the service does
        assert step(two, []).version == 5


@pytest.mark.parametrize("stage", [2, 3])
def test_saved_weights_that_rank_0_alone_sees_are_refused_by_all(
    model: Path, tmp_path: Path, stage: int
) -> None:
    folder, call = tmp_path / "two", make_call(1, 4)
    with group_of(folder, model, learner__zero_stage=stage) as two:
        two.trainer.start(0)
        kept = step(two, [call]).weights.digest()
        two.trainer.save_to(two.saved.checkpoints("a"))
        two.saved.write("weights", "a", 1, kept)
    config = client_config(model, learner__ranks=2, learner__zero_stage=stage)
    with RankGroup(folder, config, tmp_path / "elsewhere" / "checkpoints") as two:
        two.trainer.start(0)
        order = LoadOrder(SavedWeights("two", "weights", "a"), True, kept)
        with pytest.raises(IntegrityError, match="rank 1 does not have the weights tinker://two/weights/a"):
            two.train_on(0, encode_step([], order))
        two.trainer.start(0)  # as the service does
        assert step(two, [call]).weights.digest() == kept


def test_a_rank_that_dies_between_calls_ends_none_but_its_group(model: Path, tmp_path: Path) -> None:
    call = make_call(1, 12)
    with group_of(tmp_path, model, learner__zero_stage=2) as two:
        two.trainer.start(0)
        expected = step(two, [call]).weights.digest()
    with group_of(tmp_path, model, learner__zero_stage=2) as two:
        two.trainer.start(0)
        first, second = chunks(call, 2)
        give(two.trainer, [first])
        two.processes[0].send_signal(signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"rank 1 of the learner was ended by SIGKILL"):
            give(two.trainer, [second])
    with group_of(tmp_path, model, learner__zero_stage=2) as two:  # what the supervisor does
        two.trainer.start(0)
        assert step(two, [first, second]).weights.digest() == expected
