"""Engine contract: each engine is put to the checks of all abilities that it declares.

Two engines are examined on the demo's model in float32: `vllm`, the engine in a worker's own process, with
the keyed sampler and drafts, and `vllm_server`, a vLLM server process over HTTP (`rollout.engine: http`).
The checks are those of benchmarks/parts/contract.py; what log-probabilities and version spans should be
comes from transformers. For each engine the result has `declared` and `passed`, names of abilities, and
`failed`, name -> why; `engine` among them is what every engine promises. docs/concepts/engines.md says what a
missing one costs.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.parts.vllm_server import serving
from antiphon.services.rollout.engine.environment import child_environment

PROGRAM = "antiphon.benchmarks.parts.examine_engine"
MODEL = PROJECT / "examples" / "models" / "chain-sum"
PATIENCE_S = 400.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--url", default="", help="of a server that runs already, in place of a new one")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"vllm": examined("vllm", "")}
    with tempfile.TemporaryDirectory(prefix="antiphon-contract-") as name:
        if options.url:
            result["vllm_server"] = examined("http", options.url)
        else:
            with serving(MODEL, Path(name) / "server.log") as url:
                result["vllm_server"] = examined("http", url)
    violated = [
        f"{engine} declares {ability}, but {why}"
        for engine, found in result.items()
        for ability, why in found["failed"].items()
    ]
    return finish(result, record=options.record, violated=violated)


def examined(engine: str, url: str) -> dict[str, Any]:
    """Return what `examine` finds of an engine, in a process that is started as a worker is."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", PROGRAM, engine, str(MODEL), url],
        env=child_environment(1),
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    execute(main)
