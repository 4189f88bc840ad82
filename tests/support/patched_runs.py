"""A run in bfloat16 whose worker gets its snapshots over a link, with patches and without: FOLDER.

As fixed_runs.py, with its result in FOLDER/results.json.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from antiphon.core.config import RunConfig, build_config
from antiphon.services.rollout.process import engine_settings
from tests.support.fixed_runs import MODEL, KeptEngine, Manner, make_config, run_once


def make_patched(patches: str) -> RunConfig:
    """Return a run of few steps at a small learning rate."""
    tree: dict[str, Any] = make_config(2, 1).model_dump(mode="json")
    tree["model"]["dtype"] = "bfloat16"
    tree["learner"]["learning_rate"] = 1e-5
    tree["broadcast"]["patches"] = patches
    return build_config(tree)


def main() -> None:
    """Live the run twice."""
    folder = Path(sys.argv[1])
    engine = KeptEngine(engine_settings(make_patched("on"), str(MODEL)))
    results = {}
    for patches in ("off", "on"):
        config, manner = make_patched(patches), Manner(far=True, drafts=False)
        results[patches] = asyncio.run(run_once(config, folder / patches, engine, manner))
        print(patches, results[patches], flush=True)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
