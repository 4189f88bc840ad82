"""Authorship: which tokens were sampled by workers that lie, and what may become of their groups."""

import numpy as np
import numpy.typing as npt

from antiphon.core.loop import events as e
from antiphon.core.records import BatchRow
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.simulator.hostile_worker import NAME

SEAL_S = 5.0
"""Longest time that a batch takes to be written."""


class Authorship:
    """Who sampled what, as the journal tells it."""

    def __init__(self) -> None:
        """Begin without a group."""
        self._submitted: dict[str, e.GroupSubmitted] = {}
        """Group -> its newest submission."""
        self._shut_out: dict[str, float] = {}
        """Worker in quarantine -> the second since when."""
        self._written: set[str] = set()
        """Those of them since when a batch was sealed."""
        self.edited: set[str] = set()
        """Groups that trained with tokens of a liar that nobody had drawn."""

    @property
    def shut_out(self) -> frozenset[str]:
        """Names of the workers that are in quarantine."""
        return frozenset(self._shut_out)

    def submitted(self, event: e.GroupSubmitted) -> None:
        self._submitted[event.group_id] = event

    def quarantined(self, event: e.WorkerQuarantined, now: float) -> str:
        """Return what is wrong with shutting a worker out at a second, or ""."""
        self._shut_out[event.worker_name] = now
        if event.worker_name.startswith(NAME):
            return ""
        return f"{event.worker_name}, which is honest, was shut out: {event.reason}"

    def wrongly_dropped(self, group_id: str) -> str:
        """Return why a group should not have been dropped as untrusted, or ""."""
        if self._names(group_id) & self.shut_out:
            return ""
        return "was dropped as untrusted, but no worker in quarantine sampled any of it"

    def wrongly_sealed(self, group_ids: tuple[str, ...], now: float) -> list[str]:
        """Note a batch and return the sentences about groups that may not train any more.

        The batch that was being written when a worker was shut out may still have groups of it.
        """
        late = {name for name, at_s in self._shut_out.items() if name in self._written or now - at_s > SEAL_S}
        self._written |= set(self._shut_out)
        return [
            f"group {group_id} trains, but {', '.join(sorted(liars))} had been shut out before"
            for group_id in group_ids
            if (liars := self._names(group_id) & late)
        ]

    def lied(self, row: BatchRow) -> npt.NDArray[np.bool_]:
        """Return [T], which tokens of a row were sampled by a worker that lies."""
        event, length = self._submitted[row.group_id], row.token_ids.size
        found = np.full(length, name_of_worker(event.worker_id).startswith(NAME))
        for sample_index, worker_id, start, stop in event.authors:
            if sample_index == row.sample_index:
                found[start:stop] = name_of_worker(worker_id).startswith(NAME)
        return found

    def _names(self, group_id: str) -> set[str]:
        event = self._submitted[group_id]
        return {name_of_worker(w) for w in (event.worker_id, *(author[1] for author in event.authors))}
