"""Driver: submits the stages of the schedule and raises the error that stopped them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prefect.exceptions import UnfinishedRun

from antiphon.core.errors import AntiphonError
from antiphon.core.loop.schedule import StageKey, schedule
from antiphon.runs.clients import RunStopped
from antiphon.runs.live_run import LiveRun


class Future(Protocol):
    """One submitted stage: Prefect's, or one of plain threads in a benchmark and in tests."""

    def result(self, timeout: float | None = None) -> Any:
        """Return when the stage ended.

        Raises:
            UnfinishedRun: when a stage before it failed.
            TimeoutError: when it has not ended within `timeout` seconds.
            AntiphonError: what the stage raised.
        """


Submit = Callable[[str, int, Sequence[Any]], Future]
"""Runs a stage, by name and number, once every stage of a list has ended well."""


def drive(run: LiveRun, submit: Submit, first: int) -> None:
    """Submit the stages of steps `first` .. steps - 1 and wait until all have ended.

    Args:
        run: the run, whose services are up.
        submit: what runs them.
        first: steps that were committed before (0 for a new run).

    Raises:
        AntiphonError: the error of the stage that failed first; the others are asked to stop.
    """
    pending: list[Future] = []
    try:
        _submit_all(run, submit, first, pending)
    except (UnfinishedRun, RunStopped) as error:
        cause = next(filter(None, map(_own_error, pending)), error)
        if isinstance(cause, UnfinishedRun):  # Prefect leaves a stage pending whose upstream failed
            cause = AntiphonError("a stage before this one failed")
        run.stop(str(cause))
        raise cause from None
    except BaseException as error:
        run.stop(str(error) or type(error).__name__)
        raise


def _submit_all(run: LiveRun, submit: Submit, first: int, pending: list[Future]) -> None:
    config, futures = run.config, dict[StageKey, Future]()
    reach = config.loop.max_staleness + 2 * config.loop.publish_interval + 1
    status = run.call(lambda: run.coordinator.status())
    for stage in schedule(config, first, status.scored, status.evaluated):
        if stage.submitted_after is not None:
            futures[stage.submitted_after].result()
            pending[:] = [future for future in pending if not _has_ended(future)]
        after = [futures[key] for key in stage.after]
        # No stage waits for one that is further back: a long run holds no more of them than a short one.
        futures = {key: known for key, known in futures.items() if key[1] >= stage.number - reach}
        future = futures[stage.key] = submit(stage.name, stage.number, after)
        pending.append(future)
    for future in pending:
        future.result()


def _has_ended(stage: Future) -> bool:
    """Return whether a stage has ended; raise what it raised."""
    try:
        stage.result(timeout=0)
    except TimeoutError:
        return False
    return True


def _own_error(stage: Future) -> AntiphonError | None:
    """Return the error of a stage that failed by itself, else None."""
    try:
        stage.result(timeout=0)
    except (TimeoutError, UnfinishedRun, RunStopped):
        return None
    except AntiphonError as error:
        return error
    return None
