"""Preemption schedules: which worker is there from when to when, in seconds, by seed or by trace."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.core.errors import ConfigError
from antiphon.core.seeds import generator
from antiphon.simulator.faults import Fault, FaultKind

FULL_QUANTILE = 0.9
"""A trace's fleet counts as complete at this quantile of its sizes."""


@dataclass(frozen=True, slots=True)
class Stay:
    """One worker from its start to its reclaim."""

    slot: int
    start_s: float
    stop_s: float
    """Infinite for one that is never reclaimed."""


def undisturbed(workers: int) -> list[Stay]:
    """None is reclaimed."""
    return [Stay(slot, 0.0, np.inf) for slot in range(workers)]


def by_chance(
    workers: int, span_s: float, share_per_hour: float, replacement_s: float, seed: int
) -> list[Stay]:
    """Each is reclaimed with probability `share_per_hour` in an hour; a replacement comes later.

    Args:
        workers: slots of the fleet.
        span_s: seconds to plan for.
        share_per_hour: in [0, 1).
        replacement_s: seconds until the slot is filled again; infinite for never.
        seed: of the chance.
    """
    hazard = -np.log1p(-share_per_hour) / 3600.0
    chance = generator("preemption", seed)
    stays = []
    for slot in range(workers):
        at = 0.0
        while at < span_s:
            stop = at + float(chance.exponential(1.0 / hazard))
            stays.append(Stay(slot, at, stop))
            at = stop + replacement_s
    return stays


def at_one_moment(workers: int, span_s: float, share: float, replacement_s: float) -> list[Stay]:
    """A share of the fleet, rounded, is reclaimed in the middle of the span."""
    middle, hit = span_s / 2, round(share * workers)
    stays = [Stay(slot, 0.0, middle if slot < hit else np.inf) for slot in range(workers)]
    return stays + [Stay(slot, middle + replacement_s, np.inf) for slot in range(hit)]


def read_trace(path: Path) -> list[tuple[float, int]]:
    """Read a recorded trace: a CSV file with lines `seconds,instances`, comments begin with #.

    Raises:
        ConfigError: when there is no such file, or it is no trace.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        sizes = [(float(row["seconds"]), int(row["instances"])) for row in csv.DictReader(lines)]
    except OSError as error:
        raise ConfigError(f"--trace: cannot read {path}: {error.strerror}; give a recorded trace") from error
    except (KeyError, TypeError, ValueError):
        sizes = []
    if not sizes:
        raise ConfigError(f"--trace: {path} has no lines `seconds,instances` under that header")
    return sizes


def by_trace(sizes: Sequence[tuple[float, int]], workers: int, span_s: float) -> list[Stay]:
    """Follow the most eventful stretch of a trace, its fleet scaled to `workers`.

    Among the stretches in which at least half of the fleet is there on average, the one that loses
    most instances is taken. The highest slots are lost first and filled last.

    Raises:
        ConfigError: when the trace has no such stretch.
    """
    times = np.array([at for at, _ in sizes])
    counts = np.array([count for _, count in sizes], dtype=np.float64)
    share = np.minimum(1.0, counts / max(1.0, float(np.quantile(counts, FULL_QUANTILE))))
    targets = np.rint(share * workers).astype(int)
    best: tuple[int, float] | None = None
    for begin in times[times <= times[-1] - span_s]:
        first, last = np.searchsorted(times, begin, "right") - 1, np.searchsorted(times, begin + span_s)
        inside = targets[first:last]
        edges = np.clip(np.append(times[first:last], begin + span_s), begin, begin + span_s)
        losses = int(-np.minimum(0, np.diff(inside)).sum())
        if float(inside @ np.diff(edges)) >= workers * span_s / 2 and (best is None or losses > best[0]):
            best = (losses, float(begin))
    if best is None:
        raise ConfigError(f"the trace has no stretch of {span_s:g} s with half of its fleet; take another")
    return _stays(times - best[1], targets, span_s)


def _stays(times: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], span_s: float) -> list[Stay]:
    stays: list[Stay] = []
    since: list[float] = []
    first = max(0, int(np.searchsorted(times, 0.0, "right")) - 1)
    for at, target in zip(times[first:], targets[first:], strict=True):
        at = max(0.0, float(at))
        if at > span_s:
            break
        while len(since) > target:
            stays.append(Stay(len(since) - 1, since.pop(), at))
        since.extend([at] * (int(target) - len(since)))
    return stays + [Stay(slot, start, np.inf) for slot, start in enumerate(since)]


def as_faults(stays: Sequence[Stay], workers: int) -> list[Fault]:
    """Return what keeps the simulator's workers to the schedule: each slot is empty between two stays."""
    found = []
    for slot in range(workers):
        own = sorted((stay.start_s, stay.stop_s) for stay in stays if stay.slot == slot)
        edges = [0.0, *(edge for stay in own for edge in stay), np.inf]
        empty = zip(edges[::2], edges[1::2], strict=True)  # before, between and after the stays
        found += [
            Fault(at_s, FaultKind.RECLAIM, f"worker-{slot}", until_s - at_s)
            for at_s, until_s in empty
            if at_s < until_s
        ]
    return sorted(found, key=lambda fault: (fault.at_s, fault.target))


def reclaimed(stays: Sequence[Stay], span_s: float) -> int:
    """Return how many workers are taken away within the span."""
    return sum(stay.stop_s < span_s for stay in stays)


def worker_hours(stays: Sequence[Stay], span_s: float) -> float:
    """Return the hours that workers are there, until reclaimed or until the end of the span."""
    return sum(max(0.0, min(stay.stop_s, span_s) - stay.start_s) for stay in stays) / 3600.0
