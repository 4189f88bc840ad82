"""Sandbox: answers that attack their scorer, how many it scores in a second, and what one that hangs costs.

Each attempt is given to a scorer that runs its answer as Python (`benchmarks/parts/sandbox`), in the sandbox
of the reward service. It succeeded when it got what it wanted, or when a file, a socket or a process outside
shows that it was there. After each, one right and one wrong answer must be scored as ever; `failed_after`
counts those that were not scored. `answers_per_s` is
of short answers of the task countdown, in groups of eight, by two warm scoring processes. `hang_spread_s` is
by how much an answer that hangs delayed another one at most; its own deadline is the limit.

    .venv/bin/python benchmarks/sandbox.py
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

import yaml

from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.benchmarks.parts.sandbox.environment import FACTORY, HONEST
from antiphon.environments.registry import make_environment
from antiphon.environments.scoring.messages import Failed, ScoringTask, Verdict
from antiphon.environments.scoring.pool import ScoringPool
from antiphon.system.logs import configure_logs

ATTEMPTS: dict[str, str] = yaml.safe_load(
    (Path(__file__).parent / "data" / "attempts.yaml").read_text(encoding="utf-8")
)
"""Name -> code of an answer."""


TIMEOUT_S = 1.0
"""Deadline of one attempt."""
MEMORY_BYTES = 1 << 30
GROUP = 8
WARM_GROUPS = 8
HANGS = "while True:\n    pass"
LEAST_PER_S = 300.0


def main() -> int:
    """Try everything and check what came of it."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--answers", type=int, default=4000, help="answers whose scoring is timed")
    parser.add_argument("--attempts", type=int, default=len(ATTEMPTS), help="try only the first this many")
    args = parser.parse_args()
    configure_logs(level="error")
    report = asyncio.run(_measure(dict(list(ATTEMPTS.items())[: args.attempts]), args.answers))
    problems = [f"succeeded: {name}" for name in report["escaped"]]
    problems += [f"disturbed the scorer: {name}" for name in report["disturbed"]]
    if report["failed_after"]:
        problems.append(f"{report['failed_after']} honest answers failed after an attack")
    slow = []
    if report["answers_per_s"] < LEAST_PER_S:
        slow.append(f"{report['answers_per_s']:.0f} answers a second are fewer than {LEAST_PER_S:.0f}")
    if report["hang_spread_s"] > TIMEOUT_S:
        slow.append(f"an answer that hangs delayed another by {report['hang_spread_s']:.2f} s")
    return finish(report, record=args.record, violated=problems, at_size=slow)


async def _measure(attempts: Mapping[str, str], answers: int) -> dict[str, Any]:
    escaped, disturbed, failed_after = await attack(attempts, TIMEOUT_S)
    return {
        "attempts": len(attempts),
        "escapes": len(escaped),
        "escaped": escaped,
        "disturbed": disturbed,
        "failed_after": failed_after,
        "answers_per_s": await _speed(answers),
        "hang_spread_s": await _spread(),
    }


async def attack(attempts: Mapping[str, str], answer_timeout_s: float) -> tuple[list[str], list[str], int]:
    """Try each attempt; return those that succeeded, those that disturbed the scorer, and what it cost.

    That is the number of honest answers that failed after an attempt.
    """
    escaped, disturbed, failed_after = [], [], 0
    with _outside() as (names, was_touched):
        async with _pool(answer_timeout_s) as pool:
            for name, code in attempts.items():
                (verdict,) = await pool.score("train-0-0", [Template(code).substitute(names)])
                after = await pool.score("train-0-1", [HONEST, "won = False"])
                got_it = verdict == 1.0 or was_touched()
                print(f"{name}: {'SUCCEEDED' if got_it else _words(verdict)}", flush=True)
                if got_it:
                    escaped.append(name)
                failed_after += sum(isinstance(one, Failed) for one in after)
                if after != [1.0, 0.0]:
                    disturbed.append(name)
    return escaped, disturbed, failed_after


async def _speed(answers: int) -> float:
    """Return the answers that two warm processes score in a second, each the process of one problem."""
    task = ScoringTask("reasoning/countdown", {}, 0, 64, 64, TIMEOUT_S, MEMORY_BYTES)
    environment = make_environment(task.name, task.parameters, 0, 64, 64)
    problems = [environment.problem("train", index) for index in range(64)]
    async with ScoringPool(task, processes=2, attempts=3, sandbox=True, patience_s=60.0) as pool:

        async def one(number: int) -> None:
            problem = problems[number % len(problems)]
            right = f"<answer>{problem.answer}</answer>"
            found = await pool.score(problem.key, [right, "<answer>1 + 1</answer>"] * (GROUP // 2))
            assert found == [1.0, 0.0] * (GROUP // 2), found

        await asyncio.gather(*(one(number) for number in range(WARM_GROUPS)))
        begun = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(answers // GROUP)))
        return GROUP * (answers // GROUP) / (time.perf_counter() - begun)


async def _spread() -> float:
    """Return the seconds by which a group that waits for a hanging answer is later than without it."""
    async with _pool(TIMEOUT_S) as pool:

        async def delay(first: str) -> float:
            before = asyncio.create_task(pool.score("train-0-0", [first]))
            await asyncio.sleep(0)  # it is asked for first
            begun = time.perf_counter()
            await pool.score("train-0-1", [HONEST])
            took = time.perf_counter() - begun
            await before
            return took

        quick = sorted([await delay(HONEST) for _ in range(9)])[4]
        return max([await delay(HANGS) for _ in range(3)]) - quick


def _pool(answer_timeout_s: float) -> ScoringPool:
    task = ScoringTask("sandbox/evaluating", {}, 0, 64, 64, answer_timeout_s, MEMORY_BYTES, FACTORY)
    return ScoringPool(task, processes=1, attempts=3, sandbox=True, patience_s=60.0)


@contextlib.contextmanager
def _outside() -> Iterator[tuple[dict[str, object], Any]]:
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


def _words(verdict: Verdict) -> str:
    return f"failed, {verdict.reason}" if isinstance(verdict, Failed) else f"scored {verdict:g}"


if __name__ == "__main__":
    sys.exit(main())
