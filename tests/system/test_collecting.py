"""Collecting: a process looks as often as others do once it has loaded what it needs, and not before."""

import subprocess
import sys

PROGRAM = """
import gc
from antiphon.system.collecting import COLLECT_AFTER, USUALLY, collect_as_usual_once_loaded, collect_seldom

collect_seldom()
collect_as_usual_once_loaded()
gc.collect()
import wave  # nothing else here loads it
gc.collect()
print(gc.get_threshold()[0] == COLLECT_AFTER, gc.get_freeze_count() > 0)
gc.collect()
print(gc.get_threshold() == USUALLY, gc.get_freeze_count() > 0, gc.callbacks)
"""


def test_a_process_that_has_loaded_all_looks_as_usual_at_what_is_new() -> None:
    said = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.splitlines() == ["True False", "True True []"]
