"""One engine in a process of its own, put to its contract.

python -m antiphon.benchmarks.parts.examine_engine vllm MODEL ""    the engine in this process
python -m antiphon.benchmarks.parts.examine_engine http MODEL URL   the server at that URL

The last line of the output is what `examine` found, as JSON.
"""

import json
import sys
from pathlib import Path

from antiphon.api.engine import Engine
from antiphon.benchmarks.parts.contract import Subject, examine, versions_of
from antiphon.services.rollout.engine.environment import EngineSettings, ServerSettings
from antiphon.system.processes import tie_to_parent

MODEL_TOKENS, DRAFTS = 128, 8
SILENT_S, SWAP_S = 30.0, 60.0


def start(kind: str, model: Path, url: str) -> Engine:
    """Return an engine that holds no weights yet."""
    if kind == "http":
        from antiphon.services.rollout.engine.http_engine import HttpEngine

        return HttpEngine(ServerSettings(url, model, None, MODEL_TOKENS, SILENT_S, SWAP_S))
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    return VllmEngine(
        EngineSettings(
            model, max_model_len=MODEL_TOKENS, max_num_seqs=32, kv_cache_bytes=64 << 20, draft_tokens=DRAFTS
        )
    )


def main(kind: str, folder: str, url: str) -> None:
    """Examine one engine and print what was found."""
    tie_to_parent()
    model = Path(folder)
    engine = start(kind, model, url)
    found = examine(Subject(engine, model, versions_of(model)))
    engine.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
