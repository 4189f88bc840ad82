"""Tool processes: the shell and the Python that a policy uses in a trajectory, and what they may do.

Each has a host that runs nothing of the policy's: process 1 of a namespace of its own, within that of the
trajectory's process. What the policy wrote is a program of its own (exec), so it inherits nothing of
the environment: not its memory, its secrets, its files or its pipes. It sees no process but its own, has no
network, writes to a folder that the tools of one trajectory share, and is one of at most `PROCESSES`. When a
call is over, all that it started is killed; Python, whose variables stay, may start none and stands still.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from antiphon.core.errors import UnavailableError
from antiphon.environments.scoring.messages import ScoringTask, line_of
from antiphon.system.processes import SAME_ORDER
from antiphon.system.sandbox import (
    ONE_THREAD,
    SCRATCH,
    SCRATCH_BYTES,
    fork_within,
    limit_this_process,
    own_scratch,
    own_user,
)
from antiphon.system.system_calls import filter_program, refuse_other_calls

PROCESSES, OPEN_FILES = 16, 64
"""Processes and threads that a call of the shell may have at once, and files that each may have open."""
MEMORY_SHARE = 4
"""Each of them may use the address space of an answer divided by this."""
TIME_SHARE = 0.8
"""Share of an answer's time that its calls of tools may take together."""
OUTPUT_BYTES, MOST_WRITTEN = 8192, 1 << 20
"""How much of a call's output is kept, and how much it may write before it is stopped."""
TEXT_BYTES = 60_000
"""Longest code: as much as a pipe holds."""
SHELL = ("/bin/sh", "-c")
PYTHON = (sys.executable, "-s", "-P", str(Path(__file__).with_name("python_tool.py")))
_VARIABLES = {
    **SAME_ORDER,
    **ONE_THREAD,
    **dict.fromkeys(("HOME", "TMPDIR"), SCRATCH),
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
}


class ToolHosts:
    """The hosts of one trajectory's tools, as its own process has them."""

    def __init__(self, names: Iterable[str], task: ScoringTask) -> None:
        """Start a host for each of "shell" and "python" that is named; takes the rights of the sandbox.

        Raises:
            OSError: when the kernel does not make what a host needs.
        """
        self._task = task
        pairs = {name: socket.socketpair() for name in names}
        self._channels = {name: pair[0] for name, pair in pairs.items()}
        self._deadline_s = 0.0
        if pairs and fork_within() == 0:
            _serve_all(pairs, task)
        for name, pair in pairs.items():
            pair[1].close()
            if refusal := self._heard(name):
                raise OSError(f"the tool {name}: {refusal}")

    def renew(self) -> None:
        """Say that the time of an answer begins."""
        self._deadline_s = time.monotonic() + TIME_SHARE * self._task.answer_timeout_s

    def __call__(self, tool: str, text: str) -> str:
        """Return what running a text wrote.

        Raises:
            UnavailableError: when the host has ended.
        """
        left_s = max(0.0, self._deadline_s - time.monotonic())
        try:
            self._channels[tool].sendall(line_of({"text": text, "timeout_s": left_s}))
            return self._heard(tool)
        except OSError as error:
            raise UnavailableError(f"the process of the tool {tool} has ended") from error

    def _heard(self, tool: str) -> str:
        with self._channels[tool].makefile("rb") as answers:
            if line := answers.readline():
                return str(json.loads(line)["said"])
        raise OSError("its process has ended")


def _serve_all(pairs: Mapping[str, tuple[socket.socket, socket.socket]], task: ScoringTask) -> NoReturn:
    """Start a host for each tool and hold the folder that they share, until the trajectory's process ends."""
    try:
        for ours, _ in pairs.values():
            ours.close()
        try:
            own_scratch(task.readable)
            for name, (_, channel) in pairs.items():
                if fork_within() == 0:
                    _serve(name, channel, [held for _, held in pairs.values() if held is not channel], task)
        except OSError as error:
            for _, channel in pairs.values():
                channel.sendall(line_of({"said": str(error)}))
        for _, channel in pairs.values():
            channel.close()
        while True:
            signal.pause()
    finally:
        os._exit(0)


def _serve(name: str, channel: socket.socket, others: Sequence[socket.socket], task: ScoringTask) -> NoReturn:
    """Say that the host is ready, or why not, and run what is asked for until the channel ends."""
    try:
        for other in others:
            other.close()
        refusal = ""
        try:
            own_user()
            os.chdir(SCRATCH)
        except OSError as error:
            refusal = str(error)
        channel.sendall(line_of({"said": refusal}))
        runner = _Python(task) if name == "python" else _Shell(task)
        with channel.makefile("rb") as requests:
            for line in requests:
                asked = json.loads(line)
                said = runner.run(asked["text"], asked["timeout_s"])
                channel.sendall(line_of({"said": said or "[no output]"}))
    finally:
        os._exit(0)


class _Shell:
    """Runs each command in a new shell."""

    def __init__(self, task: ScoringTask) -> None:
        self._task = task

    def run(self, text: str, timeout_s: float) -> str:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _become([*SHELL, text], writing, self._task, PROCESSES)
        os.close(writing)
        ended = os.pidfd_open(child)
        said, stopped = _collected(reading, ended, timeout_s)
        status = os.waitpid(child, os.WNOHANG)[1] if not stopped else 0
        _kill_all()
        os.close(reading)
        os.close(ended)
        return _with_note(said, stopped or (ending(status) if status else ""))


class _Python:
    """Runs code in one Python, which is started again when it ended or took too long."""

    def __init__(self, task: ScoringTask) -> None:
        self._task = task
        self._child = self._requests = self._done = self._output = 0

    def run(self, text: str, timeout_s: float) -> str:
        line = json.dumps(text).encode() + b"\n"
        if len(line) > TEXT_BYTES:
            return f"[not run: the code takes more than {TEXT_BYTES} bytes]"
        if not self._child:
            self._start()
        os.kill(self._child, signal.SIGCONT)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while os.read(self._done, 4096):  # what it wrote there by itself
                pass
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # then it will not answer in time
            os.write(self._requests, line)
        said, stopped = _collected(self._output, self._done, timeout_s)
        if not stopped and not os.read(self._done, 1):
            stopped = "Python ended"
        if stopped:
            _kill_all()
            for number in (self._requests, self._done, self._output):
                os.close(number)
            self._child = 0
            return _with_note(said, f"{stopped}; its variables are lost")
        os.kill(self._child, signal.SIGSTOP)  # it does nothing between two calls
        return said

    def _start(self) -> None:
        requests, self._requests = os.pipe()
        self._done, done = os.pipe()
        self._output, output = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            for number in (requests, done):
                os.set_inheritable(number, True)
            _become([*PYTHON, str(requests), str(done)], output, self._task, 0)
        for number in (requests, done, output):
            os.close(number)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._done, False)


def _become(arguments: Sequence[str], output: int, task: ScoringTask, processes: int) -> NoReturn:
    """Turn this process into a program that writes to `output`."""
    try:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        program = filter_program(tools=True)
        limit_this_process(
            cpu_s=1000 * (1 + int(task.answer_timeout_s)),
            memory_bytes=task.memory_bytes // MEMORY_SHARE,
            open_files=OPEN_FILES,
            processes=processes,
            file_bytes=SCRATCH_BYTES,
        )
        refuse_other_calls(program)
        os.execve(arguments[0], [*arguments], _VARIABLES)
    except (OSError, ValueError) as error:
        os.write(2, f"it cannot be run: {error}".encode(errors="replace"))
    finally:
        os._exit(126)


def _collected(output: int, done: int, timeout_s: float) -> tuple[str, str]:
    """Read what a call writes until it is done; return that, and why it was stopped."""
    deadline_s = time.monotonic() + timeout_s
    head, tail, total = bytearray(), bytearray(), 0
    half, stopped = OUTPUT_BYTES // 2, ""
    poll = select.poll()
    for number in (output, done):
        poll.register(number, select.POLLIN)
    while not stopped:
        left_s = deadline_s - time.monotonic()
        ready = dict(poll.poll(1000.0 * max(0.0, left_s)))
        if output in ready:
            if written := os.read(output, 1 << 16):
                total += len(written)
                room = half - len(head)
                head += written[:room]
                tail = (tail + written[room:])[-half:]
            else:
                poll.unregister(output)
        elif done in ready:
            break
        if total > MOST_WRITTEN:
            stopped = f"stopped: it wrote more than {MOST_WRITTEN >> 20} MiB"
        elif left_s <= 0.0:
            stopped = f"stopped after {timeout_s:.1f} s"
    cut = total - len(head) - len(tail)
    middle = f"\n[{cut} bytes left out]\n".encode() if cut else b""
    return (head + middle + tail).decode(errors="replace").strip("\n"), stopped


def _kill_all() -> None:
    """Kill every process but this one, which is process 1 here, and take them away."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def ending(status: int) -> str:
    """Say how a process ended, by what `waitpid` returns of it."""
    return f"signal {status & 127}" if status & 127 else f"exit code {status >> 8}"


def _with_note(said: str, note: str) -> str:
    return "\n".join(filter(None, (said, note and f"[{note}]")))
