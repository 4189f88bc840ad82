"""Operator: voids the batches that a scenario names, soon after they are sealed.

In fixed mode the learner cannot train on such a batch, so that the run has the same batches whenever the
operator comes. In elastic mode it can, and the operator may come before, during or after the step.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.loop import events as e
from antiphon.services.coordinator.journal.journal import StoredEvent
from antiphon.simulator.checks.invariants import Witness
from antiphon.simulator.processes import SharedRun
from antiphon.simulator.virtual.loop import Process
from antiphon.simulator.virtual.random_streams import RandomStream

LATEST_S = 6.0
"""The operator comes at most so many seconds after a batch was sealed."""
REPEATED = 0.3
"""Chance that a command is given once more."""


class Operator:
    """Someone at the command line of a simulated run."""

    def __init__(self, voids: Sequence[int], fixed: bool, witness: Witness, random: RandomStream) -> None:
        """Void each step of `voids` as often as it stands there; `random` says when."""
        self._left = Counter(voids)
        self._fixed, self._witness, self._random = fixed, witness, random
        self._processes: list[Process] = []

    def train(self, step: int, payload: bytes) -> int:
        """Be what the learner trains with: the witness, unless the batch cannot be trained.

        Raises:
            UnavailableError: where the batch of `step` is still to be voided.
        """
        if self._fixed and self._left[step]:
            raise UnavailableError(f"the batch of step {step} cannot be trained")
        return self._witness.trained(step, payload)

    def look(self, rows: Sequence[StoredEvent], shared: SharedRun) -> bool:
        """See what reached the disk; return whether a batch was voided."""
        found = [e.load_event(row.kind, row.body) for row in rows if row.kind.startswith("batch.")]
        for event in found:
            if isinstance(event, e.BatchVoided):
                self._left[event.step] -= 1
            elif isinstance(event, e.BatchSealed) and self._left[event.step]:
                process = Process(shared.loop, "operator")
                self._processes.append(process)
                delay_s = self._random.between(0.0, LATEST_S)
                process.spawn(self._void(shared, event.step, event.digest, delay_s))
        return any(isinstance(event, e.BatchVoided) for event in found)

    def leave(self) -> None:
        """Give no more commands."""
        for process in self._processes:
            process.kill()

    async def _void(self, shared: SharedRun, step: int, digest: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        client = shared.coordinator()
        again = self._random.happens(REPEATED)
        while True:
            try:
                await client.void_batch(step, digest, "it cannot be trained", "operator")
            except UnavailableError:
                await asyncio.sleep(1.0)
            except ContractError as error:
                if self._fixed:
                    self._witness.report(f"the batch of step {step} could not be voided: {error}")
                self._left[step] = 0  # it is committed
                return
            else:
                if not again:
                    return
                again = False
