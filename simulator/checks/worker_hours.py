"""WorkerHours: how long workers were connected while a coordinator ran, counted without the work account.

A worker is connected from its registration until it is lost or leaves. While no coordinator runs no time
counts, so what lies between the last event of a worker and a restart is left out; so is what comes after the
end of the run.
"""

from dataclasses import dataclass, field

from antiphon.core.loop import events as e


@dataclass(slots=True)
class _Stay:
    """One worker's time under one coordinator."""

    name: str
    from_s: float
    seen_s: float


@dataclass(slots=True)
class WorkerHours:
    """The stays of all workers of a run."""

    past_s: float = 0.0
    _stays: dict[str, _Stay] = field(default_factory=dict)
    _holders: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Lease -> id and name of the worker that holds it; the id is empty after a restart."""

    def look(self, event: e.JournalEvent) -> None:
        match event:
            case e.WorkerRegistered(worker_id, name) if event.at_s is not None:
                self._leave(worker_id)
                self._stays[worker_id] = _Stay(name, event.at_s, event.at_s)
                for lease_id, (holder, holder_name) in self._holders.items():
                    if not holder and holder_name == name:
                        self._holders[lease_id] = (worker_id, name)
            case e.WorkerLost(worker_id):
                self._see(worker_id, event.at_s)
                self._leave(worker_id)
            case e.LeaseGranted() | e.LeaseDuplicated():
                self._see(event.worker_id, event.at_s)
                stay = self._stays.get(event.worker_id)
                self._holders[event.lease_id] = (event.worker_id, "" if stay is None else stay.name)
            case e.LeaseExpired() | e.GroupSubmitted():
                holder, _ = self._holders.pop(event.lease_id, ("", ""))
                self._see(holder, event.at_s)
            case e.RunResumed() | e.RunFinished():
                for worker_id in list(self._stays):
                    self._leave(worker_id)
                self._holders = {lease: ("", name) for lease, (_, name) in self._holders.items()}
            case _:
                pass

    def total_s(self, now: float) -> float:
        """Return all worker seconds up to `now`, on the coordinator's clock."""
        return self.past_s + sum(max(stay.seen_s, now) - stay.from_s for stay in self._stays.values())

    def _see(self, worker_id: str, at_s: float | None) -> None:
        stay = self._stays.get(worker_id)
        if stay is not None and at_s is not None:
            stay.seen_s = max(stay.seen_s, at_s)

    def _leave(self, worker_id: str) -> None:
        stay = self._stays.pop(worker_id, None)
        if stay is not None:
            self.past_s += stay.seen_s - stay.from_s
