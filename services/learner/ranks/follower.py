"""Follower: a rank that serves nobody, and does what rank 0 orders until that ends.

It has its batches from a store, by the digests that rank 0 names, and checkpoints where rank 0 has them. It
leaves signals to rank 0, which orders it to stop, and ends at once where rank 0 has gone.

    python -m antiphon.services.learner.ranks.follower CONFIG CHECKPOINTS STORE ENGINE_CONFIG
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import COMPLAINT, AntiphonError
from antiphon.lineage.store.artifact_store import open_store
from antiphon.models.spared_libraries import spare_unused_libraries
from antiphon.system.logs import configure_logs
from antiphon.system.processes import keep_temporary_files, tie_to_parent


def follow(
    config: RunConfig,
    checkpoints: Path,
    store: Path,
    moved: RunConfig | None = None,
    arrived: Callable[[], None] = lambda: None,
) -> int:
    """Train as one of the ranks of a learner; returns when rank 0 orders to stop.

    Args:
        config: of the run.
        checkpoints: the folder of the run's checkpoints.
        store: root of the store that has the batches.
        moved: what the engine is made from where it differs, as where the model lies elsewhere.
        arrived: called when nothing is left but to meet the other ranks.

    Raises:
        ConfigError: when this process was not started as one of `learner.ranks`.
    """
    tie_to_parent()
    configure_logs()
    keep_temporary_files()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    spare_unused_libraries()
    # torch and DeepSpeed: after what makes their import cheaper
    from antiphon.services.learner.checkpoints import CheckpointStore
    from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, pin_numerics
    from antiphon.services.learner.ranks.group import join
    from antiphon.services.learner.step import Trainer

    moved = moved or config
    pin_numerics(moved.learner.threads)
    trainer = Trainer(config, CheckpointStore(checkpoints, 1), lambda _: DeepSpeedEngine(moved))
    trainer.ranks = join(config, arrived)
    trainer.follow(open_store(store, config.record).get)
    return 0


def main(config: str, checkpoints: str, store: str, engine_config: str) -> int:
    """Run the command above; the exit status says whether it was ordered to stop."""
    try:
        own, moved = load_config(Path(config)), load_config(Path(engine_config))
        arrived = Path(config).with_name(f"arrived-{os.environ['RANK']}")
        return follow(own, Path(checkpoints), Path(store), moved, arrived.touch)
    except AntiphonError as error:
        print(f"{COMPLAINT}{error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
