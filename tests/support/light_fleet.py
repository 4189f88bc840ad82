"""A light process that plays `antiphon worker` for launchers, and what a test needs beside it."""

import asyncio
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

PATIENCE_S = 90.0
"""Longest wait for what an engine does on a busy machine."""
SECRET = "the-secret-of-a-bundle"


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))

    return run


def command() -> str:
    """Return how it is called."""
    return shlex.join([sys.executable, str(Path(__file__).resolve())])


def make_bundle(folder: Path) -> Path:
    """Write a worker's bundle and return its folder."""
    folder.mkdir(parents=True)
    for name in ("certificate.pem", "key.pem", "authority.pem", "token"):
        (folder / name).write_text(f"{name} {SECRET}")
    return folder


def told(folder: Path, worker: str) -> list[dict[str, Any]]:
    """Return what the processes of a worker wrote into `folder`, in the order of their starts."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{worker}.*.json"))]


def alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(true: Callable[[], Any]) -> Any:
    """Return what `true`, a function or one of coroutines, returns once that is not empty."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = true()
        found = await found if isinstance(found, Awaitable) else found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s"
        await asyncio.sleep(0.1)


def main() -> None:
    """Say what was given, in $LIGHT_FLEET, and end with SIGTERM unless $LIGHT_FLEET/stubborn is there."""
    folder, given = Path(os.environ["LIGHT_FLEET"]), sys.argv[1:]
    options = dict(zip(given[1::2], given[2::2], strict=False))
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    bundle = Path(options["--credentials"])
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in bundle.iterdir() if path.is_file()}
    says = {"pid": os.getpid(), "given": given, "modes": modes, "folder": oct(bundle.stat().st_mode & 0o777)}
    path = folder / f"{options['--name']}.{time.time_ns()}.json"
    path.with_suffix(".part").write_text(json.dumps(says))
    path.with_suffix(".part").rename(path)
    if ready := options.get("--ready-file"):
        Path(ready).write_text("{}")
    while not asked.wait(0.5) or (folder / "stubborn").exists():
        if not folder.exists():
            sys.exit("the test is gone")
        if asked.is_set():
            time.sleep(0.2)


if __name__ == "__main__":
    main()
