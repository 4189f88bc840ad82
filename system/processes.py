"""Process: what every long-running process of Antiphon does alike, and how others are started and stopped.

A service dies with the process that started it, says when it is ready, ends in order when asked to,
and writes its log to standard error. A child is the leader of its own process group, has its
output in a file, and is asked to stop before it is killed.
"""

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from antiphon.core.errors import COMPLAINT, UnavailableError
from antiphon.system.clock import wall_clock
from antiphon.system.files import write_atomically
from antiphon.system.logs import configure_logs

SAME_ORDER = {"PYTHONHASHSEED": "0"}
"""Variables with which all services iterate over a set in the same order: some tasks draw from one, and have
the same problems in every run of a seed. It may be known: the hash of texts is SipHash, of 64 bits, for which
nobody can write many texts of one value, and dictionaries probe by all of its bits."""
PARENT_VARIABLE = "ANTIPHON_PARENT_PID"
"""Names the process whose death ends this one; unset for services that people start."""
POLL_S = 0.05
"""Pause between two looks at a process that starts or stops."""
KILL_S = 10.0
"""Longest wait for the kernel to take a killed process away."""
SETTLED_S = 60.0
"""Age from which a folder for temporary files has been locked by the process that made it."""
LEFT_GROUP = 75
"""Status of a process that ended since another of its group did: that one says why."""
TAIL_LINES = 12
"""Last lines of a log that an error message quotes."""

_PR_SET_PDEATHSIG = 1
_LAST = 5


def tie_to_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when the one named in ANTIPHON_PARENT_PID dies.

    The tie is to the parent's thread that started this process, so that thread must live as
    long as the parent. Killing is safe: whatever counts is in the journal before it is said.
    """
    named = os.environ.get(PARENT_VARIABLE, "")
    if not named:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if str(os.getppid()) != named:  # it died before the tie was made
        os.kill(os.getpid(), number)


def tied_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that makes a program die with its parent which does not know `tie_to_parent`."""
    return [sys.executable, "-P", "-m", "antiphon.system.processes", *arguments]


class ChildProcess(subprocess.Popen[bytes]):
    """A process that leads its own group, so that it is stopped with everything that it started."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        outlive: bool = False,
        folder: Path | None = None,
    ) -> None:
        """Start it.

        Args:
            arguments: the program and its arguments.
            log: file that its output is appended to.
            environment: its variables; by default those of this process.
            outlive: keep it when this process ends; otherwise a service, or a program within
                `tied_command`, dies with the thread that called this.
            folder: its working directory; by default that of this process.
        """
        variables = dict(os.environ if environment is None else environment)
        variables.pop(PARENT_VARIABLE, None)
        variables |= SAME_ORDER
        if not outlive:
            variables[PARENT_VARIABLE] = str(os.getpid())
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()
            super().__init__(
                arguments,
                env=variables,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def come_last(self) -> None:
        """Let processes of other groups that start have the cores first; what this one asks for still comes.

        Niceness counts between groups where the kernel schedules them as such, else between processes.
        """
        niceness = max(_LAST, os.getpriority(os.PRIO_PROCESS, self.pid))  # nobody may lower it
        os.setpriority(os.PRIO_PROCESS, self.pid, niceness)
        with contextlib.suppress(OSError):  # a kernel without such groups
            Path(f"/proc/{self.pid}/autogroup").write_text(str(niceness))

    def alive(self) -> bool:
        return self.poll() is None

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs; what it started ends with it."""
        ended_before = self.returncode is not None
        status = super().poll()
        if status is not None and not ended_before:
            _signal_group(self, signal.SIGKILL)  # later its id may be another process's
        return status

    def how_it_ended(self) -> str:
        """Return its exit status and the last lines of its log."""
        return f"{ending(self.returncode)}: {quote(self.lines())}"

    def lines(self) -> list[str]:
        """Return the lines of the log that this process wrote, without empty ones."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]

    def last_words(self) -> str:
        """Return the last sentence that our command complained with, else the last lines of its log."""
        lines = self.lines()
        complaints = [line for line in lines if line.startswith(COMPLAINT)]
        return complaints[-1].removeprefix(COMPLAINT) if complaints else quote(lines)

    def stop(self, grace_s: float) -> None:
        """Stop it and everything it started, as `stop_groups`."""
        stop_groups([self], grace_s)
        self.wait(KILL_S)


class ChildGroup(ChildProcess):
    """Processes that stand and fall together, such as the ranks of a learner; the first speaks for them.

    They end with it, and it ends with any of them that fails, since the others wait for that one.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, environments: Sequence[Mapping[str, str]]
    ) -> None:
        """Start one process for each of the environments; all but the first have logs with a number."""
        self._failed: ChildProcess | None = None
        self._others: list[ChildProcess] = []
        super().__init__(arguments, log, environments[0])
        self._others = [
            ChildProcess(arguments, log.with_stem(f"{log.stem}-{number}"), environment)
            for number, environment in enumerate(environments[1:], 1)
        ]

    def poll(self) -> int | None:
        """Return the status of the first that failed, or of the first process once it ended in order."""
        if self._failed is None:
            super().poll()
            # One that ended in order does no harm. Who left because of another is blamed last.
            failed = [one for one in self.processes if ChildProcess.poll(one)]
            if self.returncode is None and not failed:
                return None
            self._failed = min(failed, key=lambda one: one.returncode == LEFT_GROUP, default=self)
            self._end()
        return self._failed.returncode

    @property
    def processes(self) -> list[ChildProcess]:
        """Return all of them, the first one first."""
        return [self, *self._others]

    def wait(self, timeout: float | None = None) -> int:
        status = super().wait(timeout)
        self._end()
        return status

    def _end(self) -> None:
        for one in self.processes:
            if ChildProcess.poll(one) is None:
                _signal_group(one, signal.SIGKILL)
                subprocess.Popen.wait(one, KILL_S)

    def last_words(self) -> str:
        return ChildProcess.last_words(self._failed or self)


def output_of(module: str, *arguments: str, given: str = "", timeout_s: float) -> tuple[bool, str]:
    """Run a module of ours in a process of its own; return whether it did, and its output or last words."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s:g} s"
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    return (True, done.stdout) if done.returncode == 0 else (False, lines[-1][:300])


def quote(lines: Sequence[str]) -> str:
    """Return the last lines of a log for an error message, the loader's warnings left out."""
    told = [line.strip() for line in lines if not line.startswith("ERROR: ld.so: ")]
    return " | ".join(told[-TAIL_LINES:]) or "it wrote nothing"


def ending(status: int) -> str:
    """Say how a process ended.

    >>> ending(1), ending(-15), ending(-9)
    ('ended with status 1', 'was ended by SIGTERM', 'was ended by SIGKILL (is there enough memory?)')
    """
    if status >= 0:
        return f"ended with status {status}"
    name = {known.value: known.name for known in signal.Signals}.get(-status, f"signal {-status}")
    return f"was ended by {name}{' (is there enough memory?)' if -status == signal.SIGKILL else ''}"


class GroupLeader(Protocol):
    """A process that leads its own group, started by this process or by an earlier one."""

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""

    def alive(self) -> bool:
        """Return whether it still runs."""

    def how_it_ended(self) -> str:
        """Return how it ended, for an error message."""


_Leader = TypeVar("_Leader", bound=GroupLeader)


def stop_groups(leaders: Sequence[_Leader], grace_s: float) -> list[_Leader]:
    """Stop process groups: SIGTERM, up to `grace_s` seconds for all their leaders, SIGKILL to what is left.

    Leaders that had ended before are left alone: their ids may be those of other processes by now.

    Returns:
        The leaders that had to be killed.
    """
    living = [leader for leader in leaders if leader.alive()]
    for leader in living:
        _signal_group(leader, signal.SIGTERM)
    deadline = time.perf_counter() + grace_s
    while any(leader.alive() for leader in living) and time.perf_counter() < deadline:
        time.sleep(POLL_S)
    killed = [leader for leader in living if leader.alive()]
    for leader in living:
        _signal_group(leader, signal.SIGKILL)
    return killed


def kill_groups(leaders: Sequence[GroupLeader]) -> None:
    """Kill the process groups of all leaders that have not ended, and wait for nothing."""
    for leader in leaders:
        if leader.alive():
            _signal_group(leader, signal.SIGKILL)


def _signal_group(leader: GroupLeader, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # none of the group is left
        os.killpg(leader.pid, number)


def wait_ready(
    leader: GroupLeader,
    name: str,
    log: Path,
    answers: Callable[[], bool],
    timeout_s: float,
    tell: Callable[[float], None] = lambda waited_s: None,
) -> None:
    """Wait until a server that was started answers.

    Args:
        leader: the server's process.
        name: what the errors call it.
        log: file with its output.
        answers: returns whether it answers.
        timeout_s: longest wait, seconds.
        tell: called again and again with the seconds waited so far.

    Raises:
        UnavailableError: when it ended, or did not answer in time; nothing of it is left then.
    """
    started = time.perf_counter()
    while not answers():
        waited_s = time.perf_counter() - started
        if not leader.alive():
            raise UnavailableError(f"{name} {leader.how_it_ended()}; see {log}")
        if waited_s > timeout_s:
            stop_groups([leader], KILL_S)
            raise UnavailableError(f"{name} did not answer within {timeout_s:g} s; see {log}")
        tell(waited_s)
        time.sleep(POLL_S)


def write_ready_file(path: Path | None, port: int) -> None:
    """Say that the service can work: JSON {pid, port}, whole or not at all."""
    if path is None:
        return
    write_atomically(path, json.dumps({"pid": os.getpid(), "port": port}).encode())


def starting_file(ready_file: Path) -> Path:
    """Return where a service that is not ready yet says how far it is."""
    return ready_file.with_suffix(".starting")


def write_starting_file(ready_file: Path | None, doing: str, counter: int) -> None:
    """Say what a service does until it is ready, and a number that grows with it: JSON {doing, counter}."""
    if ready_file is not None:
        write_atomically(starting_file(ready_file), json.dumps({"doing": doing, "counter": counter}).encode())


class StopRequest:
    """Tells a service that it is asked to stop; the process's signals are handled nowhere else."""

    def __init__(self) -> None:
        self._told: list[Callable[[], None]] = []

    def tell(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the event loop each time the process is asked to stop."""
        self._told.append(callback)

    def ask(self) -> bool:
        """Ask the service to stop; False when it gave nothing to call yet."""
        for callback in self._told:
            callback()
        return bool(self._told)


def keep_temporary_files() -> None:
    """Let the temporary files of this process, those of libraries too, lie in a folder that ends with it.

    What killed processes of this user left is removed: such folders, which nobody locks any more, and what
    OpenMP keeps in shared memory under the number of its process.
    """
    shared = tempfile.gettempdir()
    own = f"antiphon-{os.getuid()}-"
    for left in Path(shared).glob(f"{own}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or removed by another process just now
            # Others may have put a pipe there, whose opening waits, or a link.
            held = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if wall_clock() - left.stat().st_mtime > SETTLED_S:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left)
            finally:
                os.close(held)
    for mark in Path("/dev/shm").glob("__KMP_REGISTERED_LIB_*"):
        found = re.fullmatch(rf"__KMP_REGISTERED_LIB_(\d+)_{os.getuid()}", mark.name)
        if found and not Path("/proc", found[1]).exists():
            with contextlib.suppress(OSError):  # it bears this user's number, and may be another's
                mark.unlink()
    # What is compiled is for the next process too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_{os.getuid()}")
    folder = tempfile.mkdtemp(prefix=own)
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)  # until this process ends
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for many messages, each of which costs less CPU than with Python's own."""
    import uvloop  # a command that only looks needs none

    return uvloop.new_event_loop()


def run_service(start: Callable[[StopRequest], Coroutine[Any, Any, None]], tied: bool = True) -> int:
    """Run a service until it ends by itself or SIGTERM, SIGHUP or SIGINT asks it to.

    Args:
        start: begins the service; one that does not use the `StopRequest` is cancelled instead.
        tied: whether it ends with the process that started it; a shell's may go on.

    Returns:
        The exit code: 0 when it ended by itself, on SIGTERM or SIGHUP, 130 on SIGINT.
    """
    if tied:
        tie_to_parent()
    configure_logs()
    keep_temporary_files()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_until_signalled(start))


async def _until_signalled(start: Callable[[StopRequest], Coroutine[Any, Any, None]]) -> int:
    loop = asyncio.get_running_loop()
    stop = StopRequest()
    task = asyncio.ensure_future(start(stop))
    received: list[signal.Signals] = []

    def leave(number: signal.Signals) -> None:
        received.append(number)
        if not stop.ask():
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(number, leave, number)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return 130 if received and received[0] == signal.SIGINT else 0


if __name__ == "__main__":
    tie_to_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
