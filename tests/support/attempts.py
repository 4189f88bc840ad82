"""Attempts: answers that attack their scorer, which runs them as Python in the sandbox of the reward service.

An attempt succeeded when it got what it wanted, or when a file, a socket or a process outside shows that it
was there. After each, one right and one wrong answer must be scored as ever.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

import yaml

from antiphon.environments.scoring.messages import Failed, ScoringTask
from antiphon.environments.scoring.pool import ScoringPool
from tests.support.evaluating import FACTORY, FOLDER, HONEST

ATTEMPTS: dict[str, str] = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "attempts.yaml").read_text(encoding="utf-8")
)
"""Name -> code of an answer."""


async def attack(attempts: Mapping[str, str], answer_timeout_s: float) -> tuple[list[str], list[str], int]:
    """Try each attempt; return those that succeeded, those that disturbed the scorer, and what it cost.

    That is the number of honest answers that failed after an attempt.
    """
    escaped, disturbed, failed_after = [], [], 0
    with outside() as (names, was_touched):
        task = ScoringTask(
            *("sandbox/evaluating", {}, 0, 64, 64, answer_timeout_s, 1 << 30, FACTORY, (FOLDER,), (FOLDER,))
        )
        async with ScoringPool(task, processes=1, attempts=3, sandbox=True, patience_s=60.0) as pool:
            for name, code in attempts.items():
                (verdict,) = await pool.score("train-0-0", [Template(code).substitute(names)])
                after = await pool.score("train-0-1", [HONEST, "won = False"])
                if verdict == 1.0 or was_touched():
                    escaped.append(name)
                failed_after += sum(isinstance(one, Failed) for one in after)
                if after != [1.0, 0.0]:
                    disturbed.append(name)
    return escaped, disturbed, failed_after


@contextlib.contextmanager
def outside() -> Iterator[tuple[dict[str, object], Any]]:
    """Yield what attempts aim at, and a function that says whether one of them was touched."""
    os.environ["ANTIPHON_CANARY"] = "secret"
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        ) as other,
    ):
        path = Path(folder)
        path.chmod(0o777)
        (path / "secret").write_text("secret")
        named.bind(f"{folder}/socket")
        abstract.bind("\0antiphon-canary")
        for one in (server, named, abstract):
            one.listen()
            one.setblocking(False)
        before = sorted(os.listdir(folder))

        def was_touched() -> bool:
            return (
                other.poll() is not None
                or sorted(os.listdir(folder)) != before
                or any(_was_called(one) for one in (server, named, abstract))
            )

        yield (
            {
                "secret": f"{folder}/secret",
                "folder": folder,
                "port": server.getsockname()[1],
                "pid": other.pid,
                "socket": f"{folder}/socket",
            },
            was_touched,
        )
        other.kill()


def _was_called(listening: socket.socket) -> bool:
    try:
        listening.accept()[0].close()
    except BlockingIOError:
        return False
    return True
