"""Suite worker: one engine, in a process of its own, samples its share of the answers to suites.

    python -m antiphon.services.rollout.suite_worker WORK

WORK is a pickle of the configuration, whose model and `rollout` section decide the engine, of the database,
and of the requests, named after all that decides them. The engine's start-up weights are the version that is
evaluated. An answer is kept (`lineage.kept`) as soon as it is whole; WORK is touched when tokens have come.
"""

import os
import pickle
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from antiphon.api.engine import EngineRequest
from antiphon.core.config import RunConfig
from antiphon.core.errors import COMPLAINT, AntiphonError
from antiphon.lineage.kept import Kept
from antiphon.services.rollout.process import check_engine, start_engine
from antiphon.system.processes import tie_to_parent

NICENESS = 10
"""Of the process: where a run goes on beside it, that one comes first."""
SAMPLES = "samples"
"""Table of what was sampled."""


class SuiteSample(NamedTuple):
    """One completion of an item."""

    tokens: bytes
    """Token ids, int32."""
    finish: str
    """As `FinishReason` says it."""


SuiteWork = tuple[RunConfig, Path, Sequence[EngineRequest]]


def work(path: Path) -> None:
    """Sample what a file asks for.

    Raises:
        ConfigError: when an engine cannot have these settings.
        IntegrityError: when the engine's tokens do not follow its own distribution.
        UnavailableError: when a sample cannot be kept.
    """
    asked: SuiteWork = pickle.loads(path.read_bytes())  # from the process that started this one
    config, database, requests = asked
    engine, waiting = start_engine(config), iter(requests)
    path.touch()
    check_engine(engine, config)
    # In a run nobody knows start-up weights; here their folder is what is evaluated.
    with Kept(database, SAMPLES, SuiteSample) as kept, engine.rehearsal():
        while True:
            engine.add([*islice(waiting, engine.settings.max_num_seqs - engine.unfinished)])
            if not engine.unfinished:
                break
            for output in engine.step():
                tokens = np.asarray(output.token_ids, np.int32).tobytes()
                kept.add(output.request_id, SuiteSample(tokens, str(output.finish_reason)))
            path.touch()
    engine.close()


def _main(path: str) -> int:
    tie_to_parent()
    os.nice(NICENESS)
    try:
        work(Path(path))
    except AntiphonError as error:
        print(f"{COMPLAINT}{error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
