"""Draft gate: drafts are made only where they pay, and trying costs at most a stated share of time.

The gate knows no clock: the caller says how long each decoding step took, and it answers whether the next
step should draft and how probable a token must be to be worth a row of it.

Symbols: B requests in a step, x drafted tokens in it, so B + x rows; u(B) seconds of an undrafted
step; d + c x seconds that a drafted step takes beyond u(B); y tokens the step emitted.

**Floor.** A set of drafted tokens j with path probabilities q_j (all before it and itself accepted)
yields B + sum q_j tokens in u + d + c x seconds. The largest ratio L = tokens / seconds is where
max over sets of [tokens - L seconds] is zero (Dinkelbach, Management Science 13(7), 1967). That
difference is a sum over tokens of (q_j - L c), so a token belongs to the best set exactly when
q_j >= L c. Path probabilities only fall along a draft, so the set is a prefix of each draft. L is
approached by Dinkelbach's own iteration, with the measured rate as L: max(1, gain) * B / u(B).

**Gain.** y / B undrafted steps would have emitted the same tokens, so a drafted step is worth
y u(B) / B seconds. gain = (mean worth) / (mean seconds), over about the last `HORIZON` drafted
steps of similar batch size. u(B) is measured, never assumed: see `_BatchSize`.

**Bound.** Worth minus seconds of drafted steps is booked on an account. Each step of either kind
adds a quarter of `allowed_loss` of its undrafted time and gains are booked too, but the account
never holds more than `allowed_loss` of `probe_steps` undrafted steps (4 steps at the least), and
drafting stops when it is empty. So T steps in a row, at steady batch size, lose at most a quarter of
allowed_loss T, a full account and one step's surplus: 3/4 of `allowed_loss` of T from
T = 2 probe_steps on (about 270 steps at the least). The rest is room for errors of u, and its
standard error and `CAUTION` are taken off every worth. Usually a test on the gain ends a losing
trial long before the account does.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from antiphon.core.drafting.costs import MOST_FIXED_ROWS, Surplus
from antiphon.core.errors import ContractError

LEAST_FLOOR = 0.02
"""Below this, path probabilities are not calibrated well enough to be believed."""
MOST_FLOOR = 0.95
"""Near-certain tokens are always drafted in a drafted step, so that their cost stays measured."""
HORIZON = 16
"""Drafted steps over which the gain is smoothed."""
FIRST_BASELINE = 3
"""Undrafted steps before the first draft at a batch size: of three, one may be an outlier."""
BASELINE = 4
"""Undrafted steps of each later comparison."""
FIRST_REFRESH = 32
"""Steps to the second comparison, doubling up to probe_steps: the first steps of an engine are slow."""
STALE_REFRESHES = 4
"""An octave of batch sizes that is seldom met is compared after so many times the steps of all sizes."""
KEPT_STEPS = 32
"""Newest undrafted steps of a batch size that count, by the mean of their middle half."""
REMEMBERED_STEPS = 12
"""Of these, what a later comparison keeps: contexts grow and machines change between comparisons."""
CAUTION = 0.005
"""Share of a drafted step's worth that is not believed, besides the standard error of u."""
UNKNOWN_ERROR = 0.02
"""Relative standard error of u while there are too few undrafted steps to tell."""
LEAST_TRIAL = 4
"""Drafted steps before the gain may close the gate."""
CONFIDENCE = 1.5
"""Standard errors by which the gain must lie below 1 for the gate to close."""
MOST_BACKOFF = 16
"""Most probing intervals between two trials that keep failing."""
FIXED_ROWS = 8.0
"""Fixed cost of a step in rows until two batch sizes were measured."""
LONGEST_STEP_S = 3600.0
"""Steps that seem longer, or shorter than a nanosecond, are mistakes of a clock and not taken in."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next engine step should do."""

    draft: bool
    """Propose tokens for the next step."""
    floor: float
    """Least path probability of a drafted token that pays, in 0..1; 1 where nothing is to be drafted."""


_NO_DRAFT = StepPlan(draft=False, floor=1.0)


@dataclass(slots=True)
class _BatchSize:
    """What is known about batches of one octave of sizes: 1, 2-3, 4-7, ..."""

    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """Requests and seconds of the newest undrafted steps."""
    levels: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """Seconds / (requests + fixed rows) of the same steps."""
    level_s: float = 0.0
    """Mean of the middle half of the levels; 0 before the first."""
    error: float = UNKNOWN_ERROR
    """Standard error of this mean, relative to it."""
    owed: int = FIRST_BASELINE
    """Undrafted steps that the comparison which is due or runs still needs."""
    undrafted_at: int = 0
    drafted_steps: int = 0
    """Drafted steps since the last undrafted one."""
    refresh: int = FIRST_REFRESH
    surplus: Surplus | None = None
    open: bool = True
    changed_at: int = 0
    """Step of the last opening or closing."""
    backoff: int = 0
    """Probing intervals to wait while closed; 0 before the first closing."""
    trials: int = 0
    """Drafted steps that the means below speak of."""
    mean_worth: float = 0.0
    mean_seconds: float = 0.0
    mean_loss: float = 0.0
    mean_square: float = 0.0

    def add(self, requests: int, seconds: float, fixed_rows: float) -> None:
        self.steps.append((requests, seconds))
        self.levels.append(seconds / (requests + fixed_rows))

    def forget(self, kept: int) -> None:
        """Drop all but the newest `kept` undrafted steps, of which the newest was just added."""
        while len(self.steps) > kept + 1:
            self.steps.popleft()
            self.levels.popleft()

    def rescale(self, fixed_rows: float) -> None:
        """Restate the levels for another fixed cost of a step."""
        self.levels.clear()
        self.levels.extend(seconds / (requests + fixed_rows) for requests, seconds in self.steps)
        self.update_level()

    def update_level(self) -> None:
        """Bring the level up to date: outliers fall outside of the middle half."""
        ordered = sorted(self.levels)
        edge = len(ordered) // 4 if len(ordered) > 3 else (len(ordered) - 1) // 2
        middle = ordered[edge : len(ordered) - edge]
        self.level_s = sum(middle) / len(middle)
        if len(ordered) > 7:
            # The middle half of a normal sample spans 1.35 deviations, and its mean errs by 1.09 / sqrt(n).
            self.error = 0.81 * (middle[-1] - middle[0]) / (self.level_s * math.sqrt(len(ordered)))

    def restart(self) -> None:
        """Forget the gain: a new trial counts by its own steps."""
        self.trials = 0
        self.mean_worth = 0.0
        self.mean_seconds = 0.0
        self.mean_loss = 0.0
        self.mean_square = 0.0

    def weigh(self, worth: float, seconds: float) -> None:
        """Take in a drafted step: its worth and its seconds, both in undrafted steps."""
        self.trials += 1
        share = 1.0 / min(self.trials, HORIZON)
        loss = seconds - worth
        self.mean_worth += share * (worth - self.mean_worth)
        self.mean_seconds += share * (seconds - self.mean_seconds)
        self.mean_loss += share * (loss - self.mean_loss)
        self.mean_square += share * (loss * loss - self.mean_square)

    def loses(self, requests: int) -> bool:
        """Return whether the gain lies below 1 by `CONFIDENCE` standard errors."""
        if self.trials < LEAST_TRIAL:
            return False
        # Wins are rare and large: until one was seen, the spread of the sample says too little, so
        # the number of tokens of a request is taken to spread by at least 1.
        variance = max(self.mean_square - self.mean_loss * self.mean_loss, 1.0 / requests)
        effective = min(self.trials, 2 * HORIZON - 1)
        return self.mean_loss > CONFIDENCE * math.sqrt(variance / effective)

    @property
    def gain(self) -> float:
        """Worth over seconds of this trial's steps; 0 before the first."""
        return self.mean_worth / self.mean_seconds if self.mean_seconds > 0.0 else 0.0


class DraftGate:
    """Decides step by step whether to draft; see the module's text for the rules and the bound."""

    def __init__(self, probe_steps: int, allowed_loss: float = 0.03) -> None:
        """Start without knowledge: a few undrafted steps at each batch size, then drafts on trial.

        `probe_steps`: engine steps between two comparisons; `allowed_loss`: share of the undrafted
        engine's time that trying may cost over twice as many steps. Raises ContractError outside of
        probe_steps >= 1 and 0 < allowed_loss < 1.
        """
        if probe_steps < 1 or not 0.0 < allowed_loss < 1.0:
            raise ContractError(
                f"probe_steps={probe_steps} and allowed_loss={allowed_loss} make no gate; "
                "give probe_steps of at least 1 and an allowed_loss between 0 and 1"
            )
        self._probe_steps = probe_steps
        self._income = allowed_loss / 4.0
        self._most_steps = max(allowed_loss * probe_steps, 4.0)
        self._account_s = 0.0
        self._account_open = False
        self._fixed_rows = FIXED_ROWS
        self._sizes: list[_BatchSize] = []
        self._latest: _BatchSize | None = None
        self._step = 0

    @property
    def gain(self) -> float:
        """Tokens per second of the newest drafted steps relative to undrafted ones; 0 before any."""
        return self._latest.gain if self._latest is not None else 0.0

    @property
    def marginal_row_s(self) -> float:
        """Seconds one more drafted token adds to a step, as last fitted; 0 before any."""
        surplus = self._latest.surplus if self._latest is not None else None
        return surplus.row_s if surplus is not None else 0.0

    def is_open(self, requests: int) -> bool:
        """Return whether drafts are held to pay, or not yet known to lose, at this batch size."""
        return self._size(requests).open

    def undrafted_s(self, requests: int) -> float:
        """Return the seconds of an undrafted step of `requests`; 0 before any was measured."""
        level_s = self._size(requests).level_s or self._nearest_level(requests)
        return level_s * (requests + self._fixed_rows)

    def plan(self, requests: int) -> StepPlan:
        """Decide about the next step, of `requests` requests. Asking changes nothing."""
        if requests < 1 or self._account_s < 0.0:
            return _NO_DRAFT
        size = self._size(requests)
        waited = self._step - size.changed_at
        if size.owed or self._due(size) or not (size.open or waited >= size.backoff * self._probe_steps):
            return _NO_DRAFT
        # A drafted row costs at most what a whole request costs, which is all that is known at first.
        row_s = size.surplus.row_s if size.surplus is not None else size.level_s
        seconds = size.level_s * (requests + self._fixed_rows)
        # The gain of a few steps is mostly luck; until there are enough, lean on 1.
        trust = min(size.trials, HORIZON) / HORIZON
        gain = max(1.0 + trust * (size.gain - 1.0), 1.0)
        floor = gain * requests * row_s / seconds
        return StepPlan(draft=True, floor=min(max(floor, LEAST_FLOOR), MOST_FLOOR))

    def wake(self) -> None:
        """Allow a trial at once at every batch size: there is something new to draft from."""
        for size in self._sizes:
            if not size.open:
                size.backoff = 1
                size.changed_at = self._step - self._probe_steps

    def observe(self, requests: int, rows: int, tokens: int, seconds: float, drafted: bool) -> None:
        """Take in one engine step that only decoded.

        `requests`: B; `rows`: B plus the drafted tokens; `tokens`: emitted; `seconds`: of the whole
        step, drafter included; `drafted`: the drafter ran for it, though it may have proposed
        nothing (rows == requests). Steps without requests or of senseless duration are ignored.
        """
        if requests < 1 or not 1e-9 < seconds < LONGEST_STEP_S:
            return
        self._step += 1
        size = self._size(requests)
        if drafted:
            self._observe_drafted(size, requests, max(rows - requests, 0), tokens, seconds)
        else:
            self._observe_undrafted(size, requests, seconds)

    def _observe_undrafted(self, size: _BatchSize, requests: int, seconds: float) -> None:
        size.add(requests, seconds, self._fixed_rows)
        compared = False
        if size.owed:
            size.owed -= 1
            if size.owed == 0:
                size.refresh = min(2 * size.refresh, max(self._probe_steps, FIRST_REFRESH))
                compared = True
        elif size.open and self._due(size):
            size.owed = BASELINE - 1
            size.forget(REMEMBERED_STEPS)
        if not size.owed:
            size.undrafted_at, size.drafted_steps = self._step, 0
        if compared or self._step % 64 == 0:
            self._fit_shape()
        size.update_level()
        self._book(0.0, 0.0, self.undrafted_s(requests))

    def _observe_drafted(
        self, size: _BatchSize, requests: int, drafted: int, tokens: int, seconds: float
    ) -> None:
        undrafted_s = self.undrafted_s(requests)
        if undrafted_s <= 0.0:
            return
        if size.surplus is None:
            size.surplus = self._first_surplus(undrafted_s / (requests + self._fixed_rows), undrafted_s)
        if not size.open and self._step - size.changed_at > size.backoff * self._probe_steps:
            size.open, size.changed_at = True, self._step
            size.restart()
        size.drafted_steps += 1
        seconds = size.surplus.learn(drafted, seconds, undrafted_s)
        worth = tokens / requests
        size.weigh(worth, seconds / undrafted_s)
        self._latest = size
        self._book(seconds, worth * undrafted_s * (1.0 - CAUTION - size.error), undrafted_s)
        if size.open and (self._account_s < 0.0 or size.loses(requests)):
            self._close(size)

    def _due(self, size: _BatchSize) -> bool:
        """Return whether a batch size must be compared with the undrafted engine again."""
        waited = self._step - size.undrafted_at
        return size.drafted_steps >= size.refresh or waited >= STALE_REFRESHES * size.refresh

    def _close(self, size: _BatchSize) -> None:
        # A phase that lasted was worth having: look again soon. A trial that failed: wait twice as long.
        lasted = size.trials >= self._probe_steps // 2
        size.backoff = 1 if lasted else min(max(2 * size.backoff, 1), MOST_BACKOFF)
        size.open, size.changed_at = False, self._step

    def _book(self, seconds: float, worth_s: float, undrafted_s: float) -> None:
        """Book a drafted step, or with zeros an undrafted one, whose worth is its time by definition."""
        most_s = self._most_steps * undrafted_s
        if not self._account_open:
            self._account_s, self._account_open = most_s, True
        earned_s = worth_s - seconds + self._income * (worth_s or undrafted_s)
        self._account_s = min(self._account_s + earned_s, most_s)

    def _size(self, requests: int) -> _BatchSize:
        octave = requests.bit_length()
        while octave >= len(self._sizes):
            self._sizes.append(_BatchSize())
        return self._sizes[octave]

    def _nearest_level(self, requests: int) -> float:
        octave = requests.bit_length()
        measured = [i for i, size in enumerate(self._sizes) if size.level_s > 0.0]
        if not measured:
            return 0.0
        return self._sizes[min(measured, key=lambda i: abs(i - octave))].level_s

    def _first_surplus(self, row_s: float, undrafted_s: float) -> Surplus:
        known = self._latest.surplus if self._latest is not None else None
        if known is None:
            return Surplus(row_s, undrafted_s)
        return Surplus(known.row_s, undrafted_s, known.fixed_s)

    def _fit_shape(self) -> None:
        """Fit u(B) = a + b B through the sizes, each counting by its relative error: fixed = a / b."""
        points = []
        for size in self._sizes:
            if len(size.steps) >= FIRST_BASELINE:
                requests = sum(step[0] for step in size.steps) / len(size.steps)
                points.append((requests, size.level_s * (requests + self._fixed_rows)))
        if len(points) < 2 or points[-1][0] < 2.0 * points[0][0]:
            return
        weight = sum(1.0 / (s * s) for _, s in points)
        mean_b = sum(b / (s * s) for b, s in points) / weight
        mean_s = sum(1.0 / s for _, s in points) / weight
        slope = sum((b - mean_b) * (s - mean_s) / (s * s) for b, s in points)
        spread = sum((b - mean_b) ** 2 / (s * s) for b, s in points)
        slope /= spread
        fixed = MOST_FIXED_ROWS
        if slope > 0.0:
            fixed = min(max((mean_s - slope * mean_b) / slope, 0.0), MOST_FIXED_ROWS)
        self._fixed_rows = fixed
        for size in self._sizes:
            if size.steps:
                size.rescale(fixed)
