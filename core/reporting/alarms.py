"""Alarms: what in a run's metrics a person should look at now, decided from its commits alone.

An alarm never stops a run. It is raised by values that hold over a whole window of steps, since
single batches of reinforcement learning are noisy: rewards of good runs fall to a fifth for a
hundred steps and come back, a collapsed run stays at its lowest.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from antiphon.core.records import StepCommit
from antiphon.core.status import LearnerProgress, RunStatus, WorkerState

WINDOW = 50
"""Steps over which a value must hold; a run shorter than two windows uses a quarter of its steps."""
LEAST_WINDOW = 10
"""No window is shorter: fewer batches say little."""
COLLAPSED_SHARE = 0.05
"""Of the way from the lowest batch to the best window; a reward below it is lost. Real runs that
recovered went down to 0.15 of it."""
UNIFORM_SHARE = 0.9
"""Of log V, the entropy of a policy that prefers no token to another."""
CERTAIN_NATS = 1e-3
"""Entropy below which every group is eight times the same answer."""
DIVERGED_NATS = 0.1
"""kl_k3 per token between the weights that sampled and the same weights in the learner. Rounding of
bf16 makes less than 0.01; another model or temperature makes several tenths."""
USEFUL_SHARE = 0.3
"""Effective sample share of the weights that were applied, below which most tokens carry no weight."""
AT_BOUND_SHARE = 0.95
"""Of the bound; a mean staleness above it leaves no room for a late worker."""
CUT_SHARE = 0.95
"""Of sampling.max_tokens; where the mean length is above it, most answers did not end by themselves."""
IDLE_STEPS = 5
"""This many steps in a row that train nothing are worth a sentence; a single one is ordinary."""
FALLEN_ERRORS = 4.0
"""Standard errors of the difference of two held-out scores that are no chance, also among many versions."""
LEAST_FREE_BYTES = 1 << 30
"""Free space below which the next snapshots may not fit."""
WAITS_FOR_SPACE = "waiting for space"
"""Begins what a learner does that may not publish, since too little of its disk is free."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing to look at."""

    name: str
    """A name of ALARMS."""
    step: int
    """Step of the last commit that showed it; -1 for what is not about a step."""
    text: str
    """One sentence with the numbers."""


@dataclass(frozen=True, slots=True)
class AlarmKind:
    """What an alarm means and what to do about it."""

    name: str
    meaning: str
    fix: str


ALARMS: tuple[AlarmKind, ...] = (
    AlarmKind(
        "reward_collapse",
        f"the mean reward of the window, or of {IDLE_STEPS} steps that trained nothing, lies below "
        f"{COLLAPSED_SHARE:.0%} of what was learned",
        "stop; go back to a version before the fall (`antiphon lineage`), with a lower learning rate",
    ),
    AlarmKind(
        "heldout_fall",
        f"the last held-out score lies {FALLEN_ERRORS:g} standard errors below that of an earlier version",
        "look whether it comes back (`antiphon evaluate --samples`); else stop, export the version before "
        "the fall, and start again with a lower learner.learning_rate or loop.max_staleness",
    ),
    AlarmKind(
        "entropy_explosion",
        f"entropy above {UNIFORM_SHARE:.0%} of log V: the policy writes noise",
        "as for reward_collapse; check the KL term and the learning rate",
    ),
    AlarmKind(
        "entropy_collapse",
        f"entropy below {CERTAIN_NATS:g} nats: groups repeat one answer and teach nothing",
        "raise sampling.temperature, take harder prompts, or stop: the policy is done",
    ),
    AlarmKind(
        "sampler_divergence",
        f"kl_k3 of fresh tokens above {DIVERGED_NATS:g} nats: learner and workers do not run one policy",
        "compare dtype, sampling parameters and the version workers hold; `antiphon replay --rollouts`",
    ),
    AlarmKind(
        "useless_batches",
        f"effective sample share below {USEFUL_SHARE:.0%}: most tokens were masked, clipped or outweighed",
        "lower loop.max_staleness or the learning rate; with correction=mask widen its bounds",
    ),
    AlarmKind(
        "no_signal",
        f"{IDLE_STEPS} steps in a row, or all of a run, trained nothing: no group's rewards differed, the "
        "gradient was zero, or the weights stayed the same",
        "read what it answers (`antiphon evaluate --samples`); take prompts that are neither solved nor "
        "hopeless, raise sampling.temperature or loop.group_size, and let learner.learning_rate be above 0",
    ),
    AlarmKind(
        "staleness_at_bound",
        f"groups were dropped as too old, mean staleness above {AT_BOUND_SHARE:.0%} of loop.max_staleness",
        "give the learner or the workers more, or raise loop.max_staleness",
    ),
    AlarmKind(
        "stall",
        "no token, group, reward, micro-batch or byte for services.stall_timeout_s",
        "`antiphon status` names who is waited for; its log is under runs/RUN/logs",
    ),
    AlarmKind(
        "swap_failed",
        "a worker cannot load newer weights: it samples with those it has, or with none",
        "read the reason; see the worker's log, and that it has the run's own model and learner.pub",
    ),
    AlarmKind(
        "no_space",
        f"less than {LEAST_FREE_BYTES >> 30} GiB free where the run is kept, or less than record.free_mib",
        "`antiphon gc`, or free space otherwise; a full disk pauses the run and loses nothing",
    ),
    AlarmKind(
        "unaudited",
        "groups that were drawn for an audit could not be checked",
        "read the reason; raise broadcast.snapshots_kept if versions were gone, else see the learner's log",
    ),
    AlarmKind(
        "records_late",
        "MLflow, the ledger or another sink has not answered for a minute, refused records, or stopped",
        "read the reason; what it lacks waits in the journal and follows, else `antiphon keep RUN --records`",
    ),
)


class StepAlarms:
    """What a run's commits show, folded commit by commit; what is kept does not grow with the run."""

    def __init__(self) -> None:
        self.count = 0
        """Commits so far, which come in step order."""
        self.last: StepCommit | None = None
        self.idle = IdleSteps()
        """The newest steps in a row that trained nothing."""
        self._recent: deque[StepCommit] = deque(maxlen=WINDOW)
        self._sums: deque[float] = deque([0.0], maxlen=4 * WINDOW + 1)
        """Sums of the rewards of the first n steps that trained, for the newest n."""
        self._lowest, self._best = math.inf, -math.inf
        """The lowest reward; the best mean of a whole window."""
        self._row: deque[float] = deque(maxlen=IDLE_STEPS)
        self._earned = 0.0
        """The most that each of IDLE_STEPS steps in a row earned."""
        self._earned_before = 0.0
        """The same of the steps before the idle ones."""

    def add(self, commit: StepCommit) -> None:
        """Take in the next commit."""
        why = untrained(commit, "" if self.last is None else self.last.weights_digest)
        if not why:
            self.idle = IdleSteps()
        elif not self.idle.count:
            self._earned_before = self._earned if self.count >= IDLE_STEPS else min(self._row, default=0.0)
        if why:
            self.idle.add(commit, why)
        self.count, self.last = self.count + 1, commit
        self._recent.append(commit)
        for reward in _values([commit], "reward_mean"):
            self._sums.append(self._sums[-1] + reward)
            self._lowest = min(self._lowest, reward)
            if len(self._sums) > WINDOW:
                self._best = max(self._best, (self._sums[-1] - self._sums[-1 - WINDOW]) / WINDOW)
        self._row.append(commit.metrics.get("reward_mean", 0.0))
        if len(self._row) == IDLE_STEPS:
            lowest = min(self._row)
            self._earned = lowest if self.count == IDLE_STEPS else max(self._earned, lowest)

    def find(
        self,
        max_staleness: int,
        vocabulary: int | None = None,
        steps: int | None = None,
        max_tokens: int | None = None,
    ) -> tuple[Alarm, ...]:
        """Return what the metrics of the last window of steps show.

        Without a `vocabulary` (number of tokens V) the entropy's upper end is not watched, without `steps`
        (run.steps) it is not known when a run is over, and without `max_tokens` (sampling.max_tokens) not
        which completions were cut off.
        """
        if self.last is None:
            return ()
        idle = self._no_signal(steps, max_tokens)
        window = min(WINDOW, self.count // 4)
        if window < LEAST_WINDOW:
            return () if idle is None else (idle,)
        recent = [*self._recent][-window:]
        last = self.last.step
        means = {
            name: sum(values) / len(values)
            for name in ("entropy_estimate", "kl_k3.staleness_0", "effective_sample_share", "staleness_mean")
            if (values := _values(recent, name))
        }
        found = [
            idle,
            None if idle is not None and idle.name == "reward_collapse" else self._reward(window),
            *(_level(means, last, rule) for rule in _levels(vocabulary)),
        ]
        # Samples wait for a slow learner up to the bound, which harms nothing as long as none is dropped.
        dropped = sum(_values(recent, "groups_dropped_stale"))
        if (
            max_staleness > 0
            and means.get("staleness_mean", 0.0) > AT_BOUND_SHARE * max_staleness
            and dropped
        ):
            said = (
                f"{dropped:.0f} groups were dropped as too old, and the mean staleness was "
                f"{means['staleness_mean']:.2f} over {window} steps; the bound is {max_staleness}"
            )
            found.append(Alarm("staleness_at_bound", last, said))
        return tuple(alarm for alarm in found if alarm is not None)

    def _no_signal(self, steps: int | None, max_tokens: int | None) -> Alarm | None:
        """Say that the last steps trained nothing, or all steps of a run that is over."""
        idle = self.idle
        if idle.last is None or (idle.count < IDLE_STEPS and not idle.count == self.count == steps):
            return None
        # What only some steps earn is luck, and steps without it are no fall.
        if idle.reward_sum / idle.count < COLLAPSED_SHARE * self._earned_before:
            said = f"{idle.words(max_tokens)}, after {self._earned_before:.3g} before"
            return Alarm("reward_collapse", idle.last.step, said)
        return Alarm("no_signal", idle.last.step, idle.words(max_tokens))

    def _reward(self, window: int) -> Alarm | None:
        sums = [*self._sums]
        if self.last is None or len(sums) <= 2 * window:
            return None
        best, now = self._best, (sums[-1] - sums[-1 - window]) / window
        if window < WINDOW:  # a short run, of which all sums are kept
            best = max((sums[end] - sums[end - window]) / window for end in range(window, len(sums)))
        lowest = self._lowest
        # Without this a run that never learned anything would have lost everything.
        if best - lowest <= 1e-9 or now - lowest >= COLLAPSED_SHARE * (best - lowest):
            return None
        said = f"mean reward {now:.3g} over {window} steps, after {best:.3g} in the best {window}"
        return Alarm("reward_collapse", self.last.step, said)


def alarms_of(commits: Iterable[StepCommit]) -> StepAlarms:
    """Return what all commits of a run so far show, in step order."""
    alarms = StepAlarms()
    for commit in commits:
        alarms.add(commit)
    return alarms


@dataclass(slots=True)
class IdleSteps:
    """Steps in a row that trained nothing."""

    count: int = 0
    last: StepCommit | None = None
    why: dict[str, None] = field(default_factory=dict)
    """The reasons, each once, in order."""
    reward_sum: float = 0.0
    rewards: set[float] = field(default_factory=set)
    """Different rewards, at most three of them."""
    reward: float = 0.0
    """The last one."""
    token_sum: float = 0.0
    """Of the steps' mean completion lengths."""

    def add(self, commit: StepCommit, why: str) -> None:
        """Count one more, and `why` it trained nothing."""
        self.count, self.last = self.count + 1, commit
        self.why[why] = None
        self.token_sum += commit.metrics.get("completion_tokens_mean", 0.0)
        if "reward_mean" in commit.metrics:
            self.reward = commit.metrics["reward_mean"]
            self.reward_sum += self.reward
            if len(self.rewards) < 3:
                self.rewards.add(self.reward)

    def words(self, max_tokens: int | None = None) -> str:
        """Say that they trained nothing, and why.

        >>> idle = IdleSteps()
        >>> for step in range(5):
        ...     metrics = {"trajectories": 0.0, "reward_mean": 0.0}
        ...     idle.add(StepCommit(step, step + 1, "aa", "bb", metrics), "no group's rewards differed")
        >>> idle.words()
        "5 steps in a row trained nothing: no group's rewards differed; all rewards were 0"
        """
        steps = "1 step" if self.count == 1 else f"{self.count} steps in a row"
        level = f"; the mean reward is {self.reward:.3g}" if self.rewards else ""
        if self.rewards in ({0.0}, {1.0}):
            level = f"; all rewards were {self.reward:.3g}"
        if max_tokens is not None and self.count and self.token_sum >= CUT_SHARE * max_tokens * self.count:
            level += (
                f"; nearly all answers were cut off at sampling.max_tokens={max_tokens}: raise it, or look "
                "at whether the model's end token is the one that its files name"
            )
        return f"{steps} trained nothing: {' or '.join(self.why)}{level}"


def untrained(commit: StepCommit, weights_before: str) -> str:
    """Return why a step trained nothing; "" where it trained.

    A step trained when it had trajectories, their gradient was not zero and the weights changed;
    `weights_before` is the digest of those it began with, "" for the first step.
    """
    if commit.metrics.get("trajectories", 1.0) <= 0:
        return "no group's rewards differed"
    if commit.metrics.get("gradient_norm", 1.0) <= 0:
        return "the gradient was zero"
    return "the weights did not change" if commit.weights_digest == weights_before else ""


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is in a run, and the counter that moves while they work."""

    step: int
    counter: int
    counted: str
    """What is counted, in the singular."""
    waiting: str
    """Whom the run waits for, as a sentence."""


def turn_of(status: RunStatus, learner: LearnerProgress | None) -> Turn:
    """Return whose turn it is: the learner's once a batch is sealed (`learner`: None where it does not
    answer), else that of workers and reward services.
    """
    step = status.committed_steps
    if status.sealed_steps <= step:
        return Turn(step, status.work_done, "token, group or reward", status.waiting)
    if learner is None:
        return Turn(step, -1, "answer of the learner", status.waiting)
    return Turn(step, learner.counter, learner.counted, f"the learner is {learner.doing}")


def stall_alarm(still_s: float, limit_s: float, turn: Turn) -> Alarm | None:
    """Return the alarm of a run that does not continue.

    Args:
        still_s: seconds without a change of the counter.
        limit_s: services.stall_timeout_s.
        turn: whose counter it is.

    >>> stall_alarm(400.0, 300.0, Turn(12, 7, "micro-batch", "the learner is training step 12")).text
    'step 12: no micro-batch for 400 s; the learner is training step 12'
    """
    if still_s <= limit_s:
        return None
    return Alarm("stall", -1, f"step {turn.step}: no {turn.counted} for {still_s:.0f} s; {turn.waiting}")


def space_alarm(free_bytes: int, place: str) -> Alarm | None:
    """Return the alarm of a disk that is nearly full.

    >>> space_alarm(200 << 20, "runs").text
    'only 0.20 GiB are free for runs'
    """
    if free_bytes >= LEAST_FREE_BYTES:
        return None
    return Alarm("no_space", -1, f"only {free_bytes / (1 << 30):.2f} GiB are free for {place}")


def short_of_space(learner: LearnerProgress | None) -> Alarm | None:
    """Return the alarm of a learner that may not publish before there is more space.

    >>> short_of_space(LearnerProgress("waiting for space to publish version 3", 7, "byte")).text
    'waiting for space to publish version 3'
    """
    if learner is None or not learner.doing.startswith(WAITS_FOR_SPACE):
        return None
    return Alarm("no_space", -1, learner.doing)


def status_alarms(status: RunStatus) -> tuple[Alarm, ...]:
    """Return what a run's state at this moment shows, and no commit."""
    found = _audit_alarm(status), swap_alarm(status), heldout_alarm(status)
    return tuple(alarm for alarm in found if alarm is not None)


def _audit_alarm(status: RunStatus) -> Alarm | None:
    """Return the alarm of audits that did not take place; they go on with the next group."""
    if not status.unaudited:
        return None
    said = f"{status.unaudited} groups could not be audited; one of them: {status.unaudited_reason}"
    return Alarm("unaudited", -1, said)


def heldout_alarm(status: RunStatus) -> Alarm | None:
    """Return the alarm of a held-out score that fell further below an earlier one than chance explains.

    A score of n rewards in [0, 1] with mean p has a standard error of at most sqrt(p (1 - p) / n). Both
    are taken with the p of both together: all of a few right and then none would have no error by their own.
    """
    if not status.scores:
        return None
    last = status.scores[-1]
    best = max(status.scores, key=lambda score: score.reward_mean)
    sizes = [max(1, score.prompts) for score in (last, best)]
    mean = (last.reward_mean * sizes[0] + best.reward_mean * sizes[1]) / sum(sizes)
    error = math.sqrt(mean * (1.0 - mean) * sum(1.0 / size for size in sizes))
    if best.reward_mean - last.reward_mean <= FALLEN_ERRORS * error:
        return None
    said = (
        f"the held-out score of version {last.version} is {last.reward_mean:.1%}, "
        f"after {best.reward_mean:.1%} of version {best.version}"
    )
    return Alarm("heldout_fall", -1, said)


def swap_alarm(status: RunStatus) -> Alarm | None:
    """Return the alarm of workers that cannot load newer weights; the one that fails longest is quoted."""
    failing = [w for w in status.workers if w.swap_error and w.state is not WorkerState.LOST]
    if not failing:
        return None
    worst = max(failing, key=lambda worker: worker.swap_failing_s)
    samples = (
        "samples with nothing" if worst.held_version is None else f"stays at version {worst.held_version}"
    )
    others = f"; {len(failing) - 1} others fail as well" if len(failing) > 1 else ""
    said = f"{worst.worker_id} {samples} for {worst.swap_failing_s:.0f} s: {worst.swap_error}{others}"
    return Alarm("swap_failed", -1, said)


@dataclass(frozen=True, slots=True)
class _Level:
    name: str
    metric: str
    wrong: Callable[[float], bool]
    words: str


def _levels(vocabulary: int | None) -> Sequence[_Level]:
    most = math.inf if vocabulary is None else UNIFORM_SHARE * math.log(vocabulary)
    noise = f"nats; log V = {most / UNIFORM_SHARE:.3g}"
    return (
        _Level("entropy_explosion", "entropy_estimate", lambda x: x > most, noise),
        _Level("entropy_collapse", "entropy_estimate", lambda x: x < CERTAIN_NATS, "nats"),
        _Level("sampler_divergence", "kl_k3.staleness_0", lambda x: x > DIVERGED_NATS, "nats per token"),
        _Level("useless_batches", "effective_sample_share", lambda x: x < USEFUL_SHARE, "of the tokens"),
    )


def _level(means: Mapping[str, float], last: int, rule: _Level) -> Alarm | None:
    mean = means.get(rule.metric)
    if mean is None or not rule.wrong(mean):
        return None
    return Alarm(rule.name, last, f"{rule.metric} is {mean:.3g} {rule.words}")


def _values(commits: Sequence[StepCommit], name: str) -> list[float]:
    """Return a metric of every commit that trained on something and reports it."""
    found = []
    for commit in commits:
        value = commit.metrics.get(name)
        if value is not None and math.isfinite(value) and commit.metrics.get("trajectories", 1.0) > 0:
            found.append(value)
    return found
