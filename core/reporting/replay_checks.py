"""Replay: what was recorded against what came out again, and the first difference.

A step is equal when its weights have the recorded digest and every metric it reports has the
recorded value, bit for bit. Log-probabilities come from another program than the one that sampled,
so they are compared within a tolerance. Nothing here computes a step; it only compares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ConfigError

LOGPROB_TOLERANCE = 1e-5
"""Nats by which a re-scored log-probability may differ: float32 rounding of two implementations' logits."""
LOGPROB_SHARE = 0.99
"""Least share within the tolerance: rounding leaves a few of a thousand outside, other weights most."""


def logprob_tolerance(vocabulary: int) -> float:
    """Return the tolerance for a distribution over this many tokens, whose exponentials are added in float32.

    A sum of n numbers is off by about sqrt(n) times half a unit in the last place, relative (Higham and Mary
    2019, "A new approach to probabilistic rounding error analysis"), and so is its logarithm, absolute.

    >>> f"{logprob_tolerance(64):.2g}, {logprob_tolerance(151_936):.2g}"
    '1e-05, 3.3e-05'
    """
    return LOGPROB_TOLERANCE + float(vocabulary**0.5) * 2.0**-24


CPU = "CPU"
"""The device where there is no GPU."""


def exact_on(device: str, ranks: int) -> str:
    """Say where a run repeats bit for bit, by the kind of device that its ranks train on.

    >>> exact_on(CPU, 1), exact_on(CPU, 2), exact_on("NVIDIA H100", 1)
    ('exact here', 'exact on CPU x 2', 'exact on NVIDIA H100 x 1')
    """
    return "exact here" if (device, ranks) == (CPU, 1) else f"exact on {device} x {ranks}"


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One re-executed step against its record."""

    step: int
    version: int
    recorded_digest: str
    found_digest: str
    metrics: Mapping[str, str]
    """Metrics that differ -> how; empty when all are equal."""
    tensor: str = ""
    """How the first tensor that differs does, where the recorded weights are at hand."""
    seconds: float = 0.0
    near: bool = False
    """Whether other ranks than those of the record repeated it within the tolerance."""
    compared: bool = True
    """Whether the recorded weights were at hand; else only their digest and the metrics were compared."""

    @property
    def equal(self) -> bool:
        """Return whether weights and metrics are the recorded ones, bit for bit."""
        return self.found_digest == self.recorded_digest and not self.metrics

    def words(self) -> str:
        if self.equal:
            return f"step {self.step}: version {self.version} again, bit for bit"
        if self.near:
            what = "within tolerance" if self.compared else "loss and gradient norm within tolerance"
            return f"step {self.step}: version {self.version} again, {what}"
        metric = next(iter(self.metrics.values()), "")
        if self.found_digest == self.recorded_digest:
            return f"step {self.step}: the same weights, but {metric}"
        weights = f"weights {self.found_digest[:12]} instead of {self.recorded_digest[:12]}"
        parts = f"step {self.step}: version {self.version} has {weights}", self.tensor, metric
        return "; ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class LogprobCheck:
    """Recorded behaviour log-probabilities of one batch against those scored again."""

    step: int
    tokens: int
    within: int
    """Tokens whose log-probability lies within the tolerance."""
    largest: float
    """Largest difference, nats; infinite for a token that its distribution rules out."""
    where: str
    """Group, sample, token and version of the largest difference."""
    unscored: int = 0
    """Tokens whose version has no weights in the record; counted in `tokens`, never as within."""
    kept_cache: int = 0
    """Tokens sampled over a kept cache, whose logprobs no clean pass gives; `tokens` does not count them."""
    tolerance: float = LOGPROB_TOLERANCE
    """Nats."""

    def words(self) -> str:
        said = f"step {self.step}: {self.within} of {self.tokens} logprobs within {self.tolerance:.2g}"
        if self.tokens > self.unscored:
            said += f", largest difference {self.largest:.3g} nats at {self.where}"
        if self.unscored:
            said += f"; {self.unscored} tokens were sampled by versions whose weights are not in the record"
        if self.kept_cache:
            said += f"; {self.kept_cache} further tokens were sampled over a kept cache and are not compared"
        return said


WEIGHTS_TOLERANCE = 1e-3
"""Relative distance of weights that another number of ranks may make: Adam makes more of what rounding does
to small gradients (gradients are 1e-6 apart, weights 2e-5 after 5 steps)."""
METRICS_TOLERANCE = 1e-2
"""Relative difference of a step's loss and gradient norm; of a loss below 1 it is absolute."""


def is_near(recorded: Mapping[str, float], found: Mapping[str, float], apart: float | None) -> bool:
    """Return whether a step that other ranks repeated is within the tolerance of its record.

    Args:
        recorded: its metrics, and `found`: those of the repetition.
        apart: relative distance of the weights; None where the recorded ones are not at hand.

    >>> is_near({"loss": 0.5, "gradient_norm": 2.0}, {"loss": 0.501, "gradient_norm": 2.0}, 1e-6)
    True
    """
    if apart is not None and not apart <= WEIGHTS_TOLERANCE:
        return False
    loss, norm = (abs(recorded[name] - found[name]) for name in ("loss", "gradient_norm"))
    bounds = max(1.0, abs(recorded["loss"])), recorded["gradient_norm"]
    return loss <= METRICS_TOLERANCE * bounds[0] and norm <= METRICS_TOLERANCE * bounds[1]


def compare_metrics(recorded: Mapping[str, float], found: Mapping[str, float]) -> dict[str, str]:
    """Return a clause for each metric of a step that differs, by name, causes first: rate, then loss.

    Two NaN are equal.

    >>> compare_metrics({"loss": 0.5, "x": 2.0}, {"loss": 0.75, "x": 2.0})
    {'loss': 'loss was 0.5 and is 0.75, 0.25 apart'}
    """
    first = {"learning_rate": 0, "loss": 1}
    said = {}
    for name in sorted({*recorded, *found}, key=lambda name: (first.get(name, 2), name)):
        old, new = recorded.get(name), found.get(name)
        if old is None or new is None:
            said[name] = f"{name} is not in the {'record' if old is None else 'replay'}"
        elif old != new and not (isnan(old) and isnan(new)):
            said[name] = f"{name} was {old!r} and is {new!r}, {abs(new - old):.3g} apart"
    return said


def compare_logprobs(
    step: int,
    recorded: Sequence[npt.NDArray[np.float32]],
    scored: Sequence[npt.NDArray[np.float32]],
    places: Sequence[str],
    versions: Sequence[npt.NDArray[np.int64]],
    kept_cache: Sequence[npt.NDArray[np.bool_]],
    tolerance: float = LOGPROB_TOLERANCE,
) -> LogprobCheck:
    """Compare the log-probabilities of a batch, token by token; every sequence has one entry per trajectory.

    Args:
        step: the step that trained on the batch.
        recorded: [T] float32, nats, as the worker reported them.
        scored: [T] float32, nats; NaN where the version's weights are missing.
        places: what the trajectory is called.
        versions: [T], the version that sampled each token; -1 of observed ones, which are not compared.
        kept_cache: [T], whether it did so over a kept cache; such tokens are not compared.
        tolerance: of `logprob_tolerance`.
    """
    sizes = [len(one) for one in recorded]
    old, new = (np.concatenate([*parts, []], dtype=np.float64) for parts in (recorded, scored))
    kept = np.concatenate([*kept_cache, []], dtype=np.bool_, casting="unsafe")
    asked = (np.concatenate([*versions, []]) >= 0) & ~kept
    known = ~np.isnan(new) & asked
    gap = np.where(known, np.abs(new - old), -1.0)
    gap[np.isnan(gap)] = np.inf  # a recorded NaN matches nothing
    largest, where = 0.0, "no token"
    if known.any():
        worst = int(gap.argmax())
        place = int(np.searchsorted(np.cumsum(sizes), worst, side="right"))
        token, largest = worst - sum(sizes[:place]), float(gap[worst])
        where = f"token {token} of {places[place]}, sampled by version {int(versions[place][token])}"
    within = int(((gap >= 0) & (gap <= tolerance)).sum())
    unscored = int((asked & ~known).sum())
    over = int(kept.sum())
    return LogprobCheck(step, int(asked.sum()), within, largest, where, unscored, over, tolerance)


def choose_steps(recorded: int, planned: int | None, first: int | None, last: int | None) -> range:
    """Return the steps to replay: those asked for, or all of a finished run.

    Args:
        recorded: steps on record, from 0 without a gap.
        planned: steps the run's configuration asks for; None where a client decides.
        first: first step, or None for 0.
        last: last step, or None for the run's last.

    Raises:
        ConfigError: for steps that are not on record, or a whole replay of an unfinished run.

    >>> choose_steps(60, 60, 50, None)
    range(50, 60)
    """
    if not recorded:
        of = "" if planned is None else f", of {planned} planned"
        raise ConfigError(f"no step of the run is on record{of}; let it continue first")
    if last is None and planned is not None and recorded < planned:
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
    recorded_ranks: int = 1
    ranks: int = 1
    """How many trained together here."""
    device: str = CPU
    """What they trained on here."""
    seconds: float = 0.0
    """Restoring and executing."""
    score_seconds: float = 0.0
    """Scoring trajectories again."""

    @property
    def equal(self) -> bool:
        """Return whether every step repeated and log-probabilities, where scored, agree.

        Where other ranks repeat a step it need only be within the tolerance.
        """
        share = self.logprobs_equal_share if self.compares_logprobs else None
        return all(map(self._repeats, self.steps)) and (share is None or share >= LOGPROB_SHARE)

    @property
    def exactness(self) -> str:
        """Say how well the record repeats: exact by as many ranks as it names alone."""
        if not self.equal:
            return "different"
        if self.ranks != self.recorded_ranks:
            # Differences add up, so the last weights speak for all before them.
            last = self.steps[-1]
            said = "within tolerance" if last.compared else "loss and gradient norm within tolerance"
            unknown = "" if last.compared else f", weights of version {last.version} not kept to compare"
            return f"{said}: trained by {self.recorded_ranks} ranks, repeated by {self.ranks}{unknown}"
        return exact_on(self.device, self.ranks)

    def _repeats(self, check: StepCheck) -> bool:
        return check.equal if self.ranks == self.recorded_ranks else check.near

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
        first = next((check for check in self.steps if not self._repeats(check)), None)
        if first is None:
            return None if self.equal else self._logprob_difference()
        cause = f"; here {', '.join(self.environment)}" if self.environment else ""
        alike = "" if self.environment else "; machine, libraries and threads are those of the record"
        return f"{self.run_id} does not repeat from {first.words()}{cause}{alike}"

    def _logprob_difference(self) -> str:
        share, worst = self.logprobs_equal_share or 0.0, self.worst_logprob
        place = "" if worst is None else f"; {worst.words()}"
        return (
            f"only {share:.4%} of the logprobs of {self.run_id} lie within the tolerance of the "
            f"record, where {LOGPROB_SHARE:.1%} are expected{place}"
        )

    def lines(self) -> list[str]:
        source = f"the checkpoint of version {self.started_from}" if self.started_from else "the base model"
        equal = sum(check.equal for check in self.steps)
        said = [f"here {sentence}" for sentence in self.environment]
        said.append(
            f"{equal} of {len(self.steps)} steps of {self.run_id} repeat bit for bit, from {source}, "
            f"in {self.seconds:.1f} s: {self.exactness}"
        )
        share, worst = self.logprobs_equal_share, self.worst_logprob
        if share is not None and worst is not None:
            tokens = sum(check.tokens for check in self.logprobs)
            said.append(
                f"{share:.4%} of {tokens} logprobs within {worst.tolerance:.2g} nats, largest difference "
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
            "exactness": self.exactness,
            "seconds": self.seconds,
            "score_seconds": self.score_seconds,
        }
