"""demo: the shipped example, start to finish, in one command."""

from pathlib import Path

from antiphon.cli.arguments import shipped
from antiphon.cli.run import run_config
from antiphon.core.config import load_config


def demo(
    *overrides: str,
    seed: int = 0,
    fresh: bool = False,
    results: Path | None = None,
) -> int:
    """Train the shipped small model on chain sums and show what came of it.

    Args:
        overrides: key=value pairs, such as run.steps=20.
        seed: seed of the run.
        fresh: begin a new run even if an unfinished one exists.
        results: folder that gets metrics.json, timings.json and final.json.
    """
    config = load_config(shipped("quickstart.yaml"), [f"run.seed={seed}", *overrides])
    return run_config(config, resume=None, fresh=fresh, results=results)
