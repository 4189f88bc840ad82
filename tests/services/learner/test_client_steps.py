"""A client's steps on the real engine: the same bits however the data came, and after any kill."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from antiphon.core.client_records import (
    LOSSES,
    AdamParameters,
    Datum,
    LoadOrder,
    SavedWeights,
    TrainingCall,
)
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.lineage.client_steps import encode_call, encode_step
from antiphon.lineage.saved_weights import drop_saved, read_note
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import pin_numerics
from antiphon.services.learner.saved import SavedFolder
from antiphon.services.learner.step import Trainer
from antiphon.services.learner.training import TrainedStep
from tests.support.client_calls import VOCABULARY, chunks, client_config, make_call, make_data

pytestmark = pytest.mark.engine
ADAM = AdamParameters(learning_rate=1e-2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(shape).save_pretrained(path)
    return path


class Trainers:
    """Makes trainers of runs beside each other, and ends them."""

    def __init__(self, model: Path, home: Path) -> None:
        self._model, self._home = model, home
        self._made: list[Trainer] = []

    def saved(self, run: str) -> SavedFolder:
        return SavedFolder(self._home / run)

    def __call__(self, run: str = "run", **changes: Any) -> Trainer:
        pin_numerics(1)
        checkpoints = CheckpointStore(self._home / run / "checkpoints", 2)
        trainer = Trainer(client_config(self._model, **changes), checkpoints, saved=self.saved(run))
        trainer.start(10**6)
        self._made.append(trainer)
        return trainer

    def close(self) -> None:
        for trainer in self._made:
            trainer.stop()


@pytest.fixture
def trainers(model: Path, tmp_path: Path) -> Iterator[Trainers]:
    made = Trainers(model, tmp_path)
    yield made
    made.close()


def give(trainer: Trainer, calls: Sequence[TrainingCall]) -> list[np.ndarray[Any, Any]]:
    """Have calls done one after the other; return the logprobs of all data."""
    found = []
    for call in calls:
        found += trainer.call(call, digest_bytes(encode_call(call))).logprobs
    return found


def step(trainer: Trainer, calls: Sequence[TrainingCall], adam: AdamParameters = ADAM) -> TrainedStep:
    return trainer.train(trainer.version, encode_step(calls, adam))


def digest(held: TrainedStep) -> str:
    return str(held.weights.digest())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"learner__zero_stage": 1},
        {"learner__zero_stage": 2},
        {"learner__zero_stage": 3},
        {"learner__dtype": "bfloat16"},
        {"learner__lora": {"rank": 4}},
    ],
    ids=str,
)
def test_one_chunk_seven_chunks_and_a_restart_give_equal_weights(
    trainers: Trainers, changes: dict[str, Any]
) -> None:
    whole = make_call(1, 30, "ppo")
    one = trainers("one", **changes)
    base = digest(TrainedStep(0, one._held().weights(), {}))
    answered = give(one, [whole])
    made = step(one, [whole])
    first = digest(made)
    assert first != base and made.metrics["gradient_norm"] > 0 and made.metrics["learning_rate"] == 1e-2
    one.stop()

    seven = trainers("seven", **changes)
    parts = chunks(whole, 7)
    again = give(seven, parts)
    # Calls that only look do not disturb what is held.
    give(seven, [TrainingCall("cross_entropy", {}, make_data(9, 3), forward_only=True)])
    chunked = step(seven, parts)
    assert digest(chunked) == first
    figures = {name: value for name, value in chunked.metrics.items() if name != "train_s"}
    assert figures == {name: made.metrics[name] for name in figures}
    for own, other in zip(answered, again, strict=True):
        np.testing.assert_allclose(own, other, atol=5e-2 if "learner__dtype" in changes else 1e-4)
    seven.stop()

    killed = trainers("killed", **changes)  # it held some calls before
    assert digest(step(killed, parts)) == first
    later = make_call(2, 5)
    give(killed, [make_call(3, 9)])  # of a client that then takes another step: they are dropped
    second = digest(step(killed, [later]))
    killed.stop()
    fresh = trainers("fresh", **changes)
    step(fresh, parts)
    assert digest(step(fresh, [later])) == second


def test_every_loss_trains_and_answers_with_the_policys_logprobs(trainers: Trainers) -> None:
    trainer = trainers(door__stable_reinforce="ours")
    seen = set()
    for loss in LOSSES:
        call = make_call(4, 6, loss)
        looked = trainer.call(TrainingCall(loss, {}, call.data, forward_only=True), "0")
        assert not trainer.held_calls()
        result = trainer.call(call, digest_bytes(encode_call(call)))
        for own, other, datum in zip(result.logprobs, looked.logprobs, call.data, strict=True):
            assert len(own) == len(datum.targets) and (own < 0).all()
            np.testing.assert_allclose(own, other, atol=1e-5)
        counted = sum(
            int((datum.inputs[name] != 0).sum())
            for datum in call.data
            for name in ("weights", "advantages")
            if name in datum.inputs
        )
        assert result.metrics["tokens:sum"] == counted
        assert ("stable_reinforce_is_ours:max" in result.metrics) == (loss == "stable_reinforce")
        seen.add(digest(step(trainer, [call])))
    assert len(seen) == len(LOSSES)


@pytest.mark.parametrize("stage", range(4))
def test_the_gradient_is_that_of_the_sum_over_positions(model: Path, trainers: Trainers, stage: int) -> None:
    """Against transformers' own forward pass and torch's own AdamW."""
    call = make_call(5, 12)
    adam = AdamParameters(1e-2, 0.8, 0.9, 1e-8, 0.1, 0.5)
    trainer = trainers(learner__zero_stage=stage)
    parts = chunks(call, 3)
    held = give(trainer, parts)
    made = step(trainer, parts, adam)
    plain = Qwen3ForCausalLM.from_pretrained(model)
    total = torch.zeros(())
    for datum, logprobs in zip(call.data, held, strict=True):
        logits = plain(torch.from_numpy(datum.token_ids.astype(np.int64))[None]).logits[0]
        own = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, own.detach().numpy(), atol=1e-5)
        total = total - (own * torch.from_numpy(datum.inputs["weights"])).sum()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2, (0.8, 0.9), 1e-8, 0.1)
    optimizer.step()
    assert made.metrics["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert made.metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    ours = made.weights.copies()
    with torch.no_grad():
        apart = [(ours[name] - one).abs().flatten() for name, one in plain.named_parameters() if name in ours]
    # Adam's first step is of the size of the rate, whatever the gradient: rounding of tiny ones shows.
    assert float(torch.cat(apart).mean()) < 1e-6 and float(torch.cat(apart).max()) < 2e-3


def test_a_step_without_calls_moves_as_adam_does_with_a_gradient_of_zeros(trainers: Trainers) -> None:
    trainer = trainers()
    before = digest(step(trainer, [make_call()]))
    after = step(trainer, [])
    assert digest(after) != before and after.metrics["gradient_norm"] == 0.0
    still = step(trainer, [], AdamParameters(learning_rate=0.0))
    assert digest(still) == digest(TrainedStep(3, trainer._held().weights(), {}))


def test_a_loss_that_is_no_number_leaves_no_gradient(trainers: Trainers) -> None:
    trainer, good = trainers(), make_call(6, 8, "importance_sampling")
    expected = digest(step(trainers("other"), [good]))
    give(trainer, [good])
    far = [
        Datum(d.token_ids, d.targets, d.inputs | {"logprobs": d.inputs["logprobs"] * 0 - 500})
        for d in good.data
    ]
    with pytest.raises(IntegrityError, match=r"importance_sampling is .*(inf|nan)"):
        give(
            trainer,
            [TrainingCall("importance_sampling", {}, (*make_call(7, 9, "importance_sampling").data, *far))],
        )
    assert not trainer.held_calls()  # the earlier ones are to be given again
    assert digest(step(trainer, [good])) == expected


def test_what_cannot_be_trained_on_adds_nothing(trainers: Trainers) -> None:
    trainer, good = trainers(), make_call()
    give(trainer, [good])
    for bad, words in (
        (TrainingCall("dpo", {}, good.data), "no loss 'dpo'"),
        (
            TrainingCall("stable_reinforce", {}, make_data(0, 2, "stable_reinforce")),
            "door.stable_reinforce=ours",
        ),
        (TrainingCall("ppo", {}, good.data), "datum 0 has no logprobs"),
    ):
        with pytest.raises(ContractError, match=words):
            trainer.call(bad, "0")
    assert len(trainer.held_calls()) == 1
    with pytest.raises(IntegrityError, match="learning_rate=nan"):
        step(trainer, [good], AdamParameters(learning_rate=float("nan")))
    assert digest(step(trainer, [good])) == digest(step(trainers("other"), [good]))


@pytest.mark.parametrize(
    "changes", [{}, {"learner__dtype": "bfloat16"}, {"learner__lora": {"rank": 4}}], ids=str
)
def test_saved_weights_are_loaded_with_and_without_their_optimizer(
    trainers: Trainers, changes: dict[str, Any]
) -> None:
    first, call = trainers("first", **changes), make_call()
    held = step(first, [call])
    kept = digest(held)
    folder = trainers.saved("first")
    first.save_to(folder.checkpoints("a"))
    folder.write("weights", "a", 1, kept)
    place = folder.checkpoints("a").root
    assert (note := read_note(place)) is not None and note.bytes > 1000
    goes_on = digest(step(first, [call]))
    source = SavedWeights("first", "weights", "a")

    second = trainers("second", **changes, run__seed=7)
    give(second, [make_call(8)])  # dropped by the load
    loaded = second.train(0, encode_step([], LoadOrder(source, True, kept)))
    assert digest(loaded) == kept and loaded.version == 1
    assert digest(step(second, [call])) == goes_on
    anew = second.train(2, encode_step([], LoadOrder(source, False, kept)))
    assert digest(anew) == kept
    assert digest(step(second, [call])) != goes_on
    with pytest.raises(IntegrityError, match="tinker://first/weights/b is not there"):
        second.train(4, encode_step([], LoadOrder(SavedWeights("first", "weights", "b"), True, kept)))
    drop_saved(place.parents[2], "weights", "a")
    assert read_note(place) is None


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_a_ratio_that_overflows_is_refused_before_it_spoils_the_gradients(
    trainers: Trainers, loss: str
) -> None:
    """Where it is clipped away the loss is a number, and autograd's 0 x inf none."""
    trainer, good = trainers(), make_call(6, 4, loss)
    far = [
        replace(
            one,
            inputs={
                name: abs(values) * (300.0 if name == "logprobs" else 1.0)
                for name, values in one.inputs.items()
            },
        )
        for one in good.data
    ]
    far = [replace(one, inputs={**one.inputs, "logprobs": -one.inputs["logprobs"]}) for one in far]
    with pytest.raises(
        IntegrityError, match=f"the loss {loss} is .* its ratio overflows, at datum 1;"
    ) as raised:
        give(trainer, [good, TrainingCall(loss, {}, (good.data[0], *far[1:]))])
    assert type(raised.value) is IntegrityError  # so that it arrives as one at other processes
    assert not trainer.held_calls()
    give(trainer, [good])
    assert step(trainer, [good]).metrics["gradient_norm"] > 0


@pytest.mark.parametrize("stage", range(4))
def test_loading_without_the_optimizer_begins_with_no_moments(trainers: Trainers, stage: int) -> None:
    calls = [make_call(seed, 6) for seed in range(3)]
    trainer = trainers("run", learner__zero_stage=stage)
    first = digest(step(trainer, [calls[0]]))
    trainer.save_to(trainers.saved("run").checkpoints("a"))
    trainer.stop()
    ends = []
    for name, optimizer in (("fresh", False), ("used", False), ("whole", True)):
        other = trainers(name, learner__zero_stage=stage)
        if name == "used":
            step(other, [calls[1]])
        order = LoadOrder(SavedWeights("run", "weights", "a"), optimizer, first)
        assert digest(other.train(other.version, encode_step((), order))) == first
        ends.append(digest(step(other, [calls[2]])))
        other.stop()
    assert ends[0] == ends[1] != ends[2]


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_load_is_repeated_after_what_was_saved_is_gone(trainers: Trainers, optimizer: bool) -> None:
    """A learner may go back before a load, for a snapshot that is missing."""
    trainer, calls = trainers("run"), [make_call(seed, 6) for seed in range(2)]
    first = digest(step(trainer, [calls[0]]))
    trainer.save_to(trainers.saved("run").checkpoints("a"))
    load = encode_step((), LoadOrder(SavedWeights("run", "weights", "a"), optimizer, first))
    trainer.train(1, load)
    trainer.save()
    wanted = digest(step(trainer, [calls[1]]))
    drop_saved(trainers.saved("run").checkpoints("a").root.parents[2], "weights", "a")
    trainer.begin(None)
    step(trainer, [calls[0]])
    assert digest(trainer.train(1, load)) == first
    assert digest(step(trainer, [calls[1]])) == wanted
