"""Poker versions: poker with models among the opponents, so that a policy plays against its earlier versions.

    ./antiphon export RUN v30 build/poker/v30
    ./antiphon run examples/poker.yaml environment.parameters.opponents=random,build/poker/v30 \\
        environment.name=antiphon.benchmarks.parts.poker_versions:AgainstVersions

The models act in the process that scores, one decision at a time, on one thread.
"""

from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from antiphon.core.errors import ConfigError
from antiphon.environments.poker.hand import Hand
from antiphon.environments.poker.opponents import OPPONENTS, Opponent
from antiphon.environments.poker.table import Poker

if TYPE_CHECKING:
    from antiphon.benchmarks.parts.poker_model import PokerModel

_ONE = Lock()


class AgainstVersions(Poker):
    """No-limit hold'em; `opponents` may also name folders of models, as `antiphon export` writes them."""

    def opponent(self, name: str) -> Opponent:
        if name in OPPONENTS:
            return OPPONENTS[name]
        if not (Path(name) / "config.json").is_file():
            raise ConfigError(
                f"environment.parameters.opponents has {name!r:.80}, which is no model's folder and none of "
                f"{', '.join(OPPONENTS)}; export a version to it"
            )
        return partial(acted, name)


def acted(folder: str, hand: Hand, random: np.random.Generator) -> str:
    """Return the action of a model; hands are played in several threads, and models are loaded in one."""
    with _ONE:
        return model_of(folder)([hand], random)[0]


@cache
def model_of(folder: str) -> "PokerModel":
    """Load a model when it is first asked: torch is nothing that a configuration's check should wait for."""
    import torch

    from antiphon.benchmarks.parts.poker_model import PokerModel

    torch.set_num_threads(1)
    return PokerModel(folder)
