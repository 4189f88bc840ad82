"""Hosted environment: others' programs make the prompts, answer the turns and give the rewards.

A problem is no more than its key here: which one it is, the host finds out by split, index and seed. Each
sample gets its prompt with the first answer, so the seats of an episode may have different ones.
"""

from collections.abc import Sequence

from antiphon.core.config_sections import EnvironmentSection
from antiphon.core.errors import ContractError
from antiphon.core.messages import RewardRange, Tool
from antiphon.environments.conversation import Conversation
from antiphon.environments.environment import Problem, SplitEnvironment, key_of, reward_range_of


class HostEnvironment(SplitEnvironment):
    """An environment whose conversations are held elsewhere."""

    only_compares = True
    tools: Sequence[Tool] = ()

    def __init__(self, section: EnvironmentSection) -> None:
        """Take what the configuration says of it.

        Raises:
            ConfigError: when `environment.reward_range` is none.
        """
        super().__init__(section.seed, section.train_size, section.heldout_size)
        self.name = section.name
        self.rebuildable, self.seats = section.rebuildable, section.seats
        self.reward_range: RewardRange = section.reward_range
        reward_range_of(self)

    def make(self, split: str, index: int) -> Problem:
        return Problem(key_of(split, self.seed, index), "", "")

    def conversation(self) -> Conversation:
        raise ContractError("the conversations of environment.name=host are held by hosts, not in this run")
