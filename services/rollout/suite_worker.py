"""Suite worker: one engine, in a process of its own, samples its shard of a suite into the cache.

    python -m antiphon.services.rollout.suite_worker WORK

WORK is a JSON file that `write_work` wrote. The worker's start-up weights are the version that is evaluated.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.core.config import RunConfig, dump_config, parse_config
from antiphon.core.errors import COMPLAINT, AntiphonError
from antiphon.core.records import SamplingParameters
from antiphon.lineage.suite_cache import SuiteCache, SuiteSample
from antiphon.models.codec import resolve_model_path
from antiphon.services.rollout.process import check_engine, engine_settings
from antiphon.system.files import write_atomically
from antiphon.system.processes import tie_to_parent

NICENESS = 10
"""Of the process: where a run goes on beside it, that one comes first."""


@dataclass(frozen=True, slots=True)
class SuiteRequest:
    """One sample to draw."""

    key: str
    """What the cache calls suite, version and sampling."""
    item: int
    sample: int
    prompt: tuple[int, ...]
    """Token ids."""
    seed: int
    sampling: SamplingParameters


def write_work(path: Path, config: RunConfig, database: Path, requests: Sequence[SuiteRequest]) -> None:
    """Write what one worker has to do.

    Args:
        path: the file.
        config: its model and `rollout` section decide the engine.
        database: the cache.
        requests: none of them is in the cache.
    """
    work = {"config": dump_config(config), "database": str(database), "requests": [*map(asdict, requests)]}
    write_atomically(path, json.dumps(work).encode())


def work(path: Path) -> None:
    """Sample what a file asks for, and commit every sample as soon as it is whole.

    Raises:
        ConfigError: when an engine cannot have these settings.
        IntegrityError: when the engine's tokens do not follow its own distribution.
    """
    asked = json.loads(path.read_bytes())
    config = parse_config(asked["config"])
    places = {f"{number}": one for number, one in enumerate(asked["requests"])}
    waiting = (
        EngineRequest(
            name,
            tuple(one["prompt"]),
            one["seed"],
            SamplingParameters(**{**one["sampling"], "stop": tuple(one["sampling"]["stop"])}),
            group=f"{one['key']}-{one['item']}",
        )
        for name, one in places.items()
    )
    settings = engine_settings(config, resolve_model_path(config.model.path))
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    def sample(output: EngineOutput) -> tuple[str, SuiteSample]:
        one = places[output.request_id]
        tokens = tuple(int(token) for token in output.token_ids)
        return one["key"], SuiteSample(one["item"], one["sample"], tokens, str(output.finish_reason))

    engine = VllmEngine(settings)
    check_engine(engine, config)
    # In a run nobody knows start-up weights; here their folder is what is evaluated.
    with SuiteCache(Path(asked["database"])) as cache, engine.rehearsal():
        while True:
            engine.add([*islice(waiting, settings.max_num_seqs - engine.unfinished)])
            if not engine.unfinished:
                break
            if done := engine.step():
                cache.add(map(sample, done))
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
