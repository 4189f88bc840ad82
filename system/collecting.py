"""Collecting: Python looks seldom for garbage in processes that load much and make few cycles.

By default it looks after every 700 new objects, and walks more and more of what was loaded and stays: a third
of the CPU seconds of importing Prefect and MLflow.

    python -P -m antiphon.system.collecting MODULE ARGUMENTS

runs a module that is not ours so, as `python -m MODULE ARGUMENTS` would.
"""

import gc
import runpy
import sys

COLLECT_AFTER = 50_000
"""New objects between two looks."""
USUALLY = gc.get_threshold()


def collect_seldom() -> None:
    """Have this process look after `COLLECT_AFTER` new objects."""
    gc.set_threshold(COLLECT_AFTER)


def collect_as_usual() -> None:
    """Have this process, which has loaded what it needs, look as often as others do, at what is new."""
    gc.freeze()
    gc.set_threshold(*USUALLY)


if __name__ == "__main__":
    collect_seldom()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
