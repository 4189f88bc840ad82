"""Injector: makes the faults of a schedule happen to processes, network and disk, and ends them."""

from collections.abc import Callable

from antiphon.services.rollout.worker import GRACE_S
from antiphon.simulator.faults import Fault, FaultKind
from antiphon.simulator.processes import ProcessEntry
from antiphon.simulator.virtual.chunks import MemoryPayloads
from antiphon.simulator.virtual.loop import Process, VirtualLoop
from antiphon.simulator.virtual.network import KEEPALIVE_S, Network, NetworkQuality

STORM = NetworkQuality(least_s=0.001, most_s=0.2, slow=0.2, slow_s=6.0, lost=0.1, repeated=0.15)
UPLOAD_SHARE = 0.2
"""A group that is handed in takes this share of what a chunk takes."""
OF_WORKER = (FaultKind.HANG, FaultKind.SLOW_LINK, FaultKind.DEAD_TRANSFER, FaultKind.CORRUPT_CHUNKS)
"""Faults of one worker that nobody but its own process meets."""
SILENT = (FaultKind.CUT, FaultKind.MUTE, FaultKind.DEAFEN, FaultKind.STORM, FaultKind.STOP, FaultKind.DEPOSE)
"""Faults after which connections may be dead without notice; such a fault is over once that is found out."""


class FaultInjector:
    """What is wrong with a simulated run at the moment."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        processes: dict[str, ProcessEntry],
        start: Callable[[str], None],
        slow_chunk_s: float,
    ) -> None:
        """Begin with nothing wrong; `start` starts the process of a name again."""
        self._slow_chunk_s = slow_chunk_s
        self._loop = loop
        self._network = network
        self._processes = processes
        self._start = start
        self._kill_at_write: list[float] = []
        self._until: dict[tuple[FaultKind, str], float] = {}
        """A fault of `OF_WORKER` and its worker -> virtual second at which it ends."""
        self._deposed: list[Process] = []
        """Coordinators that another one replaced while they hung."""
        self.slow_disk = False
        self.calm_s = 0.0
        """From this virtual second on nothing is wrong any more."""

    def begin(self, fault: Fault) -> None:
        """Make a fault happen; it ends by itself."""
        kind, target, lasts_s = fault.kind, fault.target, fault.lasts_s
        last_s = self._slow_chunk_s if kind is FaultKind.SLOW_LINK else 0.0  # the chunk that is under way
        self.trouble(lasts_s + (KEEPALIVE_S if kind in SILENT else last_s))
        if kind is FaultKind.KILL:
            self._kill(target, lasts_s)
        elif kind is FaultKind.KILL_AT_WRITE:
            self._kill_at_write.append(lasts_s)
        elif kind is FaultKind.RECLAIM:
            for name in target.split(","):
                entry = self._processes[name]
                # It starts again on a new machine: another name, an empty disk.
                entry.alias, entry.payloads = f"{name}-new{entry.starts}", MemoryPayloads()
                self._kill(name, lasts_s)
        elif kind is FaultKind.STOP:
            process = self._processes[target].process
            if process is not None and process.alive:
                process.stop()
                self._loop.call_later(lasts_s, process.resume)
        elif kind is FaultKind.DEPOSE:
            self._depose(self._processes[target], lasts_s)
        elif kind is FaultKind.RETIRE:
            self._retire(self._processes[target], lasts_s)
        elif kind is FaultKind.STORM:
            self._network.quality = STORM
            self._loop.call_later(lasts_s, self._end_storm)
        elif kind is FaultKind.SLOW_DISK:
            self.slow_disk = True
            self._loop.call_later(lasts_s, self._end_slow_disk)
        elif kind is FaultKind.FULL_DISK or kind in OF_WORKER:
            self._until[kind, target] = self._loop.time() + lasts_s
        else:
            self._part(kind, target)
            self._loop.call_later(lasts_s, self._network.heal)

    def upload_s(self, name: str) -> float:
        """Return by how much a group that a worker hands in takes longer than usual."""
        return UPLOAD_SHARE * self._slow_chunk_s if self.left_s(FaultKind.SLOW_LINK, name) else 0.0

    def chunk_s(self, name: str) -> float:
        """Return by how much the next chunk that a worker fetches takes longer than usual."""
        slow_s = self._slow_chunk_s if self.left_s(FaultKind.SLOW_LINK, name) else 0.0
        return self.left_s(FaultKind.DEAD_TRANSFER, name) or slow_s

    def written(self) -> None:
        """Notice that a transaction is on the disk: the coordinator may have to end right now."""
        if self._kill_at_write:
            self._kill("coordinator", self._kill_at_write.pop(0))

    def end_all(self) -> None:
        """End every fault, but for processes that are down."""
        self._kill_at_write.clear()
        self._until.clear()
        self._network.heal()
        self._end_storm()
        self._end_slow_disk()
        running = [entry.process for entry in self._processes.values() if entry.process is not None]
        for process in (*running, *self._deposed):
            process.resume()

    def left_s(self, kind: FaultKind, name: str = "") -> float:
        """Return for how long a worker, or the coordinator's disk, still has a fault; 0 where it has none."""
        return max(0.0, self._until.get((kind, name), 0.0) - self._loop.time())

    def trouble(self, lasts_s: float) -> None:
        """Count on nothing for so long: what comes after a fault, or after a skipped step, begins then."""
        self.calm_s = max(self.calm_s, self._loop.time() + lasts_s)

    def _kill(self, name: str, down_s: float) -> None:
        self.trouble(down_s)
        self._until.pop((FaultKind.HANG, name), None)
        process = self._processes[name].process
        if process is not None and process.alive:
            process.kill()
            self._network.killed(process)
        self._loop.call_later(down_s, self._start, name)

    def _depose(self, entry: ProcessEntry, lasts_s: float) -> None:
        old = entry.process
        if old is not None and old.alive:
            old.stop()
            self._deposed.append(old)
            entry.process = None
            self._start(entry.name)
            self._loop.call_later(lasts_s, old.resume)

    def _retire(self, entry: ProcessEntry, away_s: float) -> None:
        if entry.worker is not None and entry.process is not None and entry.process.alive:
            entry.away_s = away_s
            self.trouble(away_s + GRACE_S)
            entry.process.context.run(entry.worker.stop)

    def _part(self, kind: FaultKind, target: str) -> None:
        for other in self._processes:
            if other == target:
                continue
            if kind is not FaultKind.DEAFEN:
                self._network.cut(target, other)
            if kind is not FaultKind.MUTE:
                self._network.cut(other, target)

    def _end_storm(self) -> None:
        self._network.quality = NetworkQuality()

    def _end_slow_disk(self) -> None:
        self.slow_disk = False
