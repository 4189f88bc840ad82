"""Driver: submits the stages of the schedule and raises the error that stopped them."""

from collections.abc import Sequence
from typing import Protocol

from antiphon.core.errors import AntiphonError
from antiphon.core.loop.schedule import StageKey, schedule
from antiphon.runs.clients import RunStopped
from antiphon.runs.live_run import LiveRun


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

    def done(self) -> bool:
        """Return whether the stage ended."""


class Stages(Protocol):
    """Something that runs stages: Prefect, or plain threads in a benchmark and in tests."""

    def submit(self, stage: str, number: int, after: Sequence[Handle]) -> Handle:
        """Run `stage` number `number` once every stage in `after` has ended well."""


def drive(run: LiveRun, stages: Stages, first: int) -> None:
    """Submit the stages of steps `first` .. steps - 1 and wait until all have ended.

    Args:
        run: the run, whose services are up.
        stages: what runs them.
        first: steps that were committed before (0 for a new run).

    Raises:
        AntiphonError: the error of the stage that failed first; the others are asked to stop.
    """
    pending: list[Handle] = []
    try:
        _submit_all(run, stages, first, pending)
    except (StageSkipped, RunStopped) as error:
        cause = _cause(pending) or error
        run.stop(str(cause))
        raise cause from None
    except BaseException as error:
        run.stop(str(error) or type(error).__name__)
        raise


def _submit_all(run: LiveRun, stages: Stages, first: int, pending: list[Handle]) -> None:
    config, handles = run.config, dict[StageKey, Handle]()
    reach = config.loop.max_staleness + 2 * config.loop.publish_interval + 1
    status = run.call(lambda: run.coordinator.status())
    for stage in schedule(config, first, status.scored, status.evaluated):
        if stage.submitted_after is not None:
            handles[stage.submitted_after].wait()
            pending[:] = _raise_early(pending)
        after = [handles[key] for key in stage.after]
        # No stage waits for one that is further back: a long run holds no more of them than a short one.
        handles = {key: known for key, known in handles.items() if key[1] >= stage.number - reach}
        handle = handles[stage.key] = stages.submit(stage.name, stage.number, after)
        pending.append(handle)
    for handle in pending:
        handle.wait()


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
