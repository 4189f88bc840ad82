"""Alarms: what in a run's metrics a person should look at now, decided from its commits alone.

An alarm never stops a run. It is raised by values that hold over a whole window of steps, since
single batches of reinforcement learning are noisy: rewards of good runs fall to a fifth for a
hundred steps and come back, a collapsed run stays at its lowest.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.records import StepCommit
from antiphon.core.reporting.figures import score
from antiphon.core.status import EvaluationRecord, LearnerProgress, RunStatus, WorkerRecord, WorkerState

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
        "unscored",
        "answers could not be scored: they train nothing, and solved nothing in held-out scores",
        "read the reason, and the reward service's log; raise reward.answer_timeout_s or reward.memory_mib "
        "where answers need more",
    ),
    AlarmKind(
        "records_late",
        "MLflow, the ledger or another sink has not answered for a minute, refused records, or stopped",
        "read the reason; what it lacks waits in the journal and follows, else `antiphon keep RUN --records`",
    ),
)


class StepAlarms:
    """What a run's commits show, taken in one by one; of those that are past a few numbers are kept."""

    def __init__(self, commits: Iterable[StepCommit] = (), reward_range: RewardRange = UNIT_RANGE) -> None:
        self.reward_range = reward_range
        self.count = 0
        """Commits so far, which come in step order."""
        self.last: StepCommit | None = None
        self.idle: list[tuple[StepCommit, str]] = []
        """The newest steps in a row that trained nothing, and why."""
        self._recent: deque[StepCommit] = deque(maxlen=WINDOW)
        self._trained = array("d")
        """Rewards of the steps that trained."""
        self._rewards = array("d")
        """Of every step, how far they lie above the least one; 0 where none was reported."""
        for commit in commits:
            self.add(commit)

    def add(self, commit: StepCommit) -> None:
        """Take in the next commit."""
        why = untrained(commit, "" if self.last is None else self.last.weights_digest)
        if why:
            self.idle.append((commit, why))
        else:
            self.idle.clear()
        self.count, self.last = self.count + 1, commit
        self._recent.append(commit)
        self._trained.extend(_values([commit], "reward_mean"))
        least = self.reward_range[0]
        self._rewards.append(commit.metrics.get("reward_mean", least) - least)

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
        found = self._no_signal(steps, max_tokens)
        window = min(WINDOW, self.count // 4)
        if window < LEAST_WINDOW:
            return tuple(found)
        recent = [*self._recent][-window:]
        last = recent[-1].step
        if not any(alarm.name == "reward_collapse" for alarm in found):
            found += self._reward(window)

        def mean(name: str) -> float:
            values = _values(recent, name)
            return sum(values) / len(values) if values else math.nan

        most = math.inf if vocabulary is None else UNIFORM_SHARE * math.log(vocabulary)
        entropy, kl = mean("entropy_estimate"), mean("kl_k3.staleness_0")
        useful, staleness = mean("effective_sample_share"), mean("staleness_mean")
        noise = f"nats; log V = {most / UNIFORM_SHARE:.3g}"
        levels = (
            ("entropy_explosion", "entropy_estimate", entropy, entropy > most, noise),
            ("entropy_collapse", "entropy_estimate", entropy, entropy < CERTAIN_NATS, "nats"),
            ("sampler_divergence", "kl_k3.staleness_0", kl, kl > DIVERGED_NATS, "nats per token"),
            ("useless_batches", "effective_sample_share", useful, useful < USEFUL_SHARE, "of the tokens"),
        )
        found += [
            Alarm(name, last, f"{metric} is {value:.3g} {words}")
            for name, metric, value, wrong, words in levels
            if wrong
        ]
        # Samples wait for a slow learner up to the bound, which harms nothing as long as none is dropped.
        dropped = sum(_values(recent, "groups_dropped_stale"))
        if max_staleness > 0 and staleness > AT_BOUND_SHARE * max_staleness and dropped:
            said = (
                f"{dropped:.0f} groups were dropped as too old, and the mean staleness was "
                f"{staleness:.2f} over {window} steps; the bound is {max_staleness}"
            )
            found.append(Alarm("staleness_at_bound", last, said))
        return tuple(found)

    def idle_words(self, max_tokens: int | None = None) -> str:
        """Say that the newest steps trained nothing, and why.

        >>> nothing = {"trajectories": 0.0, "reward_mean": 0.0}
        >>> StepAlarms(StepCommit(step, step + 1, "aa", "bb", nothing) for step in range(5)).idle_words()
        "5 steps in a row trained nothing: no group's rewards differed; all rewards were 0"
        """
        count = len(self.idle)
        rewards = [c.metrics["reward_mean"] for c, _ in self.idle if "reward_mean" in c.metrics]
        level = f"; the mean reward is {rewards[-1]:.3g}" if rewards else ""
        if set(rewards) in [{end} for end in self.reward_range]:
            level = f"; all rewards were {rewards[-1]:.3g}"
        tokens = sum(commit.metrics.get("completion_tokens_mean", 0.0) for commit, _ in self.idle)
        if max_tokens is not None and count and tokens >= CUT_SHARE * max_tokens * count:
            level += (
                f"; nearly all answers were cut off at sampling.max_tokens={max_tokens}: raise it, or look "
                "at whether the model's end token is the one that its files name"
            )
        reasons = " or ".join(dict.fromkeys(why for _, why in self.idle))
        steps = "1 step" if count == 1 else f"{count} steps in a row"
        return f"{steps} trained nothing: {reasons}{level}"

    def _no_signal(self, steps: int | None, max_tokens: int | None) -> list[Alarm]:
        """Say that the last steps trained nothing, or all steps of a run that is over."""
        count = len(self.idle)
        if not count or (count < IDLE_STEPS and not count == self.count == steps):
            return []
        # What only some steps earn is luck, and steps without it are no fall.
        before = np.array(self._rewards[:-count])
        rows = sliding_window_view(before, min(IDLE_STEPS, before.size)) if before.size else np.zeros((1, 1))
        earned = float(rows.min(axis=1).max())
        step, said = self.idle[-1][0].step, self.idle_words(max_tokens)
        if sum(self._rewards[-count:]) / count < COLLAPSED_SHARE * earned:
            return [
                Alarm("reward_collapse", step, f"{said}, after {earned + self.reward_range[0]:.3g} before")
            ]
        return [Alarm("no_signal", step, said)]

    def _reward(self, window: int) -> list[Alarm]:
        """Say that the last window earned hardly anything of what the best one did."""
        if len(self._trained) < 2 * window:
            return []
        sums = np.cumsum([0.0, *self._trained])
        means = (sums[window:] - sums[:-window]) / window
        best, now, lowest = float(means.max()), float(means[-1]), min(self._trained)
        # Without this a run that never learned anything would have lost everything.
        if best - lowest <= 1e-9 or now - lowest >= COLLAPSED_SHARE * (best - lowest):
            return []
        said = f"mean reward {now:.3g} over {window} steps, after {best:.3g} in the best {window}"
        return [Alarm("reward_collapse", self._recent[-1].step, said)]


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
    unaudited = f"{status.unaudited} groups could not be audited; one of them: {status.unaudited_reason}"
    unscored = f"{status.trajectories_failed} answers could not be scored; the last: {status.last_failure}"
    said = {
        "unscored": unscored if status.trajectories_failed else "",
        "unaudited": unaudited if status.unaudited else "",
        "swap_failed": _swap_words(status),
        "heldout_fall": _heldout_words(status.scores, status.reward_range),
    }
    return tuple(Alarm(name, -1, text) for name, text in said.items() if text)


def _heldout_words(scores: Sequence[EvaluationRecord], within: RewardRange) -> str:
    """Say that the last held-out score fell further below an earlier one than chance explains; "" if not.

    A score of n rewards in [a, b] with mean p has a standard error of at most sqrt((p - a) (b - p) / n). Both
    are taken with the p of both together: all of a few right and then none would have no error by their own.
    """
    if not scores:
        return ""
    last, best = scores[-1], max(scores, key=lambda known: known.reward_mean)
    sizes = [max(1, known.prompts) for known in (last, best)]
    mean = (last.reward_mean * sizes[0] + best.reward_mean * sizes[1]) / sum(sizes)
    low, high = within
    error = math.sqrt(max(0.0, (mean - low) * (high - mean)) * sum(1.0 / size for size in sizes))
    if best.reward_mean - last.reward_mean <= FALLEN_ERRORS * error:
        return ""
    return (
        f"the held-out score of version {last.version} is {score(last.reward_mean, within)}, "
        f"after {score(best.reward_mean, within)} of version {best.version}"
    )


def failing_swaps(status: RunStatus) -> list[WorkerRecord]:
    """Return the workers that cannot load newer weights."""
    return [w for w in status.workers if w.swap_error and w.state is not WorkerState.LOST]


def _swap_words(status: RunStatus) -> str:
    """Say that workers cannot load newer weights, with the one that fails longest; "" when all can."""
    failing = failing_swaps(status)
    if not failing:
        return ""
    worst = max(failing, key=lambda worker: worker.swap_failing_s)
    held = worst.held_version
    samples = "samples with nothing" if held is None else f"stays at version {held}"
    others = f"; {len(failing) - 1} others fail as well" if len(failing) > 1 else ""
    return f"{worst.worker_id} {samples} for {worst.swap_failing_s:.0f} s: {worst.swap_error}{others}"


def _values(commits: Sequence[StepCommit], name: str) -> list[float]:
    """Return a metric of every commit that trained on something and reports it."""
    found = []
    for commit in commits:
        value = commit.metrics.get(name)
        if value is not None and math.isfinite(value) and commit.metrics.get("trajectories", 1.0) > 0:
            found.append(value)
    return found
