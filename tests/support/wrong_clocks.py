"""Wrong clocks: the time of day of real processes is hours off and jumps; monotonic clocks are right."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("wrong_clock.c")
_OFFSET = struct.Struct("=q")


def build_wrong_clock(folder: Path) -> Path:
    """Compile the library that stands before a process's clock calls and return it."""
    library = folder / "wrong_clock.so"
    compiler = shutil.which("cc") or "gcc"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


class WrongClocks:
    """A time of day for each process of a run, wrong by up to `most_s` seconds in either direction."""

    def __init__(self, library: Path, folder: Path, rng: np.random.Generator, most_s: int = 7200) -> None:
        self._library, self._folder, self._rng, self._most_s = library, folder, rng, most_s
        self.offsets_s: dict[str, int] = {}
        self.jumps = 0

    def environment(self, role: str) -> dict[str, str]:
        """Return what the environment of a process needs."""
        if role not in self.offsets_s:
            self._file(role).write_bytes(bytes(_OFFSET.size))
            self._set(role)
        return {"LD_PRELOAD": str(self._library), "WRONG_CLOCK": str(self._file(role))}

    def jump(self) -> None:
        """Let every clock jump, forwards or back."""
        for role in self.offsets_s:
            self._set(role)
        self.jumps += 1

    def _file(self, role: str) -> Path:
        return self._folder / f"{role}.clock"

    def _set(self, role: str) -> None:
        self.offsets_s[role] = offset_s = int(self._rng.integers(-self._most_s, self._most_s))
        with self._file(role).open("r+b") as file:  # in place: processes have it mapped
            os.pwrite(file.fileno(), _OFFSET.pack(offset_s), 0)
