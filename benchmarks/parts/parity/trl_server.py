"""Parity parts: vLLM's server for TRL, of a release that TRL supports, in an environment of its own.

TRL 1.16 takes vLLM 0.22 to 0.31 and hands each version to the server by NCCL, so trainer and server need a
GPU each. No machine with two has run this yet.
"""

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from antiphon.benchmarks.parts.measure import tail
from antiphon.benchmarks.parts.own_environment import MissingToolError, python_with
from antiphon.system.ports import free_port

TRL_PACKAGES = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "multiprocess", "xxhash")
"""Without what they depend on in turn: the project's environment has that."""
SERVER_PACKAGES = ("vllm==0.31.0", *TRL_PACKAGES)
"""With what they depend on: another torch than the project's."""
SERVER_VARIABLE = "ANTIPHON_TRL_SERVER"
"""Tells TRL's run where its server is."""
GPUS = 2
START_S = 600.0
STOP_S = 30.0


def missing_server() -> str:
    """Say in one sentence why TRL's vLLM server cannot be had on this machine; empty where it can."""
    found = torch.cuda.device_count()
    if found >= GPUS:
        return ""
    return (
        f"TRL hands weights to its vLLM server by NCCL, which needs {GPUS} GPUs, one for each side, and this "
        f"machine has {found}; so TRL samples with transformers' generate here"
    )


@contextmanager
def served(model: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Serve a model on the first GPU; give the interpreter that TRL runs in beside it, and the address.

    Raises:
        MissingToolError: when it cannot be had, or does not start.
    """
    if reason := missing_server():
        raise MissingToolError(reason)
    python = python_with(SERVER_PACKAGES, beside_project=True, whole=True)
    url, log = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}", folder / "server.log"
    words = ["serve", str(model), "--port", str(port), "--weight-transfer-config", '{"backend": "nccl"}']
    with log.open("wb") as out:
        server = subprocess.Popen(
            [str(python.parent / "vllm"), *words, "--logprobs-mode", "processed_logprobs"],
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": "0"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise MissingToolError(f"vLLM's server for TRL did not start: {tail(log, 3)}")
            time.sleep(1.0)
        yield python, url
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5.0) as found:
        return bool(found.status == 200)
    return False
