"""Accumulation: gradients of a client's calls add up, in micro-batches that their stream alone decides.

However a client cuts its data into calls, the same data in the same order make the same micro-batches, and so
the same bits. A micro-batch is filled in the order of the stream and computed once it is full, or when loss
or configuration change; what is left at the end of a call is computed once without gradients, for the answer,
and again with them when later data fill it or the step closes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.core.client_checks import check_call
from antiphon.core.client_records import CallResult, Datum, TrainingCall
from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError
from antiphon.core.records import FloatArray
from antiphon.services.learner.client_losses import FIGURES, make_client_batch
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
from antiphon.services.learner.progress import ProgressCounter

Figures = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class _Answers:
    """What is known of the data of one call."""

    logprobs: list[FloatArray]
    figures: Figures
    """[data, 5], as `FIGURES`."""

    @classmethod
    def of(cls, call: TrainingCall) -> "_Answers":
        empty = np.zeros(0, dtype=np.float32)
        return cls([empty] * len(call.data), np.zeros((len(call.data), len(FIGURES))))


@dataclass(frozen=True, slots=True)
class Sums:
    """What the calls of a step came to; it depends on the stream of data alone."""

    figures: Figures
    """[5], as `FIGURES`."""
    data: int
    micro_batches: int


class Accumulation:
    """The gradients since the newest version; for the training thread."""

    def __init__(self, config: RunConfig, engine: DeepSpeedEngine, progress: ProgressCounter) -> None:
        self._config, self._engine, self._progress = config, engine, progress
        self._begin()

    def _begin(self) -> None:
        self.digests: list[str] = []
        """Of the calls that are held, in order."""
        self._kind: tuple[str, Mapping[str, float]] = ("", {})
        self._pending: list[tuple[Datum, int | None]] = []
        """Data of the micro-batch that is being filled, and their places in the present call, if of it."""
        self._sums = Sums(np.zeros(len(FIGURES)), 0, 0)

    def add(self, call: TrainingCall, digest: str, answer: bool = True) -> CallResult | None:
        """Add the gradients of a call; return its result where an answer is wanted.

        Raises:
            ContractError: when it cannot be trained on; nothing was added then.
            IntegrityError: when its loss is no number; no call is held any more then.
        """
        self._check(call)
        answers = _Answers.of(call)
        try:
            for place, datum in enumerate(call.data):
                self._make_room(call, datum, answers)
                self._pending.append((datum, place))
            if answer:
                self._compute(answers, backward=False)
        except IntegrityError:
            self.drop()
            raise
        self._pending = [(datum, None) for datum, _ in self._pending]
        self.digests.append(digest)
        return _result(call, answers) if answer else None

    def forward(self, call: TrainingCall) -> CallResult:
        """Return the result of a call without adding anything.

        Raises:
            ContractError, IntegrityError: as `add`; what is held stays.
        """
        self._check(call)
        own = Accumulation(self._config, self._engine, self._progress)
        answers = _Answers.of(call)
        for place, datum in enumerate(call.data):
            own._make_room(call, datum, answers, backward=False)
            own._pending.append((datum, place))
        own._compute(answers, backward=False)
        return _result(call, answers)

    def close(self) -> Sums:
        """Compute what is left, so that the engine can step, and begin again; return what was summed.

        Without any data the gradient is zero: AdamW's moments decay, the weights follow them and the weight
        decay, as with torch's AdamW and gradients of zeros.

        Raises:
            IntegrityError: as `add`.
        """
        try:
            if self._pending:
                self._compute(None)
            elif not self._sums.micro_batches:
                zeros = np.zeros(1, dtype=np.float32)
                nothing = Datum(zeros.astype(np.int32), zeros.astype(np.int64), {"weights": zeros})
                self._engine.add_client(make_client_batch([nothing], "cross_entropy", {}, 1))
        except IntegrityError:
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
        check_call(
            call,
            self._engine.vocabulary,
            config.rollout.max_model_tokens,
            ours=config.door.stable_reinforce == "ours",
        )

    def _make_room(self, call: TrainingCall, datum: Datum, answers: _Answers, backward: bool = True) -> None:
        """Compute the micro-batch that is being filled, unless a datum of a call fits in."""
        kind = call.loss, call.config
        held = sum(len(one.token_ids) for one, _ in self._pending)
        full = held + len(datum.token_ids) > self._config.learner.micro_batch_tokens
        if self._pending and (full or kind != self._kind):
            self._compute(answers, backward)
            self._pending = []
        self._kind = kind

    def _compute(self, answers: _Answers | None, backward: bool = True) -> None:
        """Compute the pending data, and write what is found of those of the present call."""
        data = [datum for datum, _ in self._pending]
        batch = make_client_batch(data, *self._kind, self._engine.vocabulary)
        logprobs, figures = self._engine.add_client(batch, backward)
        self._progress.add()
        real = logprobs * batch.positions.mask
        rows = {place: row for row, place in enumerate(batch.order)}
        for number, (datum, place) in enumerate(self._pending):
            if answers is not None and place is not None:
                row = rows[number]
                answers.logprobs[place] = real[row, : len(datum.targets)].numpy()
                answers.figures[place] = figures[row]
        if backward:
            ordered = figures[[rows[number] for number in range(len(data))]].sum(0)
            sums = self._sums
            self._sums = Sums(sums.figures + ordered, sums.data + len(data), sums.micro_batches + 1)


def _result(call: TrainingCall, answers: _Answers) -> CallResult:
    sums = dict(zip(FIGURES, answers.figures.sum(0).tolist(), strict=True))
    tokens = sums["tokens"]
    metrics = {"loss:sum": sums["loss"], "tokens:sum": tokens}
    if call.loss != "cross_entropy":
        means = FIGURES[2:] if call.loss not in ("importance_sampling", "dro") else (FIGURES[2], FIGURES[4])
        metrics |= {f"{name}:mean": sums[name] / tokens if tokens else 0.0 for name in means}
    if call.loss == "stable_reinforce":
        metrics["stable_reinforce_is_ours:max"] = 1.0
        metrics["staleness:max"] = float(max(datum.inputs["staleness"].max() for datum in call.data))
    return CallResult(tuple(answers.logprobs), metrics)
