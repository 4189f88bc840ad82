"""Functions: CPU seconds of every process of a job by function, as `injected/sitecustomize.py` saw them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from antiphon.system.cpu_time import kind_of

INJECTED = Path(__file__).with_name("injected")
FOLDER_VARIABLE = "ANTIPHON_CPU_SAMPLES"
"""As `injected/sitecustomize.py` has it."""


@dataclass(frozen=True, slots=True)
class SampledProcess:
    """One process of a job."""

    kind: str
    """As `system.cpu_time` has them."""
    cpu_s: float
    """Of all its threads, the sampling one left out."""
    threads: tuple[tuple[str, float], ...]
    """Python threads and their seconds, the busiest first; other threads are what is missing to `cpu_s`."""
    within: tuple[tuple[str, float], ...]
    """Functions and the seconds of them and all that they called, the longest first."""


@contextmanager
def sampled(folder: Path) -> Iterator[None]:
    """Have all Python processes that are started meanwhile write their samples to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    before = {name: os.environ.get(name) for name in (FOLDER_VARIABLE, "PYTHONPATH")}
    paths = [str(INJECTED), *filter(None, [before["PYTHONPATH"]])]
    os.environ |= {FOLDER_VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read_samples(folder: Path) -> list[SampledProcess]:
    """Return the processes that wrote samples, the one with most CPU seconds first."""
    found = []
    for path in folder.glob("*.json"):
        said = json.loads(path.read_text(encoding="utf-8"))
        threads = {name: taken for name, taken in said["threads"].items() if name != "cpu-sampler"}
        found.append(
            SampledProcess(
                kind_of(said["words"]),
                said["process_s"] - said["sampler_s"],
                _sorted(threads),
                _sorted({_short(name): taken for name, taken in said["within"].items()}),
            )
        )
    return sorted(found, key=lambda process: -process.cpu_s)


def _sorted(seconds: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(seconds.items(), key=lambda item: -item[1]))


def _short(name: str) -> str:
    """Return a function's file without the folder of its library."""
    for mark in ("site-packages/", "/lib/python3."):
        name = name.rpartition(mark)[2]
    return name
