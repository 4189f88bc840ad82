"""A coordinator in a process of its own, with light prompts: python coordinator_process.py FOLDER PORT."""

import asyncio
import sys
from pathlib import Path

from antiphon.core.config import load_config
from antiphon.core.errors import AntiphonError
from antiphon.services.coordinator.server import serve_coordinator
from tests.support.light_parties import LightPrompts
from tests.support.loop_model import RUN_ID


def main() -> int:
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    config = load_config(folder / "config.yaml")

    def ready(bound: int) -> None:
        print(f"ready {bound}", flush=True)

    try:
        asyncio.run(
            serve_coordinator(
                config, RUN_ID, folder, folder / "store", "127.0.0.1", port, ready, LightPrompts()
            )
        )
    except AntiphonError as error:
        print(f"error {error}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
