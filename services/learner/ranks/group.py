"""Group: the ranks of one learner, and what rank 0 orders."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from antiphon.core.config import RunConfig
from antiphon.services.ranks import group
from antiphon.services.ranks.group import message_of, open_group
from antiphon.system import failpoints
from antiphon.system.rank_places import check_place


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
    CALL = 7
    """Do a client's call, whose bytes follow."""
    DROP = 8
    """Forget the calls that are held."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order as it arrives."""

    order: Order
    number: int
    """The step of TRAIN, the version of START, SAVE and SCORE."""
    digest: str
    """Of the batch or call; zeros for other orders."""


class Ranks(group.Ranks):
    """The place of this process among the ranks; by default it is alone, and nothing is sent."""

    def order(self, order: Order, number: int = 0, digest: str = "0" * 64) -> None:
        """Have the other ranks do what rank 0 does next; on these it does nothing."""
        if self.world > 1 and self.rank == 0 and not self._lost:
            words = np.frombuffer(bytes.fromhex(digest), np.int64)
            with self.running():
                self.broadcast(message_of(order, number, *map(int, words)))

    def ordered(self) -> Ordered:
        """Wait for the next order of rank 0."""
        failpoints.reach("learner.idle")
        with self.running():
            message = self.broadcast(message_of())
        order = Order(int(message[0]))
        return Ordered(order, int(message[1]), message[2:6].numpy().tobytes().hex())

    def share(self, own: bytes = b"") -> bytes:
        """Return the bytes of rank 0, at least one, on all ranks; each rank calls it."""
        if self.world == 1:
            return own
        length = int(self.broadcast(message_of(len(own)))[0])
        data = bytearray(own if self.rank == 0 else length)
        self.broadcast(torch.frombuffer(data, dtype=torch.uint8))  # into the same memory
        return bytes(data)

    def close(self) -> None:
        """Leave the group, after STOP; no engine may be left, and each rank calls it."""
        global _joined
        _joined = None
        super().close()


broken: Callable[[str], str] | None = None
"""Given to the ranks that `join` makes, as their `broken`."""
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
        open_group(rank, world, "learner.ranks", config.services.start_timeout_s, arrived)
        ranks = Ranks(rank, world, broken)
        ranks.meet()
        _joined = ranks
    return _joined
