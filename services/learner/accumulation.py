"""Accumulation: gradients of a client's calls add up, in micro-batches that their stream alone decides.

However a client cuts its data into calls, the same data in the same order make the same micro-batches, and so
the same bits. A micro-batch is filled in the order of the stream until it is full, or loss or configuration
change. They are computed in rounds, one by each rank in the order of the ranks, when the last one of a round
is full. What is left at the end of a call is computed once without gradients, for the answer, and again with
them when later data fill the round or the step closes it. Every rank does all calls; only rank 0 has their
figures and results.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.client_checks import check_call
from antiphon.core.client_records import CallResult, Datum, TrainingCall
from antiphon.core.config import RunConfig
from antiphon.core.records import FloatArray
from antiphon.services.learner.client_losses import FIGURES, make_client_batch
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.ranks.group import Ranks

Figures = npt.NDArray[np.float64]
_NOTHING = Datum(
    np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64), {"weights": np.zeros(1, dtype=np.float32)}
)
"""Has no weight, and so a gradient of zeros."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What the calls of a step came to; it depends on the stream of data alone."""

    figures: Figures
    """[5], as `FIGURES`."""
    data: int
    micro_batches: int


@dataclass(slots=True)
class _Open:
    """A micro-batch that was not computed with gradients yet."""

    loss: str
    config: Mapping[str, float]
    data: list[Datum] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)
    """Of the data in the present call; None for those of earlier ones."""


class Accumulation:
    """The gradients since the newest version; for the training thread of each rank."""

    def __init__(
        self, config: RunConfig, engine: DeepSpeedEngine, progress: ProgressCounter, ranks: Ranks
    ) -> None:
        self._config, self._engine, self._progress, self._ranks = config, engine, progress, ranks
        self._begin()

    def _begin(self) -> None:
        self.digests: list[str] = []
        """Of the calls that are held, in order."""
        self._round: list[_Open] = []
        """At most one for each rank; the last is being filled."""
        self._sums = Sums(np.zeros(len(FIGURES)), 0, 0)

    def add(self, call: TrainingCall, digest: str, answer: bool = True) -> CallResult:
        """Add the gradients of a call; return its result, which means nothing where no answer is wanted.

        Raises:
            ContractError: when it cannot be trained on; nothing was added then.
            IntegrityError: when its loss is no number; no call is held any more then, nor after other errors.
        """
        self._check(call)
        try:
            result = self._stream(call, True, answer)
        except BaseException:  # whatever it was, a part of the call may be added up
            self.drop()
            raise
        for part in self._round:
            part.places = [None] * len(part.data)
        self.digests.append(digest)
        return result

    def forward(self, call: TrainingCall) -> CallResult:
        """Return the result of a call without adding anything.

        Raises:
            ContractError, IntegrityError: as `add`; what is held stays.
        """
        self._check(call)
        other = Accumulation(self._config, self._engine, self._progress, self._ranks)
        return other._stream(call, False, True)

    def close(self) -> Sums:
        """Compute what is left, so that the engine can step, and begin again; return what was summed.

        Without any data the gradient is zero: AdamW's moments decay, the weights follow them and the weight
        decay, as with torch's AdamW and gradients of zeros.

        Raises:
            IntegrityError: as `add`.
        """
        try:
            if self._round or not self._sums.micro_batches:
                self._compute([], np.zeros((0, 0)), backward=True)
        except BaseException:
            self.drop()
            raise
        found = self._sums
        self._begin()
        return found

    def drop(self) -> None:
        """Forget all calls."""
        self._engine.drop_gradients()
        self._begin()

    def _check(self, call: TrainingCall) -> None:
        config = self._config
        with self._ranks.together():
            check_call(
                call,
                self._engine.vocabulary,
                config.rollout.max_model_tokens,
                ours=config.door.stable_reinforce == "ours",
            )

    def _stream(self, call: TrainingCall, backward: bool, answer: bool) -> CallResult:
        """Fill micro-batches with the data of a call; the last one stays open."""
        logprobs: list[FloatArray] = [np.zeros(0, dtype=np.float32)] * len(call.data)
        figures = np.zeros((len(call.data), len(FIGURES)))
        budget = self._config.learner.micro_batch_tokens
        for place, datum in enumerate(call.data):
            last = self._round[-1] if self._round else None
            full = (
                last is None or sum(len(one.token_ids) for one in last.data) + len(datum.token_ids) > budget
            )
            if last is None or full or (last.loss, last.config) != (call.loss, call.config):
                if len(self._round) == self._ranks.world:
                    self._compute(logprobs, figures, backward)
                    self._round = []
                last = _Open(call.loss, call.config)
                self._round.append(last)
            last.data.append(datum)
            last.places.append(place)
        if answer:
            self._compute(logprobs, figures, backward=False)
        return _result(call, logprobs, figures)

    def _compute(self, logprobs: list[FloatArray], figures: Figures, backward: bool) -> None:
        """Compute the round, each rank its part, and write what is found of the present call's data."""
        ranks, parts = self._ranks, self._round
        idle = ranks.rank >= len(parts)
        # The other ranks wait for each one's part.
        own = _Open("cross_entropy", {}, [_NOTHING]) if idle else parts[ranks.rank]
        batch = make_client_batch(own.data, own.loss, own.config, self._engine.vocabulary)
        # As the client counts them.
        names = ["a datum of an earlier call" if at is None else f"datum {at}" for at in own.places]
        found, of_rows = self._engine.add_client(batch, names or [""], backward)
        self._progress.add()
        real = torch.where(batch.positions.mask > 0, found, 0.0).double().numpy()
        rows = np.argsort(batch.order)
        targets = [real[row, : len(datum.targets)] for datum, row in zip(own.data, rows, strict=True)]
        flat = np.concatenate([of_rows[rows].ravel(), *targets])
        lengths = [sum(len(FIGURES) + len(datum.targets) for datum in part.data) for part in parts]
        lengths += [0] * (ranks.world - len(parts))
        added = self._sums.figures
        for part, told in zip(parts, ranks.collect(flat[: lengths[ranks.rank]], lengths), strict=False):
            of_data = told[: len(FIGURES) * len(part.data)].reshape(-1, len(FIGURES))
            ends = np.cumsum([of_data.size, *(len(datum.targets) for datum in part.data)])
            for place, start, stop, sums in zip(part.places, ends[:-1], ends[1:], of_data, strict=True):
                if place is not None:
                    logprobs[place], figures[place] = told[start:stop].astype(np.float32), sums
            # In the order of the stream, so that rounding too depends on it alone.
            added = added + of_data.sum(0)
        if backward:
            data = self._sums.data + sum(len(part.data) for part in parts)
            self._sums = Sums(added, data, self._sums.micro_batches + len(parts))


def _result(call: TrainingCall, logprobs: list[FloatArray], figures: Figures) -> CallResult:
    sums = dict(zip(FIGURES, figures.sum(0).tolist(), strict=True))
    tokens = sums["tokens"]
    metrics = {"loss:sum": sums["loss"], "tokens:sum": tokens}
    if call.loss != "cross_entropy":
        means = FIGURES[2:] if call.loss not in ("importance_sampling", "dro") else (FIGURES[2], FIGURES[4])
        metrics |= {f"{name}:mean": sums[name] / tokens if tokens else 0.0 for name in means}
    if call.loss == "stable_reinforce":
        metrics["stable_reinforce_is_ours:max"] = 1.0
        metrics["staleness:max"] = float(max(datum.inputs["staleness"].max() for datum in call.data))
    return CallResult(tuple(logprobs), metrics)
