"""Reward: the contract. The service pulls its work, so all it answers is how it is."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RewardStatus:
    """The reward service at a glance."""

    groups_rewarded: int
    trajectories_rewarded: int
    reward_s: float
    """Seconds spent rewarding."""
    state: str
    """idle, rewarding or stopped."""


class Reward(Protocol):
    """Judges finished trajectories with the environment."""

    async def status(self) -> RewardStatus:
        """Return the service at a glance."""
        ...
