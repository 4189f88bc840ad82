"""Which micro-batches a stream of data makes, on an engine that only writes them down."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.client_records import Datum, TrainingCall
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import AntiphonError, IntegrityError
from antiphon.lineage.client_steps import encode_call
from antiphon.services.learner.accumulation import Accumulation
from antiphon.services.learner.client_losses import ClientBatch
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.ranks.group import ALONE, Ranks
from tests.support.client_calls import VOCABULARY, client_config, make_data

pytestmark = pytest.mark.engine
BUDGET = 64
KINDS: list[tuple[str, dict[str, float]]] = [("ppo", {}), ("ppo", {"clip_low_threshold": 0.5}), ("dro", {})]


class WritingEngine:
    """Gives each target minus itself as logprob; from its `fails`-th forward pass on, it raises `error`."""

    error: Exception = IntegrityError("the loss is nan")

    vocabulary = VOCABULARY

    def __init__(self, fails: int = 10**9) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.passes, self.fails = 0, fails

    def add_client(
        self, batch: ClientBatch, names: Sequence[str], backward: bool = True
    ) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
        self.passes += 1
        if self.passes >= self.fails:
            raise self.error
        positions = batch.positions
        rows = len(batch.order)
        if backward:
            said = (
                positions.input_ids.tolist(),
                positions.token_index.tolist(),
                batch.inputs["weight"].tolist(),
            )
            self.made.append((batch.loss, dict(batch.config), said))
        logprobs = -positions.pair_ids[positions.token_index].float()
        return logprobs, np.tile(np.array(batch.order, dtype=float)[:, None], (1, 5)) + rows

    def drop_gradients(self) -> None:
        self.made.clear()


class Unheard(Ranks):
    """One of several ranks, which the others hear nothing of: no decision depends on them."""

    def agree(self, problem: AntiphonError | None) -> None:
        if problem is not None:
            raise problem

    def collect(self, own: np.ndarray[Any, Any], lengths: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        assert own.size == lengths[self.rank] and len(lengths) == self.world
        return []


def accumulation(engine: WritingEngine, ranks: Ranks = ALONE) -> Accumulation:
    config = client_config("model", learner__micro_batch_tokens=BUDGET)  # type: ignore[arg-type]
    return Accumulation(config, engine, ProgressCounter(), ranks)  # type: ignore[arg-type]


def calls_of(stream: list[tuple[int, Datum]], cuts: set[int]) -> list[TrainingCall]:
    """Return a stream of data as calls that end at cuts, and wherever the loss changes."""
    calls: list[TrainingCall] = []
    for place, (kind, datum) in enumerate(stream):
        loss, config = KINDS[kind]
        if calls and place not in cuts and stream[place - 1][0] == kind:
            calls[-1] = TrainingCall(loss, config, (*calls[-1].data, datum))
        else:
            calls.append(TrainingCall(loss, config, (datum,)))
    return calls


@given(
    seed=st.integers(0, 99),
    kinds=st.lists(st.integers(0, 2), min_size=1, max_size=25).map(sorted),
    cuts=st.sets(st.integers(1, 24)),
    looks=st.booleans(),
)
def test_however_a_stream_is_cut_its_micro_batches_are_the_same(
    seed: int, kinds: list[int], cuts: set[int], looks: bool
) -> None:
    stream = list(zip(kinds, make_data(seed, len(kinds), "ppo"), strict=True))
    engine, held = WritingEngine(), None
    whole = accumulation(engine)
    for call in calls_of(stream, set()):
        whole.add(call, digest_bytes(encode_call(call)), answer=False)
    sums = whole.close()
    cut, other = WritingEngine(), None
    held = accumulation(cut)
    for call in calls_of(stream, cuts):
        if looks:
            held.forward(call)
        other = held.add(call, digest_bytes(encode_call(call)))
        for logprobs, datum in zip(other.logprobs, call.data, strict=True):
            np.testing.assert_array_equal(logprobs, -datum.targets.astype(np.float32))
    again = held.close()
    assert cut.made == engine.made and sums.micro_batches == len(engine.made)
    np.testing.assert_array_equal(sums.figures, again.figures)
    assert (sums.data, held.digests) == (len(stream), [])
    for _, _, (input_ids, *_) in engine.made:
        assert len(input_ids) <= BUDGET


@given(
    seed=st.integers(0, 99),
    kinds=st.lists(st.integers(0, 2), max_size=25).map(sorted),
    cuts=st.sets(st.integers(1, 24)),
    world=st.integers(1, 4),
)
def test_ranks_deal_the_micro_batches_of_a_stream_in_its_order_and_none_waits_for_ever(
    seed: int, kinds: list[int], cuts: set[int], world: int
) -> None:
    calls = calls_of(list(zip(kinds, make_data(seed, len(kinds), "ppo"), strict=True)), cuts)
    engines = [WritingEngine() for _ in range(world + 1)]
    alone = accumulation(engines[-1])
    every = [accumulation(engine, Unheard(rank, world)) for rank, engine in enumerate(engines[:-1])]
    for one in (alone, *every):
        for call in calls:
            one.forward(call)
            one.add(call, digest_bytes(encode_call(call)))
        assert one.close().micro_batches == (len(engines[-1].made) if kinds else 0)
    assert len({engine.passes for engine in engines[:-1]}) == 1
    rounds = zip(*(engine.made for engine in engines[:-1]), strict=True)
    made = [one for dealt in rounds for one in dealt]
    expected = engines[-1].made
    assert made[: len(expected)] == expected and len(made) - len(expected) < world
    for loss, _, (*_, weight) in made[len(expected) :]:
        assert loss == "cross_entropy" and not np.any(weight)


@pytest.mark.parametrize("error", [IntegrityError("the loss is nan"), RuntimeError("no memory: nan")])
def test_after_a_call_that_failed_half_way_nothing_is_held(error: Exception) -> None:
    engine = WritingEngine(fails=6)
    engine.error = error
    held, data = accumulation(engine), make_data(3, 30, "ppo")
    held.add(TrainingCall("ppo", {}, data[:4]), "first")
    assert held.digests == ["first"]
    with pytest.raises(type(error), match="nan"):
        held.add(TrainingCall("ppo", {}, data), "second")
    assert not held.digests and not engine.made


def test_a_step_without_data_computes_a_gradient_of_zeros() -> None:
    engine = WritingEngine()
    sums = accumulation(engine).close()
    assert sums.micro_batches == 0 and len(engine.made) == 1
    (made,) = engine.made
    assert made[0] == "cross_entropy" and not np.any(made[2][2])
