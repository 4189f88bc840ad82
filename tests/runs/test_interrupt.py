"""Ctrl-C: the first says at once what is waited for, the second or a deadline ends everything."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from antiphon.benchmarks.parts.measure import DEFAULT_SIGNALS
from antiphon.core.errors import INTERRUPTED
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.runs.interrupt import SIGNALS, Interrupt

WAIT_S = 60.0
"""Longest wait for anything here."""

RUN = """
import sys, threading
from antiphon.cli.view import make_view
from antiphon.runs import interrupt as module
from antiphon.runs.interrupt import Interrupt

module.LIMIT_S = float(sys.argv[1])
with Interrupt(make_view()) as interrupt:
    stopped = threading.Event()
    killed = lambda: print("killed", flush=True)
    interrupt.tell(lambda: "worker-0 (worker-0 is starting its engine)", stopped.set, killed)
    try:
        print("ready", flush=True)
        threading.Event().wait()
    finally:
        stopped.wait()
        print("unwinding", flush=True)
        if sys.argv[2] == "slow":
            threading.Event().wait()
"""


def begin(limit_s: float, how: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [*DEFAULT_SIGNALS, sys.executable, "-P", "-c", RUN, str(limit_s), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def rest_of(process: "subprocess.Popen[str]") -> list[str]:
    said, _ = process.communicate(timeout=WAIT_S)
    return str(said).splitlines()


STOPPING = "stopping worker-0 (worker-0 is starting its engine); Ctrl-C again ends it at once"
AT_ONCE = f"antiphon: {INTERRUPTED}"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_first_says_what_is_waited_for_and_lets_everything_end_in_order(number: signal.Signals) -> None:
    process = begin(WAIT_S, "quick")
    process.send_signal(number)
    said = rest_of(process)
    assert set(said[:2]) == {STOPPING, "unwinding"} and said[2:] == ["killed", AT_ONCE]
    assert process.returncode == 128 + number


def test_a_terminal_that_is_gone_keeps_no_run_alive() -> None:
    process = begin(0.2, "slow")
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(WAIT_S) == 128 + signal.SIGHUP


@pytest.fixture
def plain_signals() -> Iterator[None]:
    """Nobody handles a signal before, as in a new process; whoever did has it again after."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("plain_signals")
def test_a_signal_that_others_took_meanwhile_is_taken_back() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt(RunDisplay(), [].append) as interrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupt.listen()
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupt.asked
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_second_ends_everything_at_once() -> None:
    process = begin(WAIT_S, "slow")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    first = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    assert first == {STOPPING, "unwinding"}
    process.send_signal(signal.SIGINT)
    assert rest_of(process) == ["killed", AT_ONCE]
    assert process.returncode == 130


@pytest.mark.usefixtures("plain_signals")
def test_a_terminal_that_closes_asks_twice_and_means_it_once() -> None:
    ended: list[int] = []
    with pytest.raises(KeyboardInterrupt), Interrupt(RunDisplay(), ended.append):
        try:
            signal.raise_signal(signal.SIGHUP)  # the kernel's
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGHUP)  # the shell's
            ended.append(0)
            signal.raise_signal(signal.SIGTERM)
    assert ended[:2] == [0, 128 + signal.SIGHUP]


def test_what_does_not_end_in_time_is_ended() -> None:
    process = begin(0.2, "slow")
    process.send_signal(signal.SIGINT)
    said = rest_of(process)
    assert set(said) == {STOPPING, "unwinding", "killed", AT_ONCE} and said[-2:] == ["killed", AT_ONCE]
    assert process.returncode == 130


def test_a_command_that_ignores_it_in_the_background_still_does() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt(RunDisplay()):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_one_nothing_is_said_or_ended() -> None:
    ended: list[int] = []

    class Heard(RunDisplay):
        def stopping(self, text: str) -> None:
            pytest.fail(text)

    with Interrupt(Heard(), ended.append) as interrupt:
        assert not interrupt.asked
    assert not ended
