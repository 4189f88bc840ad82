"""Scoring process: builds the environment, then forks for every group of answers and tells what came of each.

The answers to one problem are scored by a process of their own, which may start none, write no file, and
has limits of time and memory. It inherits the loaded libraries, so it costs milliseconds, and it takes with
it whatever an answer did: nothing of a group is left when the next one is scored. This process itself only
carries answers, and forks again for those behind one that hung. It ends when an answer has ended its fork, so
that nothing of it can stay, and with the service that started it. Conversations have forks that stay
(`conversing`). What judges programs has them run elsewhere (`runners`).

    python -s -P -m antiphon.environments.scoring.child sandbox     (by `ScoringPool`)
"""

import gc
import importlib
import json
import math
import os
import select
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from antiphon.core.errors import AntiphonError
from antiphon.environments.conversation import ConversationEnvironment
from antiphon.environments.environment import Environment, Problem
from antiphon.environments.programs import judge_with
from antiphon.environments.scoring.conversing import LiveConversations
from antiphon.environments.scoring.messages import (
    READY,
    Failed,
    ScoringTask,
    Verdict,
    checked_reward,
    failure_of,
    hung,
    result_line,
    turn_line,
)
from antiphon.environments.scoring.runners import RunnerHost, Runners
from antiphon.environments.scoring.tool_processes import TIME_SHARE, ending
from antiphon.system.sandbox import ONE_THREAD, close_scratch, fork_apart, limit_this_process

OPEN_FILES, JUDGE_FILES = 16, 1024
"""Of what scores answers, and of a judge, which has the environment's open and those of its runners."""
ENDING_S = 0.02
"""Seconds of an answer's deadline that are left for ending it, so that it delays no other by more."""
_RESULT = struct.Struct("<cd200s")
"""What a fork writes of one answer: its kind, the reward, why there is none."""


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the service, and that one in order
    requests, results, sys.stdout = sys.stdin.buffer, sys.stdout.buffer, sys.stderr  # a class may print
    sandbox = sys.argv[1:] == ["sandbox"]
    task = ScoringTask(**json.loads(requests.readline()))
    sys.path.extend(task.folders)
    os.environ.update({**ONE_THREAD, **task.secrets})
    try:
        module, _, name = task.factory.partition(":")
        make_environment = getattr(importlib.import_module(module), name)
        environment: Environment = make_environment(
            task.name, task.parameters, task.seed, task.train_size, task.heldout_size
        )
        from antiphon.environments.file import FileEnvironment  # brings numpy, which must start no threads

        if isinstance(environment, FileEnvironment):
            environment.warm_up()
        conversations = None
        if isinstance(environment, ConversationEnvironment):
            conversations = LiveConversations(environment, task, sandbox=sandbox)
        host = None
        if getattr(environment, "runs_programs", False):
            cpu_s = math.ceil(task.answer_timeout_s) + 1
            host = RunnerHost(task.readable, cpu_s=cpu_s, memory_bytes=task.memory_bytes, sandbox=sandbox)
    except AntiphonError as error:
        print(task.without_secrets(str(error)), file=sys.stderr)
        return error.exit_code
    fork = os.fork
    if sandbox:
        close_scratch()
        fork = fork_apart
    gc.collect()
    gc.freeze()  # collecting in a fork would copy every page that it inherits
    results.write(READY)
    results.flush()
    while line := requests.readline():
        asked = json.loads(line)
        if conversations is not None:
            if "forget" in asked:
                conversations.forget(asked["forget"])
            else:
                results.write(turn_line(conversations.turn(asked)))
                results.flush()
            continue
        problem = environment.problem_by_key(asked["key"])
        for result in _score_apart(environment, problem, asked["texts"], asked["hangs"], task, fork, host):
            results.write(result_line(result))
            results.flush()
    return 0


def _score_apart(
    environment: Environment,
    problem: Problem,
    texts: Sequence[str],
    hangs: int,
    task: ScoringTask,
    fork: Callable[[], int],
    host: RunnerHost | None,
) -> Iterator[Verdict]:
    """Yield the verdict on each answer, up to the last of this many that may hang.

    Those behind one that hangs are scored in another fork.

    Raises:
        SystemExit: when an answer ended its fork, or the service that waits for it is gone.
    """
    at = 0
    while at < len(texts) and hangs:
        reading, writing = os.pipe()
        runners = None if host is None else host.for_judge()
        child = fork()
        if child == 0:
            os.close(reading)  # or an answer could take away what this process was told to read
            if runners is not None:
                judge_with(Runners(runners), TIME_SHARE * task.answer_timeout_s)
            open_files = OPEN_FILES if host is None else JUDGE_FILES
            _score(environment, problem, texts[at:], task, writing, open_files)
        os.close(writing)
        if runners is not None:
            runners.close()
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            poll.register(sys.stdin, 0)  # says when the service has ended
            wait_s = max(task.answer_timeout_s - ENDING_S, 0.5 * task.answer_timeout_s)
            try:
                while at < len(texts):
                    ready = dict(poll.poll(1000.0 * wait_s))
                    if sys.stdin.fileno() in ready:
                        raise SystemExit("the reward service has ended")
                    result = _parsed(pipe.read(_RESULT.size), task) if ready else hung(task.answer_timeout_s)
                    if result is None:
                        break
                    yield result
                    at += 1
                    if not ready:
                        hangs -= 1
                        break
            finally:
                # It should have ended, but an answer could have made it close the pipe and go on.
                os.kill(child, signal.SIGKILL)
                status = os.waitpid(child, 0)[1]
        if at < len(texts) and result is None:
            raise SystemExit(f"an answer ended the process that scored it ({ending(status)})")


def _parsed(found: bytes, task: ScoringTask) -> Verdict | None:
    # A write of so few bytes to a pipe is whole or not at all: fewer bytes mean that the other end is closed.
    if len(found) == _RESULT.size:
        kind, reward, reason = _RESULT.unpack(found)
        if kind == b"r":
            return checked_reward(reward, task.reward_range)
        if kind == b"f":
            return Failed(task.without_secrets(reason.rstrip(b"\0").decode(errors="replace")))
    return None


def _score(
    environment: Environment,
    problem: Problem,
    texts: Sequence[str],
    task: ScoringTask,
    writing: int,
    open_files: int,
) -> NoReturn:
    """Score answers and end this process, whatever they do."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    cpu_s = math.ceil(len(texts) * task.answer_timeout_s) + 1
    limit_this_process(cpu_s=cpu_s, memory_bytes=task.memory_bytes, open_files=open_files)
    for text in texts:
        try:
            reward = checked_reward(environment.reward(problem, [text])[0], task.reward_range)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: an answer may have raised it
            reward = failure_of(error, task.without_secrets)
        if isinstance(reward, Failed):
            os.write(writing, _RESULT.pack(b"f", 0.0, reward.reason.encode(errors="replace")))
        else:
            os.write(writing, _RESULT.pack(b"r", reward, b""))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
