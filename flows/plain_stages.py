"""Plain stages: stages of a run in threads of their own, without an orchestrator."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from antiphon.flows.driver import Handle


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
    """Runs stages in threads."""

    def __init__(self, work: Callable[[str, int], None], threads: int = 32) -> None:
        """Prepare to run stages.

        Args:
            work: called with the stage's name and number.
            threads: most stages waiting or running at once; one runs them in the order of their submission.
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
