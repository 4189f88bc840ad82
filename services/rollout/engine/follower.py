"""Follower: a rank of a sharded engine that knows no coordinator, and does what rank 0 orders.

It leaves signals to rank 0, and ends at once where that has gone.

    python -m antiphon.services.rollout.engine.follower CONFIG
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

from antiphon.core.config import load_config
from antiphon.core.errors import COMPLAINT, AntiphonError
from antiphon.models.codec import resolve_model_path
from antiphon.services.rollout.process import check_before_serving, check_engine, engine_settings
from antiphon.system.logs import configure_logs
from antiphon.system.processes import keep_temporary_files, tie_to_parent


def main(path: str) -> int:
    """Follow until rank 0 orders to stop; the exit status says whether it did."""
    tie_to_parent()
    configure_logs()
    keep_temporary_files()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        config = load_config(Path(path))
        settings = engine_settings(config, resolve_model_path(config.model.path))
        from antiphon.services.rollout.engine import sharded

        arrived = Path(path).with_name(f"arrived-{os.environ['RANK']}").touch
        patience_s = config.services.start_timeout_s
        ranks = sharded.join(settings, patience_s, arrived)
        engine = sharded.ShardedEngine(settings, ranks)
        if settings.dummy_weights:
            engine.before_serving = partial(check_before_serving, config=config)
        engine.follow(partial(check_engine, config=config))
    except AntiphonError as error:
        print(f"{COMPLAINT}{error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
