"""Replay: what was recorded against what came out again, and the first difference.

A step is equal when its weights have the recorded digest and every metric it reports has the
recorded value, bit for bit. Log-probabilities come from another program than the one that sampled,
so they are compared within a tolerance. Nothing here computes a step; it only compares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf, isnan
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ConfigError

LOGPROB_TOLERANCE = 1e-5
"""Nats by which a re-scored log-probability may differ: float32 rounding of two implementations."""
LOGPROB_SHARE = 0.99
"""Least share within the tolerance: rounding leaves a few of a thousand outside, other weights most."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that came out differently."""

    name: str
    elements: int
    different: int
    """Elements that are not equal."""
    largest: float
    """Largest absolute difference; infinite when the shapes differ."""
    scale: float
    """Largest absolute value recorded."""
    others: int = 0
    """Further tensors of the version that differ as well."""

    def words(self) -> str:
        """Say it in one clause.

        >>> TensorDifference("head.weight", 100, 3, 2.5e-7, 1.5).words()
        'tensor head.weight differs in 3 of 100 elements by at most 2.5e-07 (largest value 1.5)'
        """
        if isinf(self.largest):
            return f"tensor {self.name} is missing or has another shape"
        more = f", {self.others} more differ" if self.others else ""
        return (
            f"tensor {self.name} differs in {self.different} of {self.elements} elements by at most "
            f"{self.largest:.3g} (largest value {self.scale:.3g}){more}"
        )


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """One metric of a step that came out differently."""

    name: str
    recorded: float | None
    """None where the record does not have it."""
    found: float | None

    def words(self) -> str:
        """Say it in one clause.

        >>> MetricDifference("loss", 0.5, 0.75).words()
        'loss was 0.5 and is 0.75, 0.25 apart'
        """
        if self.recorded is None or self.found is None:
            side = "record" if self.recorded is None else "replay"
            return f"{self.name} is not in the {side}"
        apart = abs(self.found - self.recorded)
        return f"{self.name} was {self.recorded!r} and is {self.found!r}, {apart:.3g} apart"


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One re-executed step against its record."""

    step: int
    version: int
    recorded_digest: str
    found_digest: str
    metrics: tuple[MetricDifference, ...]
    """Metrics that differ; empty when all are equal."""
    tensor: TensorDifference | None = None
    """The first tensor that differs, where the recorded weights are at hand."""
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Return whether weights and metrics are the recorded ones, bit for bit."""
        return self.found_digest == self.recorded_digest and not self.metrics

    def words(self) -> str:
        if self.equal:
            return f"step {self.step}: version {self.version} again, bit for bit"
        if self.found_digest == self.recorded_digest:
            return f"step {self.step}: the same weights, but {self.metrics[0].words()}"
        parts = [
            f"step {self.step}: version {self.version} has weights {self.found_digest[:12]} "
            f"instead of {self.recorded_digest[:12]}"
        ]
        if self.tensor is not None:
            parts.append(self.tensor.words())
        parts += [metric.words() for metric in self.metrics[:1]]
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class LogprobCheck:
    """Recorded behaviour log-probabilities of one batch against those scored again."""

    step: int
    tokens: int
    within: int
    """Tokens whose log-probability lies within `LOGPROB_TOLERANCE`."""
    largest: float
    """Largest difference, nats; infinite for a token that its distribution rules out."""
    where: str
    """Group, sample, token and version of the largest difference."""
    unscored: int = 0
    """Tokens whose version has no weights in the record; counted in `tokens`, never as within."""
    kept_cache: int = 0
    """Tokens sampled over a kept cache, whose logprobs no clean pass gives; `tokens` does not count them."""

    def words(self) -> str:
        said = f"step {self.step}: {self.within} of {self.tokens} logprobs within {LOGPROB_TOLERANCE:g}"
        if self.tokens > self.unscored:
            said += f", largest difference {self.largest:.3g} nats at {self.where}"
        if self.unscored:
            said += f"; {self.unscored} tokens were sampled by versions whose weights are not in the record"
        if self.kept_cache:
            said += f"; {self.kept_cache} further tokens were sampled over a kept cache and are not compared"
        return said


def compare_metrics(
    recorded: Mapping[str, float], found: Mapping[str, float]
) -> tuple[MetricDifference, ...]:
    """Return the metrics of a step that differ, causes first: rate, then loss; two NaN are equal.

    >>> compare_metrics({"loss": 1.0, "x": 2.0}, {"loss": 1.0, "x": 2.5})
    (MetricDifference(name='x', recorded=2.0, found=2.5),)
    """
    first = {"learning_rate": 0, "loss": 1}
    names = sorted({*recorded, *found}, key=lambda name: (first.get(name, 2), name))
    pairs = [(name, recorded.get(name), found.get(name)) for name in names]
    return tuple(MetricDifference(name, old, new) for name, old, new in pairs if not _same(old, new))


def compare_logprobs(
    step: int,
    recorded: Sequence[npt.NDArray[np.float32]],
    scored: Sequence[npt.NDArray[np.float32]],
    places: Sequence[str],
    versions: Sequence[npt.NDArray[np.int64]],
    kept_cache: Sequence[npt.NDArray[np.bool_]],
) -> LogprobCheck:
    """Compare the log-probabilities of a batch, token by token; every sequence has one entry per trajectory.

    Args:
        step: the step that trained on the batch.
        recorded: [T] float32, nats, as the worker reported them.
        scored: [T] float32, nats; NaN where the version's weights are missing.
        places: what the trajectory is called.
        versions: [T], the version that sampled each token.
        kept_cache: [T], whether it did so over a kept cache; such tokens are not compared.
    """
    tokens = within = unscored = left_out = 0
    largest, where = 0.0, "no token"
    for old, new, place, version, kept in zip(recorded, scored, places, versions, kept_cache, strict=True):
        tokens += int((~kept).sum())
        left_out += int(kept.sum())
        known = ~np.isnan(new) & ~kept
        unscored += int((~known & ~kept).sum())
        if not known.any():
            continue
        gap = np.where(known, np.abs(new.astype(np.float64) - old.astype(np.float64)), -1.0)
        gap[np.isnan(gap)] = np.inf  # a recorded NaN matches nothing
        within += int(((gap >= 0) & (gap <= LOGPROB_TOLERANCE)).sum())
        worst = int(gap.argmax())
        if where == "no token" or gap[worst] > largest:
            largest = float(gap[worst])
            where = f"token {worst} of {place}, sampled by version {int(version[worst])}"
    return LogprobCheck(step, tokens, within, largest, where, unscored, left_out)


def choose_steps(recorded: int, planned: int, first: int | None, last: int | None) -> range:
    """Return the steps to replay: those asked for, or all of a finished run.

    Args:
        recorded: steps on record, from 0 without a gap.
        planned: steps the run's configuration asks for.
        first: first step, or None for 0.
        last: last step, or None for the run's last.

    Raises:
        ConfigError: for steps that are not on record, or a whole replay of an unfinished run.

    >>> choose_steps(60, 60, 50, None)
    range(50, 60)
    """
    if not recorded:
        raise ConfigError(f"no step of the run is on record, of {planned} planned; let it continue first")
    if last is None and recorded < planned:
        raise ConfigError(
            f"the run is unfinished: {recorded} of {planned} steps are on record; finish it, or replay "
            f"what is there with --to {recorded - 1}"
        )
    begin, end = first or 0, recorded - 1 if last is None else last
    for option, step in (("first", begin), ("last", end)):
        if not 0 <= step < recorded:
            raise ConfigError(
                f"the {option} step to replay is {step}, but steps 0 to {recorded - 1} are on record; "
                "choose among these"
            )
    if begin > end:
        raise ConfigError(f"the first step to replay is {begin} and the last {end}; swap them")
    return range(begin, end + 1)


@dataclass
class ReplaySummary:
    """A whole replay in numbers and sentences."""

    run_id: str
    started_from: int
    """Version of the checkpoint that was restored, 0 for the base model."""
    environment: tuple[str, ...] = ()
    """Differences of machine, libraries and threads."""
    steps: list[StepCheck] = field(default_factory=list)
    logprobs: list[LogprobCheck] = field(default_factory=list)
    compares_logprobs: bool = True
    """False where tokens were sampled in bfloat16: its rounding hides what the tolerance looks for."""
    seconds: float = 0.0
    """Restoring and executing."""
    score_seconds: float = 0.0
    """Scoring trajectories again."""

    @property
    def equal(self) -> bool:
        """Return whether every step repeated and log-probabilities, where scored, agree."""
        share = self.logprobs_equal_share if self.compares_logprobs else None
        return all(check.equal for check in self.steps) and (share is None or share >= LOGPROB_SHARE)

    @property
    def steps_equal_share(self) -> float:
        """Return the share of re-executed steps that are equal; 0 without steps."""
        return sum(check.equal for check in self.steps) / len(self.steps) if self.steps else 0.0

    @property
    def logprobs_equal_share(self) -> float | None:
        """Return the share of tokens within the tolerance, or None when nothing was scored."""
        tokens = sum(check.tokens for check in self.logprobs)
        return sum(check.within for check in self.logprobs) / tokens if tokens else None

    @property
    def worst_logprob(self) -> LogprobCheck | None:
        """Return the batch with the largest difference, if any was scored."""
        return max(self.logprobs, key=lambda check: check.largest, default=None)

    def first_difference(self) -> str | None:
        """Say in one sentence where replay and record first differ, or None when they never do."""
        first = next((check for check in self.steps if not check.equal), None)
        if first is None:
            return None if self.equal else self._logprob_difference()
        cause = f"; here {', '.join(self.environment)}" if self.environment else ""
        alike = "" if self.environment else "; machine, libraries and threads are those of the record"
        return f"{self.run_id} does not repeat from {first.words()}{cause}{alike}"

    def _logprob_difference(self) -> str:
        share, worst = self.logprobs_equal_share or 0.0, self.worst_logprob
        place = "" if worst is None else f"; {worst.words()}"
        return (
            f"only {share:.4%} of the logprobs of {self.run_id} lie within {LOGPROB_TOLERANCE:g} nats of the "
            f"record, where {LOGPROB_SHARE:.1%} are expected{place}"
        )

    def lines(self) -> list[str]:
        source = f"the checkpoint of version {self.started_from}" if self.started_from else "the base model"
        equal = sum(check.equal for check in self.steps)
        said = [f"here {sentence}" for sentence in self.environment]
        said.append(
            f"{equal} of {len(self.steps)} steps of {self.run_id} repeat bit for bit, from {source}, "
            f"in {self.seconds:.1f} s"
        )
        share, worst = self.logprobs_equal_share, self.worst_logprob
        if share is not None and worst is not None:
            tokens = sum(check.tokens for check in self.logprobs)
            said.append(
                f"{share:.4%} of {tokens} logprobs within {LOGPROB_TOLERANCE:g} nats, largest difference "
                f"{worst.largest:.3g} in step {worst.step} at {worst.where}, in {self.score_seconds:.1f} s"
            )
        return said

    def plain(self) -> dict[str, Any]:
        worst = self.worst_logprob
        return {
            "run": self.run_id,
            "started_from": self.started_from,
            "steps": len(self.steps),
            "steps_equal_share": self.steps_equal_share,
            "logprobs": sum(check.tokens for check in self.logprobs),
            "logprobs_equal_share": self.logprobs_equal_share,
            "largest_logprob_difference": None if worst is None else worst.words(),
            "first_difference": self.first_difference(),
            "environment": list(self.environment),
            "seconds": self.seconds,
            "score_seconds": self.score_seconds,
        }


def _same(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is new
    return old == new or (isnan(old) and isnan(new))
