"""Doctor: whether this machine can hold a run, one finding for each thing that a run needs of it.

Nothing is started or changed. What only matters to some runs is said
and fails nothing.
"""

import ctypes
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import requires, version
from pathlib import Path

from antiphon.core.errors import AntiphonError
from antiphon.cpu.compiler import why_not_compiling
from antiphon.runs.preflight import check_shared_memory
from antiphon.system.free_space import free_bytes
from antiphon.system.memory import host_bytes
from antiphon.system.ports import free_ports, is_free
from antiphon.system.sandbox import check_sandbox
from antiphon.system.shared_memory import SHARED, leftovers

MEMORY_BYTES, DISK_BYTES = 4 << 30, 5 << 30
"""What the smallest run, the demo, takes: two engines and a learner, and its records."""
PORTS = 16
"""Of loopback, that services of a run and their pages listen on."""
DRIVER = {12: 525, 13: 580}
"""CUDA's major version -> the oldest major version of NVIDIA's driver that runs it (CUDA's release notes)."""
_TIME_ERROR = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing."""

    name: str
    said: str
    """What there is, in words; where something is wrong, that and the fix."""
    ok: bool = True
    needed: bool = True
    """Every run needs it; otherwise it is worth a note."""
    figures: dict[str, float] = field(default_factory=dict)


def examine(
    home: Path, shared: Path = SHARED, driver: Path = Path("/proc/driver/nvidia/version")
) -> list[Finding]:
    """Return what there is of everything that a run needs of this machine.

    Args:
        home: where runs are kept; its file system is looked at.
        shared: the system's shared memory.
        driver: NVIDIA's driver says its version here.
    """
    looks: list[Callable[[], Finding]] = [
        _processors,
        _memory,
        lambda: _disk(home),
        lambda: _shared_memory(shared),
        _compiler,
        _sandbox,
        _ports,
        _clock,
        lambda: _driver(driver),
    ]
    return [look() for look in looks]


def _processors() -> Finding:
    usable = len(os.sched_getaffinity(0))
    return Finding("processors", f"{usable} usable of {os.cpu_count()}", figures={"processors": usable})


def _memory() -> Finding:
    there = host_bytes()
    said = f"{there / 1e9:.1f} GB"
    if there < MEMORY_BYTES:
        said += f"; the smallest run takes {MEMORY_BYTES / 1e9:.1f} GB: give this machine, or container, more"
    return Finding("memory", said, there >= MEMORY_BYTES, figures={"memory_gb": there / 1e9})


def _disk(home: Path) -> Finding:
    nearest = next(folder for folder in (home, *home.parents) if folder.is_dir())
    free = free_bytes(nearest)
    said = f"{free / 1e9:.1f} GB free at {home}"
    if free < DISK_BYTES:
        said += (
            f"; the demo's records take {DISK_BYTES / 1e9:.0f} GB: make room, or set ANTIPHON_HOME elsewhere"
        )
    return Finding("disk", said, free >= DISK_BYTES, figures={"disk_free_gb": free / 1e9})


def _shared_memory(folder: Path) -> Finding:
    try:
        check_shared_memory(folder)
    except AntiphonError as error:
        return Finding("shared memory", str(error), ok=False)
    left = list(leftovers(folder))
    size = sum(path.stat().st_size for path in left if path.exists())
    figures = {"leftovers": float(len(left)), "leftover_mb": size / 1e6}
    if left:
        names = " ".join(path.name for path in left[:4]) + (" ..." if left[4:] else "")
        said = (
            f"{size / 1e6:.1f} MB in {len(left)} files of {folder} that nothing uses ({names}); "
            "`antiphon doctor --fix` removes those of runs"
        )
        return Finding("shared memory", said, ok=False, needed=False, figures=figures)
    free = free_bytes(folder) if folder.is_dir() else 0
    return Finding("shared memory", f"{free / 1e9:.1f} GB free, nothing left over", figures=figures)


def _compiler() -> Finding:
    why = why_not_compiling()
    said = why or shutil.which(os.environ.get("CXX", "g++")) or ""
    return Finding("compiler", said, why is None, needed=False)


def _sandbox() -> Finding:
    try:
        check_sandbox()
    except AntiphonError as error:
        return Finding("sandbox", f"{error}", ok=False, needed=False)
    return Finding("sandbox", "what a model writes is evaluated apart")


def _ports() -> Finding:
    try:
        found = free_ports(PORTS)
    except OSError as error:
        return Finding("ports", f"no port of 127.0.0.1 can be listened on: {error.strerror}", ok=False)
    taken = [port for port in found if not is_free(port)]
    said = f"{len(found) - len(taken)} of {PORTS} asked for can be listened on"
    return Finding("ports", said, not taken)


def _clock() -> Finding:
    """Ask the kernel whether something keeps its clock: adjtimex(2), which answers 5 where nothing does."""
    room = ctypes.create_string_buffer(512)  # `struct timex`, all zero: nothing is set
    if ctypes.CDLL(None).adjtimex(room) != _TIME_ERROR:
        return Finding("clock", "kept by a time service")
    said = "no time service is seen to keep it; certificates and tokens of a fleet need it right to minutes"
    return Finding("clock", said, ok=False, needed=False)


def _driver(file: Path) -> Finding:
    if not file.is_file():
        return Finding("GPU", "there is none, or no driver of it: learner and workers use the processors")
    found = re.search(r"\s(\d+)\.\d+(?:\.\d+)?\s", file.read_text())
    needs = " ".join(requires("torch") or ())
    cuda = re.search(r"nvidia-cuda-runtime(?:-cu\d+)?==(\d+)", needs)
    if cuda is None:
        said = (
            f"a driver is there, but torch {version('torch')} is for processors alone; install the CUDA lock"
        )
        return Finding("GPU", said, ok=False, needed=False)
    oldest, is_version = DRIVER.get(int(cuda[1])), int(found[1]) if found else 0
    ok = oldest is None or is_version >= oldest
    said = f"driver {is_version} for CUDA {cuda[1]}"
    if not ok:
        said += f", which needs {oldest} or newer; update the driver"
    return Finding("GPU", said, ok, figures={"driver": float(is_version)})
