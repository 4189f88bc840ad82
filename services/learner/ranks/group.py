"""Group: the ranks of one learner, and what they say to each other besides gradients.

Each process is started with RANK, LOCAL_RANK and WORLD_SIZE, and where they meet:
MASTER_ADDR and MASTER_PORT, as torchrun, DeepSpeed and Slurm do, or a file on one host, in ANTIPHON_MEETING.
Two further groups of gloo's carry control messages beside the gradients: one the orders of rank 0 and what
ranks agree on, the other ticks. Messages are arrays of fixed shape; nothing is pickled.

A rank that ends, or answers no tick, ends all: collective calls of the others would wait for it. It is named,
and the supervisor or the launcher starts all of them again. Rank 0 stays where `broken` is set.
"""

import contextlib
import datetime
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
import torch
from torch import distributed

from antiphon.core.config import RunConfig
from antiphon.core.errors import (
    COMPLAINT,
    AntiphonError,
    ConfigError,
    ContractError,
    IntegrityError,
    UnavailableError,
)
from antiphon.system import failpoints
from antiphon.system.processes import LEFT_GROUP
from antiphon.system.rank_places import MEETING, check_place

TICK_S = 2.0
"""Pause between two ticks."""
LATE_S = 55.0
"""A rank that leaves a tick unanswered for so long is given up, and with it all."""
ALIVE = datetime.timedelta(days=366)
"""Ranks wait for each other, and for an order, as long as ticks come."""

_KINDS: tuple[type[AntiphonError], ...] = (IntegrityError, ConfigError, ContractError, UnavailableError)
_HEADER = 8
"""Numbers of a message: [8] int64."""


class Order(IntEnum):
    """What rank 0 has all ranks do."""

    START = 1
    """Make the engine and load the checkpoint of a version, or begin with the base weights."""
    TRAIN = 2
    READ = 3
    """Gather the weights, tensor by tensor."""
    SAVE = 4
    STOP = 5
    SCORE = 6
    """Compute the log-probabilities of rows that nothing is learned from."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order as it arrives."""

    order: Order
    number: int
    """The step of TRAIN, the version of START, SAVE and SCORE."""
    digest: str
    """Of the batch; zeros for other orders."""


class Ranks:
    """The place of this process among the ranks; by default it is alone, and nothing is sent."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        self.agreed: AntiphonError | None = None
        """The error that all ranks raised together last."""
        self._ending = threading.Event()
        self._losing = threading.Lock()
        self._lost = ""
        """Why the group is no more, where this process goes on without it."""

    def order(self, order: Order, number: int = 0, digest: str = "0" * 64) -> None:
        """Have the other ranks do what rank 0 does next; on these it does nothing."""
        if self.world > 1 and self.rank == 0 and not self._lost:
            words = np.frombuffer(bytes.fromhex(digest), np.int64)
            with self.running():
                self._broadcast(_message(order, number, *map(int, words)), 0)

    def ordered(self) -> Ordered:
        """Wait for the next order of rank 0."""
        failpoints.reach("learner.idle")
        with self.running():
            message = self._broadcast(_message(), 0)
        order = Order(int(message[0]))
        return Ordered(order, int(message[1]), message[2:6].numpy().tobytes().hex())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all ranks what any of them raises inside; nothing collective may be in it.

        Raises:
            AntiphonError: that of the first rank which raised one.
        """
        problem: AntiphonError | None = None
        try:
            yield
        except AntiphonError as error:
            problem = error
        self.agree(problem)

    def agree(self, problem: AntiphonError | None) -> None:
        """Raise the same error on every rank when any has one; each rank calls it.

        Raises:
            AntiphonError: that of the first rank that has one.
        """
        if self.world > 1:
            text = str(problem).encode() if problem else b""
            kind = next((place for place, one in enumerate(_KINDS) if isinstance(problem, one)), 0)
            all_of_them = [_message() for _ in range(self.world)]
            distributed.all_gather(all_of_them, _message(problem is not None, kind, len(text)), self._orders)
            first = next((rank for rank, message in enumerate(all_of_them) if message[0]), None)
            problem = None
            if first is not None:
                kind, length = int(all_of_them[first][1]), int(all_of_them[first][2])
                own = np.frombuffer(text, np.uint8) if first == self.rank else np.zeros(length, np.uint8)
                said = self._broadcast(torch.from_numpy(own.copy()), first)
                problem = _KINDS[kind](said.numpy().tobytes().decode())
        self.agreed = problem
        if problem is not None:
            raise problem

    def collect(self, own: np.ndarray[Any, Any], lengths: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """Return the arrays of all ranks, on rank 0; each rank calls it, and others get nothing.

        Args:
            own: [lengths[rank]], of one type on all ranks.
            lengths: of each rank's array.
        """
        if self.rank:
            if own.size:
                distributed.send(torch.from_numpy(own), 0, self._orders)
            return []
        found = [own]
        for rank in range(1, self.world):
            theirs = np.empty(lengths[rank], own.dtype)
            if theirs.size:
                distributed.recv(torch.from_numpy(theirs), rank, self._orders)
            found.append(theirs)
        return found

    def texts(self, own: str) -> list[str]:
        """Return the texts of all ranks, on rank 0; each rank calls it, and others get nothing."""
        if self.world == 1:
            return [own]
        data = np.frombuffer(own.encode(), np.uint8).copy()
        lengths = [_message() for _ in range(self.world)]
        distributed.all_gather(lengths, _message(len(data)), self._orders)
        return [part.tobytes().decode() for part in self.collect(data, [int(one[0]) for one in lengths])]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """End this process when what is inside, which is collective, raises what ranks did not agree on.

        Raises:
            UnavailableError: instead, with what ended the group, where `broken` is set.
        """
        try:
            yield
        except BaseException as error:
            # A ConfigError names an operation that all ranks refuse alike.
            if self.world > 1 and error is not self.agreed and not isinstance(error, ConfigError):
                said = f"rank {self.rank} of the learner: {' '.join(str(error).split())[:300]}"
                if self._survives(said):
                    raise UnavailableError(self._lost) from error
                traceback.print_exc()
                leave(said, LEFT_GROUP if "gloo" in said or "NCCL" in said else 1)
            raise

    def meet(self) -> None:
        """Make the groups of control messages and begin to tick; called once, by every rank."""
        self._orders = distributed.new_group(backend="gloo", timeout=ALIVE)
        # Rank 0 sees all of them and names the one that is late, before another one takes rank 0 for late.
        late = datetime.timedelta(seconds=LATE_S + (TICK_S if self.rank == 0 else 10 * TICK_S))
        self._ticks = distributed.new_group(backend="gloo", timeout=late)
        distributed.barrier(self._orders)
        self._ticking = threading.Thread(target=self._tick, name="ticks", daemon=True)
        self._ticking.start()

    def close(self) -> None:
        """Leave the group, after STOP; no engine may be left, and each rank calls it."""
        global _joined
        if self.world > 1:
            self._ending.set()
            self._ticking.join(LATE_S)
            _joined = None
            distributed.destroy_process_group()

    def _broadcast(self, message: torch.Tensor, source: int) -> torch.Tensor:
        distributed.broadcast(message, source, self._orders)
        return message

    def _tick(self) -> None:
        """Ask each rank whether it is there, as rank 0, or answer; end this process when nobody does."""
        peer, last = 0, False
        try:
            while not last:
                last = self.rank == 0 and self._ending.wait(TICK_S)
                message = _message(last)
                peers = range(1, self.world) if self.rank == 0 else (0,)
                if self.rank == 0:
                    for peer in peers:
                        distributed.send(message, peer, self._ticks)
                for peer in peers:
                    distributed.recv(message, peer, self._ticks)
                if self.rank:
                    distributed.send(message, 0, self._ticks)
                    last = bool(message[0])
        except RuntimeError as error:
            if not self._ending.is_set():
                late = "timed out" in str(error).lower()
                how = f"has not answered for {LATE_S:g} s" if late else "has left"
                said = f"rank {peer} of the learner {how}"
                if not self._survives(said):
                    leave(said)

    def _survives(self, reason: str) -> bool:
        """Return whether this process goes on without its group; the others are ended then."""
        with self._losing:
            if broken is not None and not self._lost:
                self._lost = broken(reason)
            return broken is not None


def _message(*numbers: int) -> torch.Tensor:
    return torch.tensor([*map(int, numbers), *[0] * (_HEADER - len(numbers))], dtype=torch.int64)


def leave(reason: str, status: int = LEFT_GROUP) -> NoReturn:
    """End this process at once: it may be inside a collective call that no one can call back."""
    print(f"{COMPLAINT}{reason}", file=sys.stderr, flush=True)
    os._exit(status)


broken: Callable[[str], str] | None = None
"""Set where rank 0 is a process that shall not end with its group: called when that is no more, with the
reason; it ends the other ranks, so that pending calls raise, and returns what is to be said."""
ALONE = Ranks()
_joined: Ranks | None = None


def join(config: RunConfig, arrived: Callable[[], None] = lambda: None) -> Ranks:
    """Meet the other ranks of a configuration, once; on one rank there is no one to meet.

    `arrived` is called just before.

    Raises:
        ConfigError: when the process was not started as one of `learner.ranks`.
    """
    global _joined
    world = config.learner.ranks
    if world == 1:
        return ALONE
    if _joined is None:
        rank = check_place(config)
        if meeting := os.environ.get(MEETING):
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
            # One host needs no host name that resolves; several would not find each other on its loopback.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if torch.cuda.is_available():
            local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if local >= devices:
                raise ConfigError(
                    f"learner.ranks={world} needs a GPU for each rank of a host, but there are {devices} "
                    "here; lower learner.ranks"
                )
            torch.cuda.set_device(local)
        if distributed.is_initialized():
            distributed.destroy_process_group()  # of an engine that was alone
        arrived()
        distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{meeting}" if meeting else "env://",
            rank=rank,
            world_size=world,
            # Rank 0 comes last, when it knows the version to begin with, and waits for nobody for ever.
            timeout=ALIVE if rank else datetime.timedelta(seconds=config.services.start_timeout_s),
        )
        ranks = Ranks(rank, world)
        ranks.meet()
        _joined = ranks
    return _joined
