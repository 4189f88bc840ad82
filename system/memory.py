"""Memory: how much there is, and what the C library is told when a process starts."""

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


def host_bytes() -> int:
    """Return the memory of this machine, bytes."""
    return int(psutil.virtual_memory().total)
