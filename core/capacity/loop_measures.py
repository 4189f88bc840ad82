"""Loop measures: how fast the parts of the loop are, measured from the events of a run.

The law of pace: a completion takes ``alpha + beta * n`` seconds per token with n completions at once, as the
step time of a decoding engine is close to linear in its batch. Here alone it is fitted (`fit_pace`,
`fit_leases`) and said (`token_s`); run-ahead, calibrations and modelled engines ask. Shares, rates and
seconds per step are moving averages over some `MEMORY` batches, other seconds medians over the last ones, so
that one slow step changes no plan.
"""

import math
from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from antiphon.core.capacity.measured import Measured
from antiphon.core.frozen import frozen
from antiphon.core.loop import events as e
from antiphon.core.loop.run_state import RunState

GROUPS_REMEMBERED = 512
"""Sealed groups that speak for the lengths to come."""
LOSSES_REMEMBERED = 32
"""Batches for which the loss of a lease counts."""
STEPS_REMEMBERED = 8
"""Learner steps and broadcasts whose median is taken."""
MEMORY = 6.0
"""Batches of which a moving average remembers a share of 1 - 1/e."""

_Numbers = npt.NDArray[np.float64]


def token_s(alpha_s: float, beta_s: float, load: float) -> float:
    """Return the seconds per token of a completion, `load` completions being sampled at once.

    >>> token_s(0.01, 0.0005, 20)
    0.02
    """
    return max(1e-12, alpha_s + beta_s * load)


@frozen
class SampledGroup:
    """One group as it was sampled and rewarded."""

    longest: int
    """Tokens of its longest completion."""
    others: float
    """Mean tokens of the others."""
    count: int
    """How many others there are."""
    reward_s: float
    """From its submission to its rewards."""
    group_s: float = 0.0
    """From its lease to its rewards."""
    place_s: float = 0.0
    """The same, and before it of those groups whose place it took."""
    replaced: bool = False
    """It was left out, and another took its place."""


@frozen
class LoopPace:
    """How fast the parts of the loop are."""

    groups: tuple[SampledGroup, ...]
    """In the order of their places."""
    alpha: float
    """Seconds per token of a completion that runs alone."""
    beta: float
    """Seconds per token that each further completion at the same fleet adds."""
    learner_s: float
    """Of a learner step, with its commit."""
    broadcast_s: float
    """From a commit until a worker holds its version."""
    losses: bool = False
    """Leases ended lately without a submission: groups take longer than their completions."""


@frozen
class _Lease:
    """One group that was sampled from its first token to its last under one lease, or still is."""

    begun_s: float
    fresh: bool
    """It continues nothing that another worker had begun."""
    place_s: float = math.nan
    """When the first group was leased whose place it has."""
    ended_s: float = math.inf
    counts: tuple[int, ...] = ()
    """Tokens of its completions."""


class LoopMeasures:
    """Measures the loop from the events of a run, on the clock of the caller that passes `now`.

    Kept in memory alone: after a restart the loop is measured again.
    """

    def __init__(self) -> None:
        self._running: dict[str, _Lease] = {}
        self._twins: set[str] = set()
        self._ended: deque[_Lease] = deque(maxlen=GROUPS_REMEMBERED)
        self._submitted: dict[str, _Lease] = {}
        self._rewarded: dict[str, SampledGroup] = {}
        self._groups: deque[SampledGroup] = deque(maxlen=GROUPS_REMEMBERED)
        self._learner_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._broadcast_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._slowest_s: deque[tuple[float, float]] = deque(maxlen=STEPS_REMEMBERED)
        """Of each batch, the seconds of its slowest group and of its slowest place."""
        self._given_back: deque[float] = deque()
        """Places of groups that were left out: when their first group was leased."""
        self._sealed_at: dict[int, float] = {}
        self._committed_at: dict[int, float] = {}
        self._last_commit = self._last_load = -math.inf
        self._training_tokens = self._heldout_tokens = 0
        self._lost_at: int | None = None
        self._trained = self._sampled = self._step_s = self._supply = math.nan  # moving averages
        self.batches = 0
        """Batches that were trained since the measuring began."""

    def observe(self, event: e.JournalEvent, state: RunState, now: float) -> None:
        """Take in an event that is about to be applied to `state`."""
        match event:
            case e.LeaseGranted():
                group = state.groups.get(event.group_id)
                if group is None or group.trains:
                    place_s = self._given_back.popleft() if self._given_back else now
                    self._running[event.group_id] = _Lease(now, not event.continued, place_s)
            case e.LeaseDuplicated():
                self._twins.add(event.group_id)
            case e.LeaseExpired():
                if event.group_id in self._twins:
                    self._twins.discard(event.group_id)
                elif self._running.pop(event.group_id, None) is not None:
                    self._lost_at = self.batches
            case e.GroupSubmitted():
                self._twins.discard(event.group_id)
                group, tokens = state.groups.get(event.group_id), sum(event.token_counts)
                if group is None or group.trains:
                    self._training_tokens += tokens
                else:
                    self._heldout_tokens += tokens
                if (lease := self._running.pop(event.group_id, None)) is not None:
                    ended = replace(lease, ended_s=now, counts=event.token_counts)
                    self._submitted[event.group_id] = ended
                    self._ended.append(ended)
            case e.GroupRewarded():
                if (lease := self._submitted.pop(event.group_id, None)) is not None:
                    self._rewarded[event.group_id] = _sampled(lease, now)
            case e.GroupDropped():
                self._submitted.pop(event.group_id, None)
                # It was sampled too: the lengths to come are like it.
                if (found := self._use(event.group_id, replaced=True)) is not None:
                    self._given_back.append(now - found.place_s)
            case e.BatchSealed():
                used = [self._use(group_id) for group_id in (*event.group_ids, *event.filtered_ids)]
                if any(used):
                    known = [group for group in used if group]
                    slowest = max(group.group_s for group in known), max(group.place_s for group in known)
                    self._slowest_s.append(slowest)
                self._given_back.clear()  # behind the refill limit nothing takes these places any more
                self._sealed_at[event.step] = now
                trained = len(event.group_ids)
                sampled = trained + event.groups_filtered + event.groups_dropped_stale
                self._trained = averaged(self._trained, trained)
                self._sampled = averaged(self._sampled, sampled)
            case e.BatchVoided():
                self._sealed_at.pop(event.step, None)
            case e.StepCommitted():
                sealed_at = self._sealed_at.pop(event.step, None)
                if sealed_at is not None:
                    self._learner_s.append(now - max(sealed_at, self._last_commit))
                    self.batches += 1
                if math.isfinite(self._last_commit):
                    self._step_s = averaged(self._step_s, now - self._last_commit)
                self._last_commit = now
                if event.published:
                    self._committed_at[event.version] = now
            case e.WorkerLoaded():
                committed_at = self._committed_at.get(event.version)
                if committed_at is not None:
                    # A version waits for the broadcast of the one before, which is no part of its own.
                    self._broadcast_s.append(now - max(committed_at, self._last_load))
                    self._last_load = now
                    self._committed_at = {v: at for v, at in self._committed_at.items() if v > event.version}

    def _use(self, group_id: str, *, replaced: bool = False) -> SampledGroup | None:
        if (found := self._rewarded.pop(group_id, None)) is not None:
            self._groups.append(replace(found, replaced=True) if replaced else found)
        return found

    @property
    def losses(self) -> bool:
        """Return whether a lease ended lately without a submission."""
        return self._lost_at is not None and self.batches - self._lost_at < LOSSES_REMEMBERED

    def seconds(self) -> tuple[float, float, float, float] | None:
        """Return the seconds of a learner step, of a broadcast, and from the lease to the rewards of the
        slowest group and the slowest place of a batch: T, T_b, L and L_0 of the capacity model.

        None before a batch was trained.
        """
        if not self.batches or not self._slowest_s:
            return None
        broadcast = float(np.median(self._broadcast_s)) if self._broadcast_s else 0.0
        group_s, place_s = np.median(np.asarray(self._slowest_s), axis=0).tolist()
        return float(np.median(self._learner_s)), broadcast, group_s, place_s

    def completion_tokens(self) -> float:
        """Return the tokens that are sampled for each completion of training, those of evaluations shared out
        among them; NaN before one was rewarded."""
        if not self._groups:
            return math.nan
        tokens = sum(group.longest + group.others * group.count for group in self._groups)
        mean = tokens / sum(group.count + 1 for group in self._groups)
        return mean * (1.0 + self._heldout_tokens / max(1, self._training_tokens))

    def measured(self, tokens_per_s: float) -> Measured | None:
        """Return what the capacity model needs of the run; None before it is known.

        Args:
            tokens_per_s: what all workers can sample now; its average counts.
        """
        seconds, tokens = self.seconds(), self.completion_tokens()
        counted = tokens > 0.0 and not math.isnan(self._trained)
        if seconds is None or not counted or not 0.0 < tokens_per_s < math.inf:
            return None
        self._supply = averaged(self._supply, tokens_per_s)
        return Measured(
            steps=self.batches,
            trained=self._trained,
            seconds=seconds,
            completion_tokens=tokens,
            acceptance=min(1.0, self._trained / max(1.0, self._sampled)),
            workers=1.0,
            tokens_per_s=self._supply,
            step_s=0.0 if math.isnan(self._step_s) else self._step_s,
        )

    def pace(self, now: float) -> LoopPace | None:
        """Return what is known of the loop; None before a batch was trained."""
        if not self.batches or not self._groups:
            return None
        seconds, tokens, load = self.leases(now)
        if not len(seconds):
            return None
        alpha, beta = fit_pace(seconds / tokens, load)
        return LoopPace(
            groups=tuple(self._groups),
            alpha=alpha,
            beta=beta,
            learner_s=float(np.median(self._learner_s)),
            broadcast_s=float(np.median(self._broadcast_s)) if self._broadcast_s else 0.0,
            losses=self.losses,
        )

    def leases(self, now: float) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Return of each lease its seconds, the tokens of its longest completion, and the mean number of
        completions at once meanwhile.

        A completion is taken to have got its tokens evenly over the lease of its group; those that
        still run are taken to last.
        """
        begins: list[float] = []
        ends: list[float] = []
        for lease in self._ended:
            seconds = (lease.ended_s - lease.begun_s) / max(1, max(lease.counts))
            begins.extend([lease.begun_s] * len(lease.counts))
            ends.extend(lease.begun_s + seconds * count for count in lease.counts)
        alike = [len(lease.counts) for lease in self._ended]
        for lease in self._running.values():
            begins.extend([lease.begun_s] * (alike[-1] if alike else 0))
            ends.extend([now] * (alike[-1] if alike else 0))
        began, ended = np.sort(np.asarray(begins)), np.sort(np.asarray(ends))

        def area(at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            return _area(began, at) - _area(ended, at)

        # Of leases that continued another one it is not known how many tokens were theirs.
        whole = [x for x in self._ended if x.fresh and max(x.counts) > 0 and x.ended_s > x.begun_s]
        first = np.asarray([lease.begun_s for lease in whole])
        last = np.asarray([lease.ended_s for lease in whole])
        tokens = np.asarray([max(lease.counts) for lease in whole], np.float64)
        return last - first, tokens, (area(last) - area(first)) / (last - first)


def _area(instants: npt.NDArray[np.float64], at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return, for each of `at`, the sum of the seconds since all instants before it; `instants` is sorted."""
    summed = np.concatenate([[0.0], np.cumsum(instants)])
    before = np.searchsorted(instants, at)
    return np.asarray(before * at - summed[before])


def _sampled(lease: _Lease, now: float) -> SampledGroup:
    longest, others = max(lease.counts), len(lease.counts) - 1
    mean = (sum(lease.counts) - longest) / max(1, others)
    return SampledGroup(longest, mean, others, now - lease.ended_s, now - lease.begun_s, now - lease.place_s)


def averaged(average: float, value: float) -> float:
    """Return a moving average that takes in a value; NaN stands for one without any.

    >>> average = math.nan
    >>> for value in (1.0, 1.0, 2.0): average = averaged(average, value)
    >>> round(average, 3)
    1.154
    """
    return value if math.isnan(average) else average - math.expm1(-1.0 / MEMORY) * (value - average)


def fit_pace(pace: _Numbers, load: _Numbers) -> tuple[float, float]:
    """Fit alpha, beta >= 0 of ``pace = alpha + beta * load`` by least squares."""
    spread = float(((load - load.mean()) ** 2).sum())
    beta = float(((load - load.mean()) * (pace - pace.mean())).sum()) / spread if spread > 0.0 else 0.0
    alpha = float(pace.mean() - beta * load.mean())
    if beta < 0.0:
        return float(pace.mean()), 0.0
    if alpha < 0.0:
        return 0.0, float((pace * load).sum() / max(1e-12, float((load**2).sum())))
    return alpha, beta


def fit_leases(seconds: _Numbers, tokens: _Numbers, load: _Numbers) -> tuple[float, float, float]:
    """Fit start, alpha, beta >= 0 of ``seconds = start + tokens * (alpha + beta * load)``, least squares."""
    from scipy.optimize import nnls  # half a second that few callers need

    columns = np.stack([np.ones_like(tokens), tokens, tokens * load], axis=1)
    start_s, alpha_s, beta_s = map(float, nnls(columns, seconds)[0])
    return start_s, alpha_s, beta_s
