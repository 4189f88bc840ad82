"""Schedule: the overlapping loop as a graph of stages, whoever runs them.

For learner step t: collect and reward wait for the broadcast of the oldest version that the
staleness bound allows, step waits for both and for the step before, broadcast waits for the
step that made its version, record waits for what it writes down. The bound S moves one edge.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError
from antiphon.core.loop.staleness import is_published, oldest_allowed_version
from antiphon.runs.context import RunContext, RunStopped


class StageSkipped(AntiphonError):
    """A stage did not run because one before it failed."""


class Handle(Protocol):
    """One submitted stage."""

    def wait(self) -> None:
        """Return when the stage ended.

        Raises:
            StageSkipped: when a stage before it failed.
            AntiphonError: what the stage raised.
        """
        ...

    def done(self) -> bool:
        """Tell whether the stage ended."""
        ...


class Stages(Protocol):
    """Something that runs stages: Prefect in production, plain threads to measure it against."""

    def submit(self, stage: str, number: int, after: Sequence[Handle]) -> Handle:
        """Run `stage` number `number` once every stage in `after` has ended well."""
        ...


def _published(version: int, config: RunConfig) -> bool:
    return is_published(version, config.loop.publish_interval, config.run.steps)


def is_evaluated(version: int, config: RunConfig) -> bool:
    """Tell whether a version is scored on held-out prompts: first, last, and at the interval."""
    if not _published(version, config):
        return False
    interval = config.evaluation.interval
    return version in {0, config.run.steps} or (interval > 0 and version % interval == 0)


def drive(run: RunContext, stages_for: Callable[[int], Stages], first: int) -> None:
    """Submit the stages of steps `first` .. steps - 1 and wait until all have ended.

    Args:
        run: the living run.
        stages_for: which runner a step's stages go to.
        first: steps that were committed before (0 for a new run).

    Raises:
        AntiphonError: the error that a stage began with; the others are asked to stop.
    """
    pending: list[Handle] = []
    try:
        _submit_all(run, stages_for, first, pending)
    except (StageSkipped, RunStopped) as error:
        cause = _cause(pending) or error
        run.stop(str(cause))
        raise cause from None
    except BaseException as error:
        run.stop(str(error) or type(error).__name__)
        raise


def _submit_all(
    run: RunContext, stages_for: Callable[[int], Stages], first: int, pending: list[Handle]
) -> None:
    config, loop = run.config, run.config.loop
    broadcasts: dict[int, Handle] = {}

    def submit(stages: Stages, stage: str, number: int, after: Iterable[Handle | None]) -> Handle:
        handle = stages.submit(stage, number, [h for h in after if h is not None])
        pending.append(handle)
        return handle

    base = first if _published(first, config) else first - first % loop.publish_interval
    broadcast = submit(stages_for(first), "broadcast", base, [])
    broadcasts[base] = broadcast
    if is_evaluated(base, config):
        submit(stages_for(first), "evaluate", base, [broadcast])
    for version in _unevaluated(run, base) if base else ():
        submit(stages_for(first), "evaluate", version, [broadcast])
    step: Handle | None = None
    steps: list[Handle] = []
    for t in range(first, config.run.steps):
        stages = stages_for(t)
        oldest = oldest_allowed_version(t, loop.max_staleness, loop.publish_interval)
        ready = broadcasts.get(oldest, broadcasts[base] if oldest < base else None)
        collect = submit(stages, "collect", t, [ready])
        reward = submit(stages, "reward", t, [ready])
        step = submit(stages, "step", t, [collect, reward, step])
        recorded_after = step
        version = t + 1
        if _published(version, config):
            broadcast = submit(stages, "broadcast", version, [step, broadcast])
            broadcasts[version] = broadcast
            recorded_after = broadcast
            if is_evaluated(version, config):
                submit(stages, "evaluate", version, [broadcast])
        submit(stages, "record", t, [recorded_after])
        steps.append(step)
        if len(steps) > loop.max_staleness:
            steps.pop(0).wait()
        pending[:] = _raise_early(pending)
    for handle in pending:
        handle.wait()


def _unevaluated(run: RunContext, before: int) -> list[int]:
    """Return the versions whose score an earlier process still owed when it ended."""
    evaluations = run.call(lambda: run.coordinator.status()).evaluations
    complete = {evaluation.version for evaluation in evaluations if evaluation.complete}
    due = (version for version in range(before) if is_evaluated(version, run.config))
    return [version for version in due if version not in complete]


def _cause(handles: list[Handle]) -> AntiphonError | None:
    """Return the error of a stage that failed by itself, if one has."""
    for handle in handles:
        if not handle.done():
            continue
        try:
            handle.wait()
        except (StageSkipped, RunStopped):
            continue
        except AntiphonError as error:
            return error
    return None


def _raise_early(handles: list[Handle]) -> list[Handle]:
    for handle in handles:
        if handle.done():
            handle.wait()
    return [handle for handle in handles if not handle.done()]


class PlainHandle:
    """A stage that runs in a plain thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the stage ended, or raise what it raised."""
        self._future.result()

    def done(self) -> bool:
        """Tell whether the stage ended."""
        return self._future.done()


class PlainStages:
    """Runs stages in threads without an orchestrator: the baseline of benchmarks/overhead.py."""

    def __init__(self, work: Callable[[str, int], None], threads: int = 32) -> None:
        """Prepare to run stages.

        Args:
            work: called with the stage's name and number.
            threads: most stages waiting or running at once.
        """
        self._work = work
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stage")

    def submit(self, stage: str, number: int, after: Sequence[Handle]) -> Handle:
        """Run a stage once every stage in `after` has ended well."""

        def run() -> None:
            for handle in after:
                handle.wait()
            self._work(stage, number)

        return PlainHandle(self._pool.submit(run))

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown(wait=True, cancel_futures=True)
