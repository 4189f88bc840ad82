"""Group: the ranks of one learner or engine, and what they say to each other besides tensors.

Each process is started with RANK, LOCAL_RANK and WORLD_SIZE, and where they meet:
MASTER_ADDR and MASTER_PORT, as torchrun, DeepSpeed and Slurm do, or a file on one host, in ANTIPHON_MEETING.
Two further groups of gloo's carry control messages beside gradients or activations: one the orders of rank 0
and what ranks agree on, the other ticks. Messages are arrays of fixed shape; nothing is pickled.

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
from typing import Any, NoReturn

import numpy as np
import torch
from torch import distributed

from antiphon.core.errors import (
    COMPLAINT,
    AntiphonError,
    ConfigError,
    ContractError,
    IntegrityError,
    UnavailableError,
)
from antiphon.system.processes import LEFT_GROUP
from antiphon.system.rank_places import MEETING

TICK_S = 2.0
"""Pause between two ticks."""
LATE_S = 55.0
"""A rank that leaves a tick unanswered for so long is given up, and with it all."""
ALIVE = datetime.timedelta(days=366)
"""Ranks wait for each other, and for an order, as long as ticks come."""

_KINDS: tuple[type[AntiphonError], ...] = (IntegrityError, ConfigError, ContractError, UnavailableError)
HEADER = 8
"""Numbers of a message: [8] int64."""


class Ranks:
    """The place of this process among the ranks; by default it is alone, and nothing is sent."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        broken: Callable[[str], str] | None = None,
        whose: str = "learner",
    ) -> None:
        """Take a place.

        Args:
            rank: of this process.
            world: number of ranks.
            broken: given where rank 0 is a process that shall not end with its group: called when that is no
                more, with the reason; it ends the other ranks, so that pending calls raise, and returns what
                is to be said.
            whose: ranks these are, for what is said of them.
        """
        self.rank, self.world = rank, world
        self._broken, self._whose = broken, whose
        self.agreed: AntiphonError | None = None
        """The error that all ranks raised together last."""
        self._ending = threading.Event()
        self._losing = threading.Lock()
        self._lost = ""
        """Why the group is no more, where this process goes on without it."""

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
            all_of_them = [message_of() for _ in range(self.world)]
            distributed.all_gather(
                all_of_them, message_of(problem is not None, kind, len(text)), self._orders
            )
            first = next((rank for rank, message in enumerate(all_of_them) if message[0]), None)
            problem = None
            if first is not None:
                kind, length = int(all_of_them[first][1]), int(all_of_them[first][2])
                own = np.frombuffer(text, np.uint8) if first == self.rank else np.zeros(length, np.uint8)
                said = self.broadcast(torch.from_numpy(own.copy()), first)
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
        lengths = [message_of() for _ in range(self.world)]
        distributed.all_gather(lengths, message_of(len(data)), self._orders)
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
                said = f"rank {self.rank} of the {self._whose}: {' '.join(str(error).split())[:300]}"
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
        if self.world > 1:
            self.rest()
            distributed.destroy_process_group()

    def rest(self) -> None:
        """Tick no more: ranks may end from now on; each rank calls it."""
        self._ending.set()
        self._ticking.join(LATE_S)

    def abandon(self) -> None:
        """Let the end of other ranks be no matter from now on: this one failed, and says why."""
        self._ending.set()

    def broadcast(self, message: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return the message of `source`, in place of this rank's of the same shape; each rank calls it."""
        distributed.broadcast(message, source, self._orders)
        return message

    def _tick(self) -> None:
        """Ask each rank whether it is there, as rank 0, or answer; end this process when nobody does."""
        peer, last = 0, False
        try:
            while not last:
                last = self.rank == 0 and self._ending.wait(TICK_S)
                message = message_of(last)
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
                said = f"rank {peer} of the {self._whose} {how}"
                if not self._survives(said):
                    leave(said)

    def _survives(self, reason: str) -> bool:
        """Return whether this process goes on without its group; the others are ended then."""
        with self._losing:
            if self._broken is not None and not self._lost:
                self._lost = self._broken(reason)
            return self._broken is not None


def message_of(*numbers: int) -> torch.Tensor:
    """Return a message of at most `HEADER` numbers."""
    return torch.tensor([*map(int, numbers), *[0] * (HEADER - len(numbers))], dtype=torch.int64)


def leave(reason: str, status: int = LEFT_GROUP) -> NoReturn:
    """End this process at once: it may be inside a collective call that no one can call back."""
    print(f"{COMPLAINT}{reason}", file=sys.stderr, flush=True)
    os._exit(status)


def open_group(
    rank: int, world: int, setting: str, patience_s: float, arrived: Callable[[], None] = lambda: None
) -> None:
    """Open the group of the process that gradients or activations go through, with nccl where there are GPUs.

    Args:
        rank: of this process.
        world: number of ranks.
        setting: of the configuration that asks for them, for what is said.
        patience_s: longest wait of rank 0, which comes last, seconds.
        arrived: called just before.

    Raises:
        ConfigError: when there are fewer GPUs here than ranks.
    """
    if meeting := os.environ.get(MEETING):
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
        # One host needs no host name that resolves; several would not find each other on its loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= devices:
            raise ConfigError(
                f"{setting}={world} needs a GPU for each rank of a host, but there are {devices} here; "
                f"lower {setting}"
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
        # Rank 0 comes last, when it knows what to begin with, and waits for nobody for ever.
        timeout=ALIVE if rank else datetime.timedelta(seconds=patience_s),
    )
