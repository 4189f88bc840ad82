"""Faults: what goes wrong in a simulated run and when, all of it drawn from one seed.

A schedule is a list of facts fixed before the run begins. Every fault ends by itself: what was
killed comes back, what was cut is healed, so that after the last one the loop must move again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from antiphon.simulator.virtual.random_streams import RandomStream


class FaultKind(StrEnum):
    """What can go wrong."""

    KILL = "kill"
    """A process ends at once; it is back after a while."""
    KILL_AT_WRITE = "kill_at_write"
    """The coordinator ends right after its next transaction, before any process heard of it."""
    STOP = "stop"
    """A process is suspended, as by SIGSTOP, and continues later."""
    DEPOSE = "depose"
    """The coordinator is suspended, another one takes its place, and the first one continues later."""
    RETIRE = "retire"
    """A worker is asked to leave (SIGTERM) and replaced after a while."""
    RECLAIM = "reclaim"
    """Several workers are killed at one moment and replaced by new machines after a while."""
    CUT = "cut"
    """No message passes between a process and the others."""
    MUTE = "mute"
    """What a process says is lost; it still hears the others."""
    DEAFEN = "deafen"
    """What the others say to a process is lost; they still hear it."""
    STORM = "storm"
    """Messages are slow, lost, repeated and overtake one another."""
    SLOW_DISK = "slow_disk"
    """Whatever is done in threads, above all a transaction, takes long."""
    HANG = "hang"
    """A worker's engine does not come back from a step for a while; its heartbeats go on."""
    SLOW_LINK = "slow_link"
    """Each chunk that a worker fetches and each group that it hands in takes seconds."""
    FULL_DISK = "full_disk"
    """Nothing more can be written by the coordinator, neither to the journal nor to the store."""
    CORRUPT_CHUNKS = "corrupt_chunks"
    """Some of the chunks that reach a worker have other bytes."""
    DEAD_TRANSFER = "dead_transfer"
    """No chunk reaches a worker, whose heartbeats go on: it keeps the version that it holds, and one that
    only joins never loads."""


LINK_S = (20.0, 60.0)
"""Shortest and longest fault of a link, but for a straggler's."""
STRAGGLING_S = 180.0
"""Most drawn runs are over by then."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    """Virtual second at which it begins."""
    kind: FaultKind
    target: str
    """Name of the process; empty where the fault concerns all. For `reclaim`, names by commas."""
    lasts_s: float
    """Seconds until the process is back or the network is well again."""

    def __str__(self) -> str:
        whom = f" {self.target}" if self.target else ""
        return f"{self.at_s:.2f} s: {self.kind}{whom} for {self.lasts_s:.2f} s"


class FaultMix(BaseModel):
    """How many faults of each kind a run has, and how long they last."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    coordinator_kills: int = Field(default=0, ge=0)
    """Kills of the coordinator, half of them right after a transaction."""
    worker_kills: int = Field(default=0, ge=0)
    """Kills of one worker each."""
    learner_kills: int = Field(default=0, ge=0)
    """Kills of the learner."""
    reward_kills: int = Field(default=0, ge=0)
    """Kills of one reward service each."""
    flow_kills: int = Field(default=0, ge=0)
    """Kills of the flow."""
    host_kills: int = Field(default=0, ge=0)
    """Kills of one host of the environment each."""
    stops: int = Field(default=0, ge=0)
    """Processes suspended for a while."""
    retirements: int = Field(default=0, ge=0)
    """Workers asked to leave."""
    reclaims: int = Field(default=0, ge=0)
    """Moments at which `reclaim_share` of the workers are killed."""
    reclaim_share: float = Field(default=0.4, ge=0.0, le=1.0)
    """Share of the workers that a reclaim takes."""
    cuts: int = Field(default=0, ge=0)
    """Partitions of one process from the others, in both directions or one."""
    storms: int = Field(default=0, ge=0)
    """Stretches of slow, lost, repeated and reordered messages."""
    slow_disks: int = Field(default=0, ge=0)
    """Stretches in which transactions take long."""
    hangs: int = Field(default=0, ge=0)
    """Engines that stand still for a while."""
    slow_links: int = Field(default=0, ge=0)
    """Workers whose link is slow for a while."""
    dead_transfers: int = Field(default=0, ge=0)
    """Workers whom no snapshot reaches for a while."""
    stragglers: int = Field(default=0, ge=0, le=1)
    """Workers whose link is slow from the beginning and nearly to the end."""
    joiners: int = Field(default=0, ge=0)
    """Workers that are there from the beginning and whom their first snapshot reaches late, if ever."""
    full_disks: int = Field(default=0, ge=0)
    """Stretches in which the coordinator's disks are full."""
    corrupt_chunks: int = Field(default=0, ge=0)
    """Workers whom altered chunks reach for a while."""
    deposals: int = Field(default=0, ge=0)
    """Moments at which a second coordinator takes the place of one that hangs."""
    first_s: float = Field(default=0.0, ge=0.0)
    """Second of the first fault at the earliest."""
    last_s: float = Field(default=40.0, gt=0.0)
    """Second at which the last one begins at the latest."""
    shortest_s: float = Field(default=0.2, ge=0.0)
    """Shortest fault."""
    longest_s: float = Field(default=20.0, gt=0.0)
    """Longest fault."""


def draw_mix(random: RandomStream, links: RandomStream) -> FaultMix:
    """Return a mix for a run of random faults: most runs have several kinds, some hardly any.

    `links` draws what concerns transfers.
    """

    def some(most: int, probability: float, stream: RandomStream = random) -> int:
        return 1 + stream.index(most) if stream.happens(probability) else 0

    return FaultMix(
        coordinator_kills=some(4, 0.6),
        worker_kills=some(4, 0.6),
        learner_kills=some(3, 0.45),
        reward_kills=some(2, 0.35),
        flow_kills=some(2, 0.3),
        stops=some(2, 0.35),
        retirements=some(2, 0.25),
        reclaims=some(1, 0.25),
        cuts=some(2, 0.4),
        storms=some(2, 0.45),
        slow_disks=some(1, 0.2),
        last_s=random.between(8.0, 45.0),
        longest_s=random.choose((4.0, 12.0, 25.0, 45.0)),
        hangs=some(2, 0.25),
        slow_links=some(2, 0.25, links),
        dead_transfers=some(1, 0.2, links),
        joiners=some(1, 0.1, links),
        deposals=some(2, 0.15, links),
        full_disks=some(1, 0.1, links),
        corrupt_chunks=some(2, 0.15, links),
    )


def draw_faults(
    mix: FaultMix,
    workers: list[str],
    reward_services: list[str],
    random: RandomStream,
    hosts: Sequence[str] = (),
) -> list[Fault]:
    """Return the schedule of a run, in the order of time; `random` decides what the mix leaves open."""
    everyone = ["coordinator", "learner", "flow", *workers, *reward_services]
    found: list[Fault] = []

    def add(count: int, kinds: FaultKind | tuple[FaultKind, ...], targets: str | list[str]) -> None:
        for _ in range(count):
            kind = kinds if isinstance(kinds, FaultKind) else random.choose(kinds)
            target = targets if isinstance(targets, str) else random.choose(targets)
            if kind is FaultKind.RECLAIM:
                taken = [name for name in workers if random.happens(mix.reclaim_share)]
                target = ",".join(taken or [random.choose(workers)])
            at_s = random.between(mix.first_s, mix.last_s)
            # Short faults are as instructive as long ones, and a range of uniform draws has few of them.
            lasts_s = mix.shortest_s * (mix.longest_s / max(mix.shortest_s, 1e-3)) ** random.number()
            found.append(Fault(at_s, kind, target, lasts_s))

    add(mix.coordinator_kills, (FaultKind.KILL_AT_WRITE, FaultKind.KILL), "coordinator")
    add(mix.worker_kills, FaultKind.KILL, workers)
    add(mix.learner_kills, FaultKind.KILL, "learner")
    add(mix.reward_kills, FaultKind.KILL, reward_services)
    add(mix.flow_kills, FaultKind.KILL, "flow")
    add(mix.stops, FaultKind.STOP, everyone)
    add(mix.retirements, FaultKind.RETIRE, workers)
    add(mix.reclaims, FaultKind.RECLAIM, "")
    add(mix.cuts, (FaultKind.CUT, FaultKind.MUTE, FaultKind.DEAFEN), everyone)
    add(mix.storms, FaultKind.STORM, "")
    add(mix.slow_disks, FaultKind.SLOW_DISK, "")
    add(mix.hangs, FaultKind.HANG, workers)
    # A link matters only while several versions are published.
    links = [FaultKind.SLOW_LINK] * mix.slow_links + [FaultKind.DEAD_TRANSFER] * mix.dead_transfers
    for kind in links:
        at_s = random.between(mix.first_s, mix.last_s / 2)
        found.append(Fault(at_s, kind, random.choose(workers), random.between(*LINK_S)))
    found += [Fault(0.0, FaultKind.SLOW_LINK, name, STRAGGLING_S) for name in workers[-1:] * mix.stragglers]
    for name in workers[: mix.joiners]:
        found.append(Fault(0.0, FaultKind.DEAD_TRANSFER, name, random.between(*LINK_S)))
    add(mix.deposals, FaultKind.DEPOSE, "coordinator")
    add(mix.full_disks, FaultKind.FULL_DISK, "")
    add(mix.corrupt_chunks, FaultKind.CORRUPT_CHUNKS, workers)
    add(mix.host_kills if hosts else 0, FaultKind.KILL, list(hosts))
    return sorted(found, key=lambda fault: (fault.at_s, fault.kind, fault.target))
