"""Registry: an environment by its name, built from its parameters.

A name is `<family>/<task>`. Every process of a run builds the same environment from the same
five values, so a prompt key means the same problem on each of them.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.environments.environment import Environment
from antiphon.environments.reasoning import prompts as reasoning


def environment_names() -> list[str]:
    """Return the name of every environment that `make_environment` can build, sorted."""
    return [f"{reasoning.FAMILY}/{task}" for task in reasoning.task_names()]


def make_environment(
    name: str, parameters: Mapping[str, Any], seed: int, train_size: int, heldout_size: int
) -> Environment:
    """Build the environment `name`.

    Args:
        name: `<family>/<task>`, one of `environment_names()`.
        parameters: the task's own parameters; what is left out takes the task's default.
        seed: names the problems; another seed gives other problems of the same kind.
        train_size: problems of the split "train".
        heldout_size: problems of the split "heldout"; none of them occurs in any train split.

    Raises:
        ConfigError: for an unknown name (the closest ones are listed), a parameter the task does
            not take or cannot take, or a size that is not positive.
    """
    names = environment_names()
    if name not in names:
        bare = [f"{reasoning.FAMILY}/{name}"] if f"{reasoning.FAMILY}/{name}" in names else []
        close = bare or difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"names look like {names[0]}"
        raise ConfigError(f"environment.name={name!r} is unknown; {hint} (`antiphon environments` lists all)")
    return reasoning.ReasoningEnvironment(
        name.partition("/")[2], parameters, seed=seed, train_size=train_size, heldout_size=heldout_size
    )
