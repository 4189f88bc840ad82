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
import torch

from antiphon.core.client_checks import check_call
from antiphon.core.client_records import CallResult, Datum, TrainingCall
from antiphon.core.config import RunConfig
from antiphon.core.errors import IntegrityError
from antiphon.core.records import FloatArray
from antiphon.services.learner.client_losses import FIGURES, NoNumber, make_client_batch
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
from antiphon.services.learner.progress import ProgressCounter

Figures = npt.NDArray[np.float64]


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
        self._pending = [(datum, None) for datum, _ in self._pending]
        self.digests.append(digest)
        return result

    def forward(self, call: TrainingCall) -> CallResult:
        """Return the result of a call without adding anything.

        Raises:
            ContractError, IntegrityError: as `add`; what is held stays.
        """
        self._check(call)
        return Accumulation(self._config, self._engine, self._progress)._stream(call, False, True)

    def close(self) -> Sums:
        """Compute what is left, so that the engine can step, and begin again; return what was summed.

        Without any data the gradient is zero: AdamW's moments decay, the weights follow them and the weight
        decay, as with torch's AdamW and gradients of zeros.

        Raises:
            IntegrityError: as `add`.
        """
        try:
            if self._pending:
                self._compute([], np.zeros((0, 0)), backward=True)
            elif not self._sums.micro_batches:
                zeros = np.zeros(1, dtype=np.float32)
                nothing = Datum(zeros.astype(np.int32), zeros.astype(np.int64), {"weights": zeros})
                self._engine.add_client(make_client_batch([nothing], "cross_entropy", {}, 1))
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
        kind, budget = (call.loss, call.config), self._config.learner.micro_batch_tokens
        for place, datum in enumerate(call.data):
            full = sum(len(one.token_ids) for one, _ in self._pending) + len(datum.token_ids) > budget
            if self._pending and (full or kind != self._kind):
                self._compute(logprobs, figures, backward)
                self._pending = []
            self._kind = kind
            self._pending.append((datum, place))
        if answer:
            self._compute(logprobs, figures, backward=False)
        return _result(call, logprobs, figures)

    def _compute(self, logprobs: list[FloatArray], figures: Figures, backward: bool) -> None:
        """Compute the open micro-batch, and write what is found of the present call's data."""
        data = [datum for datum, _ in self._pending]
        batch = make_client_batch(data, *self._kind, self._engine.vocabulary)
        try:
            found, of_rows = self._engine.add_client(batch, backward)
        except NoNumber as error:
            place = self._pending[error.place][1]  # as the client counts
            where = "a datum of an earlier call" if place is None else f"datum {place}"
            raise IntegrityError(
                f"{error.found} at {where}; look at its logprobs, weights and advantages"
            ) from None
        self._progress.add()
        real = torch.where(batch.positions.mask > 0, found, 0.0).numpy()
        rows = np.argsort(batch.order)
        for (datum, place), row in zip(self._pending, rows, strict=True):
            if place is not None:
                logprobs[place], figures[place] = real[row, : len(datum.targets)], of_rows[row]
        if backward:
            sums = self._sums
            # In the order of the stream, so that rounding too depends on it alone.
            added = sums.figures + of_rows[rows].sum(0)
            self._sums = Sums(added, sums.data + len(data), sums.micro_batches + 1)


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
