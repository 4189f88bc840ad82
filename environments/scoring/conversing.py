"""Conversations of a scoring process: each in a fork of its own, which lives as long as the conversation.

What one does harms only itself: a fork has its own limits of memory, sees no other, and what is left of it
ends with it. It stands still between two answers, so that nothing goes on there that no limit of time counts.
"""

import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from antiphon.core.errors import AntiphonError, ConfigError, ContractError
from antiphon.core.messages import Ended
from antiphon.environments.conversation import Conversation, ConversationEnvironment
from antiphon.environments.environment import Problem
from antiphon.environments.scoring.messages import (
    TURN_BYTES,
    Failed,
    Lost,
    ScoringTask,
    Turn,
    attempt,
    line_of,
    parse_turn,
    reply_of,
    turn_line,
)
from antiphon.environments.scoring.tool_processes import ToolHosts
from antiphon.environments.tools import run_with, sandboxed_tools
from antiphon.system.sandbox import fork_within, give_up_rights, limit_this_process
from antiphon.system.system_calls import filter_program, refuse_other_calls

OPEN_FILES = 16
MOST_ANSWERS = 1000
"""Answers whose processor time one conversation may use in all."""
ENDING_S = 1.0
"""Longest wait for the kernel to say how a process ended that has closed its pipe."""
_MOST_FILES = 1 << 16

_R = TypeVar("_R")


def last_turn(replies: Sequence[_R], ask: Callable[[_R], Turn | Lost]) -> Turn | Lost:
    """Ask for each reply in order; return what came of the last one, or why it was not reached."""
    turn: Turn | Lost = Failed("there is no reply")
    for number, reply in enumerate(replies, start=1):
        turn = ask(reply)
        if isinstance(turn, Ended) and number < len(replies):
            return Failed(
                f"the environment ended at reply {number} of {len(replies)} when they were repeated; it must "
                "say rebuildable = False, or draw all chance from the seed"
            )
        if not isinstance(turn, tuple):
            break
    return turn


class LiveConversations:
    """The conversations that a scoring process holds, by the names of their trajectories."""

    def __init__(self, environment: ConversationEnvironment, task: ScoringTask, *, sandbox: bool) -> None:
        """Prepare.

        Raises:
            ConfigError: when a tool needs the sandbox and there is none.
        """
        self._hosted = sandboxed_tools(environment.tools)
        if self._hosted and not sandbox:
            raise ConfigError(
                f"environment.name={task.name}: its tool {self._hosted[0]} runs in the sandbox alone; set "
                "reward.sandbox=auto"
            )
        self._environment = environment
        self._task = task
        self._sandbox = sandbox
        self._live: dict[str, _Fork] = {}

    def turn(self, asked: Mapping[str, Any]) -> Turn | Lost:
        """Return what came of a request."""
        name = asked["trajectory"]
        opening: Turn | Lost = ()
        if "key" in asked:
            self.forget(name)
            opening = self._begin(name, asked["key"], asked["seed"])
        if not isinstance(opening, tuple):
            turn: Turn | Lost = opening
        elif name not in self._live:
            turn = Lost("the process of the conversation has ended", killed=True)
        else:
            turn = last_turn(asked["replies"], lambda reply: self._exchange(self._live[name], line_of(reply)))
        if not isinstance(turn, tuple):
            self.forget(name)
        return turn

    def forget(self, trajectory: str) -> None:
        """End a conversation."""
        if (fork := self._live.pop(trajectory, None)) is not None:
            os.close(fork.channel)
            os.kill(fork.pid, signal.SIGKILL)
            os.waitpid(fork.pid, 0)

    def _begin(self, name: str, key: str, seed: int) -> Turn | Lost:
        try:
            problem = self._environment.problem_by_key(key)
        except AntiphonError as error:
            return Failed(self._task.without_secrets(str(error)))
        ours, theirs = (one.detach() for one in socket.socketpair())
        try:
            child = fork_within() if self._sandbox else os.fork()
        except OSError as error:
            os.close(ours)
            os.close(theirs)
            return Failed(f"a trajectory's process could not be started: {error}", infrastructure=True)
        if child == 0:
            self._converse(problem, seed, theirs)
        os.close(theirs)
        os.set_blocking(ours, False)
        self._live[name] = _Fork(child, ours)
        return self._exchange(self._live[name], b"")

    def _exchange(self, fork: "_Fork", data: bytes) -> Turn | Lost:
        """Hand something to a conversation's process and return what it answers in time."""
        deadline_s, opening = time.monotonic() + self._task.answer_timeout_s, not data
        poll = select.poll()
        poll.register(sys.stdin, 0)  # says when the service has ended
        found = bytearray()
        if self._sandbox:
            os.kill(fork.pid, signal.SIGCONT)
        while not found.endswith(b"\n"):
            poll.register(fork.channel, select.POLLIN | (select.POLLOUT if data else 0))
            left_s = deadline_s - time.monotonic()
            ready = dict(poll.poll(1000.0 * max(0.0, left_s)))
            if sys.stdin.fileno() in ready:
                os.kill(fork.pid, signal.SIGKILL)
                raise SystemExit("the reward service has ended")
            if not ready:
                return Failed(f"the environment did not answer within {self._task.answer_timeout_s:g} s")
            try:
                if ready[fork.channel] & select.POLLOUT:
                    data = data[os.write(fork.channel, data) :]
                    continue
                read = os.read(fork.channel, 1 << 16)
            except (BrokenPipeError, ConnectionResetError):
                read = b""
            if not read:
                return self._how_it_ended(fork)
            found += read
            if len(found) > TURN_BYTES:
                return Failed("the environment answered with more than a turn may have")
        if self._sandbox:  # without, it must see that this process has ended
            os.kill(fork.pid, signal.SIGSTOP)
        try:
            return parse_turn(bytes(found), self._environment.reward_range, opening=opening)
        except ContractError:
            return Failed("the process of the conversation wrote something that is no turn")

    def _how_it_ended(self, fork: "_Fork") -> Lost:
        poll = select.poll()
        ended = os.pidfd_open(fork.pid)
        poll.register(ended, select.POLLIN)
        known = poll.poll(1000.0 * ENDING_S)
        os.close(ended)
        if not known:
            return Lost("the environment closed the pipe of its process", killed=False)
        status = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        by = "exit code" if status.si_code == os.CLD_EXITED else "signal"
        return Lost(
            f"the process of the conversation ended ({by} {status.si_status})",
            killed=by == "signal" and status.si_status == signal.SIGKILL,
        )

    def _converse(self, problem: Problem, seed: int, channel: int) -> NoReturn:
        """Hold a conversation until the channel ends, and end this process."""
        reward_range, hide = self._environment.reward_range, self._task.without_secrets
        conversations: list[Conversation] = []

        def begin() -> object:
            conversations.append(self._environment.conversation())
            return conversations[0].begin(problem, seed)

        try:
            nothing = os.open("/dev/null", os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            os.closerange(3, channel)  # the channels of other conversations
            os.closerange(channel + 1, _MOST_FILES)
            hosts = self._give_up()
            _write(channel, attempt(begin, reward_range, hide, opening=True))
            with os.fdopen(channel, "rb") as requests:
                for line in requests:
                    if hosts is not None:
                        hosts.renew()
                    answer = partial(conversations[0].answer, reply_of(json.loads(line)))
                    _write(channel, attempt(answer, reward_range, hide))
        except OSError as error:
            reason = f"a trajectory's processes could not be started: {error}"
            _write(channel, Failed(reason, infrastructure=True))
        finally:
            os._exit(1)

    def _give_up(self) -> ToolHosts | None:
        """Give up this process's rights, once the hosts of its tools are there."""
        program = filter_program()
        hosts = None
        if self._sandbox:
            hosts = ToolHosts(self._hosted, self._task)
            run_with(hosts)
            give_up_rights()
        limit_this_process(
            cpu_s=MOST_ANSWERS * math.ceil(1.0 + self._task.answer_timeout_s),
            memory_bytes=self._task.memory_bytes,
            open_files=OPEN_FILES,
        )
        if self._sandbox:
            refuse_other_calls(program)
        return hosts


@dataclass(frozen=True, slots=True)
class _Fork:
    pid: int
    channel: int


def _write(channel: int, turn: Turn) -> None:
    try:
        line = turn_line(turn)
    except (TypeError, ValueError, RecursionError):
        line = turn_line(Failed("the environment returned a message that is no plain data"))
    while line:
        line = line[os.write(channel, line) :]
