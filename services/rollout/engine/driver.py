"""Engine driver: how the worker's event loop talks to whatever drives its engine.

In production that is a thread of its own; in the simulation it is the event loop itself, in
virtual time. Either way messages are executed at step boundaries, in the order in which they came.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from antiphon.api.engine import Engine, EngineOutput, EngineProgress, EngineRequest


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What came of a swap."""

    serving: int | None
    """Version that samples now; None: nothing does."""
    problem: str = ""
    """Why it is not the one that was asked for; empty when it is."""


class EngineDriver(Protocol):
    """An engine behind a mailbox. Its methods belong to the event loop that runs `run`."""

    drafts: bool
    """Whether the engine drafted when it was last looked at: history is of use to it."""
    continues: bool
    """Whether the engine continues a prefix as if it had sampled that itself."""
    numerics: str
    """What decides the engine's bits, as the engine says; "" before it is built."""
    vocabulary_size: int
    """Number of tokens of the engine's model; 0 before it is built."""
    busy_s: float
    """Seconds in which the engine had requests to run."""
    loading: bool
    """Whether the engine takes in weights now; while it waits for the end of a step, it does not."""

    async def run(self) -> None:
        """Build the engine and drive it until cancelled; a failure of the engine is raised here."""

    async def started(self, timeout_s: float) -> None:
        """Wait until the engine is built; when it cannot be built, `run` raises why.

        Raises:
            UnavailableError: when building takes longer than `timeout_s` seconds.
        """

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests for the next step."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; an output that is already on its way may still be delivered."""

    async def progress(
        self, since: Mapping[str, int], timeout_s: float, stop: bool = False
    ) -> list[EngineProgress] | None:
        """Return what the requests of `since` have sampled by the next step boundary.

        Args:
            since: request id -> tokens known already.
            timeout_s: longest wait for a step that takes its time.
            stop: forget these requests in the same moment.

        Returns:
            None when the engine did not come to a step boundary within `timeout_s` seconds.
        """

    async def load(
        self, version: int, tensors: Mapping[str, Any], weights_digest: str, timeout_s: float
    ) -> LoadReport:
        """Swap weights at the next step boundary, and return when they sample or why they do not.

        Raises:
            IntegrityError: when the engine does not echo the digest it was given.
            UnavailableError: when the engine did not take them within `timeout_s` seconds.
        """


DriveEngine = Callable[[Callable[[], Engine], Callable[[list[EngineOutput]], None]], EngineDriver]
"""Makes a driver from what builds the engine and what takes finished completions."""
