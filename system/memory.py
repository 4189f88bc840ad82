"""Memory: how much there is, and what the C library is told when a process starts."""

import ctypes
from collections.abc import Mapping

import psutil

_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


def keep_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that computes: large tensors come from memory that it keeps.

    Otherwise it would give them back to the system after an operation, and have them cleared for the next:
    a third of the CPU time of an engine's large steps, a fourteenth of the learner's. What the environment
    says already stays.
    """
    return {**_KEPT, **environment}


def give_back() -> None:
    """Give the system the memory that the C library keeps for later operations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's
        trim(ctypes.c_size_t(0))


def host_bytes() -> int:
    """Return the memory of this machine, bytes."""
    return int(psutil.virtual_memory().total)
