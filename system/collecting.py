"""Collecting: Python looks seldom for garbage in processes that load much and make few cycles.

By default it looks after every 700 new objects, and walks more and more of what was loaded and stays: a third
of the CPU seconds of importing Prefect and MLflow.

    python -P -m antiphon.system.collecting MODULE ARGUMENTS

runs a module that is not ours so, as `python -m MODULE ARGUMENTS` would, until it has loaded what it needs: a
process that went on like this would keep what is in cycles for good, megabytes in a minute.
"""

import gc
import runpy
import sys

COLLECT_AFTER = 50_000
"""New objects between two looks."""
USUALLY = gc.get_threshold()
LOADING = (sys.executable, "-P", "-m", "antiphon.system.collecting")
"""Runs the module that follows so, with its arguments."""


def collect_seldom() -> None:
    """Have this process look after `COLLECT_AFTER` new objects."""
    gc.set_threshold(COLLECT_AFTER)


def collect_as_usual() -> None:
    """Have this process, which has loaded what it needs, look as often as others do, at what is new."""
    gc.freeze()
    gc.set_threshold(*USUALLY)


def collect_as_usual_once_loaded() -> None:
    """Have this process do that by itself, once it has loaded nothing from one look to the next."""
    known = 0

    def look(phase: str, _: dict[str, int]) -> None:
        nonlocal known
        if phase == "stop":
            before, known = known, len(sys.modules)
            if known == before:
                gc.callbacks.remove(look)
                collect_as_usual()

    gc.callbacks.append(look)


if __name__ == "__main__":
    collect_seldom()
    collect_as_usual_once_loaded()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
