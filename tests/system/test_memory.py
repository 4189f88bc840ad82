"""Memory: what a process that computes is told when it starts."""

import os
import subprocess
import sys

from antiphon.system.memory import keep_memory


def test_what_the_environment_says_already_stays() -> None:
    kept = keep_memory({"MALLOC_TRIM_THRESHOLD_": "1", "HOME": "/home"})
    assert kept["MALLOC_TRIM_THRESHOLD_"] == "1" and kept["HOME"] == "/home"
    assert int(kept["MALLOC_MMAP_THRESHOLD_"]) > 2**20


def test_kept_memory_is_given_back() -> None:
    program = """
import re
from pathlib import Path
from antiphon.system.memory import give_back

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

blocks = [bytearray(1 << 20) for _ in range(200)]
kept = bytearray(1 << 20)  # above them: the system could not have them by itself
blocks.clear()
before = held()
give_back()
print(before - held())
"""
    environment = keep_memory(dict(os.environ))
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 150
