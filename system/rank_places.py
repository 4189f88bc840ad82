"""Rank places: the variables that tell a process which of the ranks it is, and where they meet.

RANK, LOCAL_RANK and WORLD_SIZE, with MASTER_ADDR and MASTER_PORT as torchrun, DeepSpeed and Slurm give them,
or with a file in place of these two for the ranks of one host, which needs no port.
"""

import os
from pathlib import Path

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError

MEETING = "ANTIPHON_MEETING"
"""Names the file in which the ranks of one host meet; each start has a fresh one."""


def rank_environment(rank: int, world: int, meeting: Path) -> dict[str, str]:
    """Return the variables of one of the `world` ranks that meet in a file, which must not exist yet."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, MEETING: meeting}
    return {name: str(value) for name, value in place.items()}


def check_place(config: RunConfig) -> int:
    """Return the rank that this process was started as.

    Raises:
        ConfigError: when the environment does not say, or says something else than `learner.ranks`.
    """
    world, rank, given = config.learner.ranks, os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if world == 1:
        return 0
    names = ["RANK", "WORLD_SIZE"] + ([] if os.environ.get(MEETING) else ["MASTER_ADDR", "MASTER_PORT"])
    if lacking := [name for name in names if not os.environ.get(name)]:
        raise ConfigError(
            f"learner.ranks={world} needs a process for each rank, and {lacking[0]} is not set; start the "
            "run with `antiphon run`, or the learner's processes with torchrun"
        )
    if given != str(world) or not rank.isdigit() or int(rank) >= world:
        raise ConfigError(
            f"learner.ranks={world}, but this is process {rank} of {given} that were started; start as many "
            "as learner.ranks says"
        )
    return int(rank)
