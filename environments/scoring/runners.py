"""Runners: processes in which a policy's programs run, apart from the judge that says what they are worth.

    python -s -P -m antiphon.environments.scoring.runners CONTROL LIMITS     (by `RunnerHost`)

A scoring process starts one host, a program of its own (exec), so there is nothing of the environment in it:
no tests, no secrets, no pipe to the verdict; the sandbox hides the environment's files from it. It forks a
runner for each program that a judge has run, and ends that one. A judge and its runner share a socket that
nobody else has; the program travels on it, so the host never holds what another program could look for.

What crosses the socket is plain data (`encode`). A runner that the program took over can say no more than a
value, which the judge compares like any other.
"""

import atexit
import builtins
import contextlib
import gc
import json
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, BinaryIO, NoReturn

from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.system.sandbox import (
    ONE_THREAD,
    close_scratch,
    fork_within,
    give_up_rights,
    limit_this_process,
    own_scratch,
)
from antiphon.system.system_calls import filter_program, refuse_other_calls

OPEN_FILES = 64
REPLY_BYTES = 1 << 20
"""Longest value that a function may return, as `encode` writes it, and longest output of a program."""
MOST_COLLISIONS = 1000
"""Keys of a set or dictionary that may have the hash of another."""
MESSAGE_CHARS = 200
"""How much is told of what an error says."""
OFTEN_IMPORTED = "bisect collections copy datetime decimal fractions functools hashlib heapq itertools math "
OFTEN_IMPORTED += "operator random re statistics string typing"
"""Loaded before the fork, since most programs use some of them."""
_START, _END, _READY = b"s", b"e", b"r"
_STATUS, _LENGTH = struct.Struct(">i"), struct.Struct(">I")
_CHANNEL, _MOST_FILES = 3, 1 << 16
KEEP, KEPT = "_keep_", "_kept_"
"""In a runner: the function that makes an object and says where it is in the list of those made."""


def _apart(keys: list[Any]) -> list[Any]:
    """Check that keys can be told apart; else making a set would take seconds, without an alarm within."""
    if len(keys) - len({hash(key) for key in keys}) > MOST_COLLISIONS:
        raise ValueError("too many keys have the hash of another")
    return keys


def _dict(items: list[Any]) -> dict[Any, Any]:
    _apart([key for key, _ in items])
    return dict(items)


_TAGS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": lambda items: {*_apart(items)},
    "dict": _dict,
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
}


_ENDS_LOOPS = StopIteration, StopAsyncIteration
_NO_VALUE = (OSError, ValueError, TypeError, AttributeError, RecursionError, MemoryError)


class Named:
    """What an expression means in a program; the expression is its `repr`."""


def encode(value: Any) -> Any:
    """Return a plain value as JSON can carry it; subclasses become what they extend.

    >>> decode(json.loads(json.dumps(encode({1: (2.5, {"a"}), "b": [None, b"c"]}))))
    {1: (2.5, {'a'}), 'b': [None, b'c']}

    Raises:
        TypeError: when it is no number, text, bytes, list, tuple, set or dictionary of such, or None.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [encode(one) for one in value]
    if isinstance(value, tuple | set | frozenset):
        return {"tuple" if isinstance(value, tuple) else "set": [encode(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(one)] for key, one in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Named | type):
        return {"named": value.__name__ if isinstance(value, type) else repr(value)}
    if callable(listed := getattr(value, "tolist", None)):  # of numpy
        return encode(listed())
    raise TypeError(f"a value of type {type(value).__name__} is no plain data")


def decode(value: Any, names: dict[str, Any] | None = None) -> Any:
    """Return what `encode` was given; every part of it is of a built-in type.

    With `names`, those of a program, what they mean may be part of it: a type, or an object of its own.

    Raises:
        ValueError, TypeError, RecursionError: when it was not made by `encode`.
    """
    if isinstance(value, list):
        return [decode(one, names) for one in value]
    if isinstance(value, dict):
        ((tag, held),) = value.items()
        if tag == "named" and names is not None:
            return eval(held, names)
        if tag not in _TAGS:
            raise ValueError(f"there is no tag {tag!r:.20}")
        return _TAGS[tag](decode(held, names))
    return value


class RunnerHost:
    """The host of runners, as the process that forks judges has it."""

    def __init__(self, hidden: Sequence[str], *, cpu_s: int, memory_bytes: int, sandbox: bool) -> None:
        """Start it; no program sees what is `hidden`, and each has so much processor time and address space.

        Raises:
            ConfigError: when it does not start.
        """
        from antiphon.system.processes import SAME_ORDER  # no runner needs what it brings along

        self._control, theirs = socket.socketpair()
        child = fork_within() if sandbox else os.fork()
        if child == 0:
            try:
                if sandbox:
                    own_scratch(hidden)
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, 0)
                os.dup2(nothing, 1)
                theirs.set_inheritable(True)
                runner = {"cpu_s": cpu_s, "memory_bytes": memory_bytes}
                limits = json.dumps({"runner": runner, "sandbox": sandbox})
                command = [sys.executable, "-s", "-P", "-m", __name__, str(theirs.fileno()), limits]
                os.execve(command[0], command, {**SAME_ORDER, **ONE_THREAD})
            finally:
                os._exit(126)
        theirs.close()
        if self._control.recv(1) != _READY:
            raise ConfigError("the process that starts programs did not start; see reward.sandbox")

    def for_judge(self) -> socket.socket:
        """Return the socket by which one judge has programs run; what runs ends when it is closed.

        Raises:
            SystemExit: when the host has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [_START], [theirs.fileno()])
            except OSError as error:
                raise SystemExit(f"the process that starts programs has ended: {error}") from error
        return ours


class ProgramEndedError(BaseException):
    """A program ended or answered what is no value; no test may catch it as an error that it expects."""


@dataclass(frozen=True, slots=True)
class Runners:
    """Starts runners for one judge, one at a time."""

    host: socket.socket
    """What `RunnerHost.for_judge` returned."""

    def start(self, program: Mapping[str, Any]) -> socket.socket:
        """Start a runner with a program, as `_run` takes it, and return the socket to it.

        Raises:
            UnavailableError: when the host has ended.
        """
        found = socket.socket(fileno=self._asked(_START)[1][0])
        body = json.dumps(program).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended; reading says so
            found.sendall(_LENGTH.pack(len(body)) + body)
        return found

    def end(self) -> int:
        """End the runner; return its exit status, or minus the signal that ended it; raises as `start`."""
        return self._asked(_END)[0]

    def _asked(self, what: bytes) -> tuple[int, list[int]]:
        # Without the alarm of a judge: half an exchange would spoil the next.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        try:
            self.host.sendall(what)
            said, given, *_ = socket.recv_fds(self.host, _STATUS.size, 1)
            return _STATUS.unpack(said)[0], given
        except (OSError, struct.error) as error:
            raise UnavailableError("the process that starts programs has ended") from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def call(channel: socket.socket, function: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Have a runner call a function of its program and return the value, or raise what it raised.

    Raises:
        TypeError: when an argument is no plain value.
        ProgramEndedError: when the runner ended, or what it wrote is no value.
        Exception: the built-in one of the name that the function raised, else a RuntimeError, also for
            StopIteration, which would end a loop of the tests.
    """
    asked = {"call": function, "arguments": encode(list(arguments)), "keywords": encode(dict(keywords))}
    try:
        channel.sendall(json.dumps(asked).encode() + b"\n")
        ((what, value),) = json.loads(_read(channel, b"\n")).items()
        value = decode(value)
        if what == "value":
            return value
        name, said = map(str, value)
    except (ProgramEndedError, *_NO_VALUE) as error:
        channel.close()  # nothing more is said here, even where tests go on
        raise ProgramEndedError("the program ended, or wrote what is no value") from error
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, _ENDS_LOOPS):
        kind = RuntimeError
    raise kind(said)


def output_of(channel: socket.socket) -> str:
    """Return all that a program writes to its standard output until it ends.

    Raises:
        ProgramEndedError: when that is too much, or no text.
    """
    try:
        return _read(channel).decode()
    except UnicodeDecodeError as error:
        raise ProgramEndedError("the program wrote what is no text") from error


def _read(channel: socket.socket, until: bytes = b"") -> bytes:
    """Read up to an end, or all that there is."""
    found = bytearray()
    while not until or not found.endswith(until):
        read = channel.recv(1 << 16)
        if not read and not until:
            break
        found += read
        if not read or len(found) > REPLY_BYTES:
            raise ProgramEndedError("the program ended, or wrote too much")
    return bytes(found)


def main() -> None:
    """Serve one judge after the other until the control socket ends."""
    control, limits = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    if limits["sandbox"]:
        close_scratch()
    for name in OFTEN_IMPORTED.split():
        __import__(name)
    filter_program()  # which is remembered
    gc.collect()
    gc.freeze()  # collecting in a fork would copy every page that it inherits
    control.sendall(_READY)
    while True:
        _, given, *_ = socket.recv_fds(control, 1, 1)
        if not given:
            return
        with socket.socket(fileno=given[0]) as judge:
            _serve(judge, limits)


def _serve(judge: socket.socket, limits: Mapping[str, Any]) -> None:
    """Start and end runners as a judge asks, until it is gone."""
    child = 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the judge is gone
        while asked := judge.recv(1):
            status, child = _ended(child), 0
            ours, theirs = socket.socketpair()
            with ours, theirs:
                if asked == _START:
                    child = fork_within() if limits["sandbox"] else os.fork()
                    if child == 0:
                        _run(theirs.fileno(), limits)
                socket.send_fds(judge, [_STATUS.pack(status)], [ours.fileno()] if child else [])
    _ended(child)


def _ended(child: int) -> int:
    if not child:
        return 0
    os.kill(child, signal.SIGKILL)  # of one that has ended this changes nothing
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run(channel: int, limits: Mapping[str, Any]) -> NoReturn:
    """Be a runner: run a program, or do calls of its functions, and end this process.

    Of a program `before`, `program` and `entry` are told, as `execute` takes them, and `input`, if it is run
    as a script with this standard input, and no functions of it are called.
    """
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.dup2(channel, _CHANNEL)
        os.closerange(_CHANNEL + 1, _MOST_FILES)
        calls = open(_CHANNEL, "rb")  # noqa: SIM115 - until this process ends
        told = json.loads(calls.read(_LENGTH.unpack(calls.read(_LENGTH.size))[0]))
        if "input" in told:
            _become_script(told["input"])
        limit_this_process(**limits["runner"], open_files=OPEN_FILES)
        if limits["sandbox"]:
            give_up_rights()
            refuse_other_calls(filter_program())
        module = sys.modules["__main__"] = ModuleType("__main__")
        code: Any = None
        try:
            execute(told["before"], told["program"], told["entry"], module.__dict__)
            if "input" not in told:
                _answer(calls, module.__dict__)
        except SystemExit as error:
            code = error.code
        if "input" in told:
            _end_script(module.__dict__)
        status = code if isinstance(code, int) else int(code is not None)
    finally:
        os._exit(status & 255)


def _become_script(given: str) -> None:
    """Make a text the standard input and the channel the standard output."""
    held = os.memfd_create("input")
    with open(held, "wb", closefd=False) as written:
        written.write(given.encode())
    os.lseek(held, 0, os.SEEK_SET)
    os.dup2(held, 0)
    os.dup2(_CHANNEL, 1)
    os.close(held)  # the channel stays open: the output ends when the program does, not what it closes
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.__stdout__ = sys.stdout  # type: ignore[misc]


def _end_script(names: dict[str, Any]) -> None:
    """Write what is left to be written, as an interpreter does at its end."""
    atexit._run_exitfuncs()
    names.clear()
    gc.collect()  # which closes files that are open
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(ValueError, AttributeError):  # it is closed, or none
            stream.flush()  # type: ignore[union-attr]


def joined(before: str, program: str, entry: str) -> tuple[str, str]:
    """Return code that a program uses, and the program, behind that if it does not define the entry."""
    defines = rf"^(?:def|class)\s+{re.escape(entry)}\b|^{re.escape(entry)}\s*="
    goes_on = entry and not re.search(defines, program, re.MULTILINE)
    return ("", before + program) if goes_on else (before, program)


def compiled_part(code: str) -> CodeType:
    """Return the lines up to the last with which they are Python: not the head of a function."""
    lines = code.splitlines(keepends=True)
    while True:
        try:
            return compile("".join(lines), "<before>", "exec")
        except (SyntaxError, ValueError):
            del lines[-1]


def execute(before: str, program: str, entry: str, names: dict[str, Any]) -> None:
    """Run a program behind code that it uses or, if it does not define the entry itself, goes on with."""
    before, program = joined(before, program, entry)
    exec(compiled_part(before), names)
    exec(compile(program, "<program>", "exec"), names)


def _answer(calls: BinaryIO, names: dict[str, Any]) -> None:
    """Do calls until there are no more."""
    kept: list[Any] = []

    def keep(make: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> int:
        kept.append(make(*arguments, **keywords))
        return len(kept) - 1

    names |= {KEEP: keep, KEPT: kept}
    for line in calls:
        asked = json.loads(line)
        try:
            function = eval(asked["call"], names)
            keywords = decode(asked["keywords"], names)
            found = {"value": encode(function(*decode(asked["arguments"], names), **keywords))}
            said = json.dumps(found)
        except Exception as error:  # noqa: BLE001 - the program's own
            said = json.dumps({"raised": [str(type(error).__name__), str(error)[:MESSAGE_CHARS]]})
        left = said.encode() + b"\n"
        while left:
            left = left[os.write(_CHANNEL, left) :]


if __name__ == "__main__":
    main()
