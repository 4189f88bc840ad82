"""Schedule: the overlapping loop as a list of stages; the flow, the simulator and the benchmarks walk it.

For learner step t, collect and reward wait for the broadcast of the oldest version that the
staleness bound S allows; step waits for both and for the step before; broadcast waits for the step
that made its version. The bound moves one edge.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from antiphon.core.config import RunConfig
from antiphon.core.loop.admission import kept_until
from antiphon.core.loop.staleness import is_published, oldest_allowed_version

StageKey = tuple[str, int]
"""Name and number of a stage."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One task of the loop."""

    name: str
    """collect, reward, step, broadcast or evaluate."""
    number: int
    """The learner step; of broadcast and evaluate, the policy version."""
    after: tuple[StageKey, ...] = ()
    """The stages that must have ended well before; all of them stand earlier in the list."""
    submitted_after: StageKey | None = None
    """The stage before whose end this one and those behind it are not even submitted, so that a long
    run never has more stages waiting than the bound lets overlap."""

    @property
    def key(self) -> StageKey:
        return self.name, self.number


def is_evaluated(version: int, config: RunConfig) -> bool:
    """Return whether a version is scored on held-out prompts: first, last, and at the interval."""
    if not is_published(version, config.loop.publish_interval, config.run.steps):
        return False
    interval = config.evaluation.interval
    return version in {0, config.run.steps} or (interval > 0 and version % interval == 0)


def schedule(
    config: RunConfig, first: int = 0, scored: Collection[int] = (), opened: Collection[int] = ()
) -> Iterator[Stage]:
    """Yield the stages of the steps `first` .. steps - 1, each after those that it waits for.

    `first` steps were committed before; `scored` are the versions whose evaluation is complete, and `opened`
    all that have one: an earlier process may have left some open, and may have ended before it broadcast what
    is to be evaluated. With another evaluation.interval there may be versions that nobody holds any more;
    these are not evaluated.
    """
    steps, bound, interval = config.run.steps, config.loop.max_staleness, config.loop.publish_interval
    base = first if is_published(first, interval, steps) else first - first % interval
    waits = {version for version in opened if version not in scored and is_evaluated(version, config)}
    after: tuple[StageKey, ...] = ()
    for version in (v for v in sorted(waits | {base}) if v <= base <= kept_until(config, v)):
        broadcast = Stage("broadcast", version, after)
        after = (broadcast.key,)
        yield broadcast
    for version in range(base + 1):
        kept = version in opened or kept_until(config, version) >= min(first + bound + 1, steps)
        if is_evaluated(version, config) and version not in scored and kept:
            yield Stage("evaluate", version, (broadcast.key,))
    for t in range(first, steps):
        oldest = max(base, oldest_allowed_version(t, bound, interval))
        done = ("step", t - bound - 1) if t - bound - 1 >= first else None
        collect = Stage("collect", t, (("broadcast", oldest),), done)
        reward = Stage("reward", t, collect.after)
        before = (("step", t - 1),) if t > first else ()
        step = Stage("step", t, (collect.key, reward.key, *before))
        yield from (collect, reward, step)
        if is_published(t + 1, interval, steps):
            broadcast = Stage("broadcast", t + 1, (step.key, broadcast.key))
            yield broadcast
            if is_evaluated(t + 1, config):
                yield Stage("evaluate", t + 1, (broadcast.key,))
