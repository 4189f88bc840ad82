"""Draft gate: drafts are made only where they pay, and trying costs at most a stated share of time.

The gate knows no clock: the caller says how long each decoding step took, and it answers whether the next
step should draft and how probable a token must be to be worth a row of it.

Symbols: B requests in a step, x drafted tokens in it, so B + x rows; u(B) seconds of an undrafted
step; k u(B) seconds of a drafted one; c seconds that one more drafted token adds to it; y tokens the
step emitted. k is a share, learnt from neighbouring steps: how fast the machine is at the time does not
matter, so other programs that slow it down close no gate.

**Floor.** A set of drafted tokens j with path probabilities q_j (all before it and itself accepted)
yields B + sum q_j tokens in u + d + c x seconds. The largest ratio L = tokens / seconds is where
max over sets of [tokens - L seconds] is zero (Dinkelbach, Management Science 13(7), 1967). That
difference is a sum over tokens of (q_j - L c), so a token belongs to the best set exactly when
q_j >= L c. Path probabilities only fall along a draft, so the set is a prefix of each draft. L is
approached by Dinkelbach's own iteration, with the measured rate as L: max(1, gain) * B / u(B).

**Gain.** y / B undrafted steps would have emitted the same tokens. gain = (mean y / B) / (k at the
mean x), over about the last `HORIZON` drafted steps of similar batch size. While drafting, single
undrafted steps keep k known, the more of them the closer the gain is to 1.

**Bound.** Worth minus cost of drafted steps, y / B - k undrafted steps, is booked on an account. Each step
of either kind adds a quarter of `allowed_loss` of its worth and gains are booked too, but the
account never holds more than 3/4 of `allowed_loss` of `probe_steps` undrafted steps (4 steps at the least),
and drafting stops when it is empty. So T steps in a row, at steady batch size, lose at most a quarter of
allowed_loss T, a full account and one step's surplus: 5/8 of `allowed_loss` of T from
T = 2 probe_steps on (about 360 steps at the least). The rest is room for errors of k, and its
standard error and `CAUTION` are taken off every worth. Usually a test on the gain ends a losing
trial long before the account does.

**Drop.** The gain speaks of the steps before. Where the batch changes, as when prompts of an evaluation come
in of which little is remembered, the drafts of the next step may be worth less than they cost. The sum of
their path probabilities says so before they are verified: only drafts with sum q_j / B > (k - 1) / 2 are,
and now and then others. Of the others the drafter's time is all that is lost, and it is booked.

**Ramp.** One full draft may cost more than the account holds, and on a busy machine one step may take
several times its usual seconds. So a trial begins with one drafted token a request, and each of its steps
may have twice as many: what is found out cheaply is not paid for with a long rest.

**Costs.** Other programs slow a machine down for seconds at a time, by more than drafts cost or save. So no
step is compared with one of another minute. With F the fixed rows of a step, n = B + F, and v the seconds of
one row, which is the machine's speed now:

    undrafted step    v n
    drafted step      v (n (1 + f) + r x)        f, r: what drafts cost, as shares

(log v, f, r) is the state of an extended Kalman filter over log seconds (Anderson and Moore, Optimal
Filtering, 1979, section 8.2). v walks by `DRIFT` a step and f hardly, so the filter learns f where
drafted and undrafted steps meet, and follows the machine between.
"""

import math
from dataclasses import dataclass, field
from operator import mul

from antiphon.core.errors import ContractError

MOST_FIXED_ROWS = 4096.0
"""A step whose time does not grow with the batch at all counts as this many rows."""
DRIFT = 0.01
"""By what share the machine's speed changes from step to step."""
MOST_DRIFT = 0.5
"""Standard deviation of log v after any time without a step."""
FIRST_NOISE = 0.05
"""Standard deviation of a step's log seconds, until it is known."""
LEAST_NOISE = 1e-3
"""Least such deviation: two steps never take the same time."""
FIRST_FIXED = 0.3
"""Standard deviation of f before the first drafted step, and at most."""
FIXED_DRIFT = 0.001
"""By how much f changes from step to step."""
ROW_DRIFT = 0.01
"""By what share r changes from step to step."""
MOST_FIXED = 1.0
"""Most f: a drafter does not take longer than the model, and a step that suggests it met something else."""
LEAST_ROW, MOST_ROW = 1e-6, 1.5
"""Least and most r: a drafted token is never quite free, and takes hardly more than a request's own row."""
KNOWN = 8
"""Steps for which an undrafted step says how fast the machine is."""
OUTLIER = 3.0
"""Standard deviations from which on a step is not believed before the next one of its kind agrees."""
HORIZON = 16
"""Drafted steps over which the gain is smoothed."""
FIRST_BASELINE = 3
"""Undrafted steps before the first draft at a batch size: of three, one may be an outlier."""
COMPARISON = 0.005
"""Share of the drafted rate that undrafted steps for comparison may cost while drafting."""
LEAST_INTERVAL, MOST_INTERVAL = 16, 64
"""Drafted steps between two undrafted ones: few where the gain is small, for there it matters most."""
UNSURE_INTERVAL = 4
"""The same while the error of the cost leaves open whether drafts pay."""
STALE_INTERVAL = 256
"""Steps of any batch size after which one is compared again that was seldom met."""
LEAST_TRIAL = 4
"""Drafted steps before the gain may close the gate."""
CONFIDENCE = 1.5
"""Standard errors by which the gain must lie below 1 for the gate to close."""
LEAST_TO_TRY = 0.5
"""Undrafted steps that the account must hold for a trial to begin."""
LEAST_FLOOR = 0.02
"""Below this, path probabilities are not calibrated well enough to be believed."""
MOST_FLOOR = 0.95
"""Near-certain tokens are always drafted in a drafted step, so that their cost stays measured."""
CAUTION = 0.005
"""Share of a drafted step's worth that is not believed, besides the standard error of its cost."""
MOST_CAUTION = 0.05
"""Most of that standard error that counts: it is large for a step or two, after a change."""
FIRST_WAIT = 64
"""Steps from a closing to the next trial; twice as many after each trial that fails."""
UNSURE = 0.2
"""Standard error of a step's cost, as a share of it, from which on the seconds of the step itself count."""
MOST_BACKOFF = 16
"""Most probing intervals between two trials that keep failing."""
FIXED_ROWS = 8.0
"""Fixed cost of a step in rows until two batch sizes were measured."""
FIT_STEPS = 64
"""Steps between two fits of the fixed cost."""
TRIAL_ROW = 0.5
"""Most r that the floor of a trial counts with: drafts held too dear would never show that they are not."""
HOPE = 0.5
"""Share of what drafts are held to cost above which they are verified. A trial may hold them too dear, and
the line through the costs of long drafts lies above those of short ones: on CPUs at twice and more."""
LOOK_AGAIN = 32
"""Of the steps whose drafts are not expected to pay, one in this many is verified all the same: expectations
that were never put to the test would stay what they are."""
RAMP_STEPS = 16
"""Steps of a trial after which drafts are as long as they may be."""
UNLIMITED = 1 << RAMP_STEPS
LONGEST_STEP_S = 3600.0
"""Steps that seem longer, or shorter than a nanosecond, are mistakes of a clock and not taken in."""


class StepCosts:
    """What steps of similar batch size cost, learnt from neighbouring steps; see the module's text."""

    __slots__ = ("_beyond", "_covariance", "_drafted", "_noise", "_state", "_step", "_undrafted_at")

    def __init__(self, row: float = 1.0, fixed: float = 0.0) -> None:
        """Start without a step; `row` and `fixed` are first guesses of r and f."""
        self._state = [0.0, fixed, row]
        """log v, f and r."""
        self._covariance = [[0.0, 0.0, 0.0], [0.0, FIRST_FIXED * FIRST_FIXED, 0.0], [0.0, 0.0, row * row]]
        self._noise = FIRST_NOISE * FIRST_NOISE
        self._step = 0
        self._drafted = False
        self._undrafted_at = 0
        self._beyond = [0, 0]
        """Of the newest undrafted and the newest drafted step: the residual's sign if an outlier, else 0."""

    @property
    def fixed(self) -> float:
        """Return f, the share of a step that the drafter costs."""
        return self._state[1]

    @property
    def row(self) -> float:
        """Return r, what a drafted token costs relative to a row."""
        return self._state[2]

    @property
    def row_s(self) -> float:
        """Seconds v of one row at the machine's present speed; 0 before the first step."""
        return math.exp(self._state[0]) if self._step else 0.0

    def share(self, density: float) -> float:
        """Return the seconds of a drafted step with x / n = `density` relative to an undrafted step."""
        return 1.0 + self.fixed + self.row * density

    def error(self, density: float) -> float:
        """Return the standard error of `share`."""
        _, (_, fixed, both), (_, _, row) = self._covariance
        return math.sqrt(max(fixed + density * (2.0 * both + density * row), 0.0))

    def rescale(self, factor: float) -> None:
        """Restate v and r for another F, by which a row takes `factor` times the seconds."""
        self._state[0] += math.log(factor)
        self._state[2] /= factor
        for line in self._covariance:
            line[2] /= factor
        self._covariance[2] = [value / factor for value in self._covariance[2]]

    def learn(self, step: int, rows: float, drafted: int | None, seconds: float) -> None:
        """Take in a step.

        Args:
            step: its number, at least 1 and never falling.
            rows: n.
            drafted: x; None for a step without drafts.
            seconds: how long it took, more than 0.
        """
        state, spread = self._state, self._covariance
        if not self._step:
            self._step, state[0], spread[0][0] = step, math.log(seconds / rows), self._noise
            return
        waited, self._step = max(step - self._step, 1), step
        # The state grows less certain, up to a bound. Nothing certain is taken away here, so that the three
        # stay a covariance.
        added = (waited * DRIFT * DRIFT, FIXED_DRIFT * FIXED_DRIFT, (ROW_DRIFT * self.row) ** 2)
        most = (MOST_DRIFT * MOST_DRIFT, FIRST_FIXED * FIRST_FIXED, self.row * self.row)
        for at in range(3):
            spread[at][at] += max(min(added[at], most[at] - spread[at][at]), 0.0)
        units, slopes = rows, (1.0, 0.0, 0.0)
        if drafted is not None:
            units = rows * (1.0 + self.fixed) + self.row * drafted
            slopes = (1.0, rows / units, drafted / units)
        residual = math.log(seconds / units) - state[0]
        with_step, variance = self._innovation(slopes)
        bound = OUTLIER * math.sqrt(variance)
        cut = min(max(residual, -bound), bound)
        self._noise = max(self._noise + (cut * cut - self._noise) / 32.0, LEAST_NOISE * LEAST_NOISE)
        kind, sign = drafted is not None, 0 if cut == residual else (1 if residual > 0.0 else -1)
        before, self._beyond[kind] = self._beyond[kind], sign
        switched, self._drafted = kind != self._drafted, kind
        if not kind:
            self._undrafted_at = step
        if sign:
            if sign != before:
                return
            # The second of its kind. Where undrafted steps have just shown the machine's speed, drafts cost
            # something else than was known; otherwise the machine has another speed, or f has changed too.
            known = kind and step - self._undrafted_at <= KNOWN
            if known:
                spread[2][2] = max(spread[2][2], MOST_ROW * MOST_ROW)
            else:
                spread[0][0] += residual * residual
            if known or switched:
                spread[1][1] = max(spread[1][1], FIRST_FIXED * FIRST_FIXED)
            self._beyond[kind] = 0
            with_step, variance = self._innovation(slopes)
        gains = [covariance / variance for covariance in with_step]
        speed, fixed, row = (value + gain * residual for value, gain in zip(state, gains, strict=True))
        self._state = [speed, min(max(fixed, 0.0), MOST_FIXED), min(max(row, LEAST_ROW), MOST_ROW)]
        for at, gain in enumerate(gains):
            spread[at] = [value - gain * other for value, other in zip(spread[at], with_step, strict=True)]
            spread[at][at] = max(spread[at][at], 0.0)

    def _innovation(self, slopes: tuple[float, float, float]) -> tuple[list[float], float]:
        """Return the covariances of the state with the next log seconds, and the variance of these."""
        with_step = [sum(map(mul, line, slopes)) for line in self._covariance]
        return with_step, max(sum(map(mul, slopes, with_step)), 0.0) + self._noise


@dataclass(slots=True)
class BatchSize:
    """What is known about batches of one octave of sizes: 1, 2-3, 4-7, ..."""

    costs: StepCosts = field(default_factory=StepCosts)
    requests: float = 0.0
    """Mean requests of the newest steps; 0 before the first."""
    owed: int = FIRST_BASELINE
    """Undrafted steps still needed before the first draft."""
    undrafted_at: int = 0
    drafted_steps: int = 0
    """Drafted steps since the last undrafted one."""
    open: bool = True
    changed_at: int = 0
    """Step of the last opening or closing."""
    wait: int = 0
    """Steps to wait while closed; 0 before the first closing."""
    trials: int = 0
    """Drafted steps that the means below speak of."""
    mean_worth: float = 0.0
    """Tokens of a drafted step relative to those of an undrafted one."""
    mean_square: float = 0.0
    """Mean square of the same."""
    mean_density: float = 0.0
    """Drafted tokens of a step relative to its n."""

    @property
    def met(self) -> bool:
        """Whether any step had a batch of this size."""
        return self.requests > 0.0

    @property
    def gain(self) -> float:
        """Worth over cost of this trial's steps; 0 before the first."""
        return self.mean_worth / self.costs.share(self.mean_density) if self.trials else 0.0

    def meet(self, requests: int) -> None:
        """Note a step of `requests`."""
        self.requests += (requests - self.requests) / (HORIZON if self.met else 1)

    def due(self, step: int) -> bool:
        """Return whether an undrafted step must come, so that costs stay known."""
        if self.owed or step - self.undrafted_at >= STALE_INTERVAL:
            return True
        if self.trials < HORIZON:
            return self.drafted_steps >= LEAST_INTERVAL
        surplus = self.mean_worth - self.costs.share(self.mean_density)
        if abs(surplus) < CONFIDENCE * self.costs.error(self.mean_density):
            return self.drafted_steps >= UNSURE_INTERVAL
        return self.drafted_steps >= min(max((self.gain - 1.0) / COMPARISON, LEAST_INTERVAL), MOST_INTERVAL)

    def weigh(self, worth: float, density: float) -> None:
        """Take in a drafted step."""
        self.trials += 1
        share = 1.0 / min(self.trials, HORIZON)
        self.mean_worth += share * (worth - self.mean_worth)
        self.mean_square += share * (worth * worth - self.mean_square)
        self.mean_density += share * (density - self.mean_density)

    def loses(self, requests: int, rows: float) -> bool:
        """Return whether the gain lies below 1 by `CONFIDENCE` standard errors; `rows`: n of such a step."""
        if self.trials < LEAST_TRIAL:
            return False
        # Wins are rare and large: until one was seen, the spread of the sample says too little, so
        # the number of tokens of a request is taken to spread by at least 1. But a drafted token wins one
        # at most: where hardly any is found, nothing more is to be learnt of a trial.
        drafted = min(self.mean_density * rows, requests)
        spread = drafted / (requests * requests)
        variance = max(self.mean_square - self.mean_worth * self.mean_worth, spread)
        effective = min(self.trials, 2 * HORIZON - 1)
        error = math.sqrt(variance / effective + self.costs.error(self.mean_density) ** 2)
        return self.costs.share(self.mean_density) - self.mean_worth > CONFIDENCE * error


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next engine step should do."""

    draft: bool
    """Propose tokens for the next step."""
    floor: float
    """Least path probability of a drafted token that pays, in 0..1; 1 where nothing is to be drafted."""
    most: int = UNLIMITED
    """Most drafted tokens of one request."""


_NO_DRAFT = StepPlan(draft=False, floor=1.0)


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
        self._most_account = max(0.75 * allowed_loss * probe_steps, 4.0)
        self._account = self._most_account
        self._fixed_rows = FIXED_ROWS
        self._sizes: list[BatchSize] = []
        self._latest: BatchSize | None = None
        self._step = self._dropped = 0
        self.promising = False
        """Whether most of the newest drafted tokens were right. Trials that failed before history helped, at
        one batch size, then say little: the next one waits no longer than after the first failure. The
        account bounds what that may cost."""

    @property
    def gain(self) -> float:
        """Tokens per second of the newest drafted steps relative to undrafted ones; 0 before any."""
        return self._latest.gain if self._latest is not None else 0.0

    def is_open(self, requests: int) -> bool:
        """Return whether drafts are held to pay, or not yet known to lose, at this batch size."""
        return self._size(requests).open

    def plan(self, requests: int) -> StepPlan:
        """Decide about the next step, of `requests` requests. Asking changes nothing."""
        if requests < 1 or self._account < 0.0:
            return _NO_DRAFT
        size = self._size(requests)
        waited = self._step - size.changed_at
        if size.due(self._step) or not (size.open or waited >= self._wait(size)):
            return _NO_DRAFT
        steps = size.trials if size.open else 0
        if not steps and self._account < LEAST_TO_TRY:
            return _NO_DRAFT
        # The gain of a few steps is mostly luck; until there are enough, lean on 1.
        trust = min(size.trials, HORIZON) / HORIZON
        gain = max(1.0 + trust * (size.gain - 1.0), 1.0)
        row = size.costs.row if steps >= HORIZON else min(size.costs.row, TRIAL_ROW)
        floor = gain * requests * row / (requests + self._fixed_rows)
        floor = min(max(floor, LEAST_FLOOR), MOST_FLOOR)
        return StepPlan(draft=True, floor=floor, most=1 << min(steps, RAMP_STEPS))

    def verifies(self, requests: int, drafted: int, expected: float) -> bool:
        """Decide whether drafts that were made for the next step are verified in it.

        `requests`: B; `drafted`: tokens of them all; `expected`: how many of these are expected to be right,
        the sum of their path probabilities. One in a few steps is verified against the rule.
        """
        size, density = self._size(requests), drafted / (requests + self._fixed_rows)
        cost = size.costs.share(density) - 1.0 - size.costs.error(density)
        if drafted > 0 and expected > HOPE * cost * requests:
            return True
        self._dropped += 1
        return drafted > 0 and self._dropped % LOOK_AGAIN == 0

    def wake(self) -> None:
        """Allow a trial at once at every batch size: there is something new to draft from."""
        for size in self._sizes:
            if not size.open:
                size.wait = FIRST_WAIT
                size.changed_at = self._step - FIRST_WAIT

    def observe(
        self,
        requests: int,
        rows: int,
        tokens: int,
        seconds: float,
        drafted: bool,
        stands_for: int = 1,
        unused_s: float = 0.0,
    ) -> None:
        """Take in one engine step that only decoded.

        `requests`: B; `rows`: B plus the drafted tokens; `tokens`: emitted; `seconds`: of the whole
        step and of the drafter before it; `drafted`: the drafter ran for it, though it may have proposed
        nothing (rows == requests); `stands_for`: this many steps like it, itself and those before it that
        were not told; `unused_s`: of an undrafted step, seconds beside it of a drafter whose drafts were not
        verified. Steps without requests or of senseless duration are ignored.
        """
        if requests < 1 or not 1e-9 < seconds < LONGEST_STEP_S:
            return
        self._step += stands_for
        size = self._size(requests)
        if not size.met:
            if drafted:
                return
            if self._latest is not None:  # expect of it what drafts cost in seconds at the latest size
                costs, known = self._latest.costs, self._latest.requests + self._fixed_rows
                size.costs = StepCosts(costs.row, costs.fixed * known / (requests + self._fixed_rows))
        size.meet(requests)
        if drafted:
            self._observe_drafted(size, requests, max(rows - requests, 0), tokens, seconds)
        else:
            size.costs.learn(self._step, requests + self._fixed_rows, None, seconds)
            size.undrafted_at, size.drafted_steps = self._step, 0
            size.owed = max(size.owed - 1, 0)
            if self._step % FIT_STEPS < stands_for:
                self._fit()
            self._book(0.0, float(stands_for))
            self._account -= unused_s / seconds

    def _fit(self) -> None:
        """Learn F, and restate by it what is known."""
        before, self._fixed_rows = self._fixed_rows, fixed_rows(self._sizes, self._fixed_rows)
        for size in filter(lambda size: size.met, self._sizes):
            factor = (size.requests + before) / (size.requests + self._fixed_rows)
            size.costs.rescale(factor)
            size.mean_density *= factor

    def _observe_drafted(
        self, size: BatchSize, requests: int, drafted: int, tokens: int, seconds: float
    ) -> None:
        if not size.open and self._step - size.changed_at > self._wait(size):
            size.open, size.changed_at = True, self._step
            # Forget the gain: a new trial counts by its own steps.
            size.trials, size.mean_worth, size.mean_square, size.mean_density = 0, 0.0, 0.0, 0.0
        size.drafted_steps += 1
        rows = requests + self._fixed_rows
        size.costs.learn(self._step, rows, drafted, seconds)
        worth, density = tokens / requests, drafted / rows
        size.weigh(worth, density)
        self._latest = size
        believed = worth * (1.0 - CAUTION) - min(size.costs.error(size.mean_density), MOST_CAUTION)
        share = size.costs.share(density)
        if size.costs.error(density) > UNSURE * share:
            # What was learnt of a few drafted tokens says little about a step with many; the step does.
            share = min(share, seconds / (size.costs.row_s * rows))
        self._book(believed - share, worth)
        if size.open and (self._account < 0.0 or size.loses(requests, rows)):
            self._close(size)

    def _wait(self, size: BatchSize) -> int:
        """Return how many steps a closed size waits for its next trial."""
        return min(size.wait, FIRST_WAIT) if self.promising else size.wait

    def _close(self, size: BatchSize) -> None:
        # A phase that lasted was worth having: look again soon. A trial that failed: wait twice as long.
        lasted = size.trials >= 2 * HORIZON
        most = MOST_BACKOFF * self._probe_steps
        size.wait = FIRST_WAIT if lasted else min(max(2 * size.wait, FIRST_WAIT), most)
        size.open, size.changed_at = False, self._step

    def _book(self, earned: float, worth: float) -> None:
        """Book what a step earned beyond an undrafted one, in such steps, as is its whole worth."""
        self._account = min(self._account + earned + self._income * worth, self._most_account)

    def _size(self, requests: int) -> BatchSize:
        octave = requests.bit_length()
        while octave >= len(self._sizes):
            self._sizes.append(BatchSize())
        return self._sizes[octave]


def fixed_rows(sizes: list[BatchSize], fixed: float) -> float:
    """Fit u(B) = a + b B through the sizes, each counting by its relative error, and return F = a / b.

    `fixed` is F so far, which is returned where there are too few sizes to tell.
    """
    points = [(s.requests, s.costs.row_s * (s.requests + fixed)) for s in sizes if s.met and not s.owed]
    if len(points) < 2 or points[-1][0] < 2.0 * points[0][0]:
        return fixed
    weight = sum(1.0 / (s * s) for _, s in points)
    mean_b = sum(b / (s * s) for b, s in points) / weight
    mean_s = sum(1.0 / s for _, s in points) / weight
    slope = sum((b - mean_b) * (s - mean_s) / (s * s) for b, s in points)
    slope /= sum((b - mean_b) ** 2 / (s * s) for b, s in points)
    if slope <= 0.0:
        return MOST_FIXED_ROWS
    return min(max((mean_s - slope * mean_b) / slope, 0.0), MOST_FIXED_ROWS)
