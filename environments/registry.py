"""Registry: an environment by its name, built from its parameters.

`reasoning/<task>` is one of ours, `package.module:Class` a class of any other package, and a plain name one
that an installed package gives as an entry point. Every process of a run builds the same environment from the
same five values, so a prompt key means the same problem on each of them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from antiphon.core.config_sections import EnvironmentSection
from antiphon.core.errors import ConfigError
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.environments.environment import Environment
from antiphon.environments.outside import OutsideEnvironment, installed_names
from antiphon.system.packages import find_package, reference_of


@dataclass(frozen=True, slots=True)
class Description:
    """What can be said of an environment before it is trained on."""

    name: str
    about: str
    """One sentence of its author; empty where there is none."""
    parameters: dict[str, Any]
    """What `environment.parameters` may set, with the defaults."""
    prompt: str
    """A training prompt under the default parameters."""
    answer: str
    """A right answer to it."""
    package: str = ""
    """Where it comes from, such as `dice 0.1`; empty for those that come with Antiphon."""
    reward_range: RewardRange = UNIT_RANGE


def environment_names() -> list[str]:
    """Return the names that `make_environment` knows: ours, then those of installed packages, each sorted.

    Any `package.module:Class` can be built besides.
    """
    from antiphon.environments.reasoning import prompts as reasoning  # slow to import

    ours = [f"{reasoning.FAMILY}/{task}" for task in reasoning.task_names()]
    return ours + installed_names()


def make_environment(
    name: str, parameters: Mapping[str, Any], seed: int, train_size: int, heldout_size: int
) -> Environment:
    """Build the environment `name`.

    Args:
        name: one of `environment_names()`, or `package.module:Class`.
        parameters: the task's own parameters; what is left out takes the task's default.
        seed: names the problems; another seed gives other problems of the same kind.
        train_size: problems of the split "train".
        heldout_size: problems of the split "heldout"; none of them occurs in any train split.

    Raises:
        ConfigError: for an unknown name (the closest ones are listed), a class that cannot be used, a
            parameter the task does not take or cannot take, or a size that is not positive.
    """
    if (reference := reference_of(name)) is not None:
        return OutsideEnvironment(name, reference, parameters, seed, train_size, heldout_size)
    from antiphon.environments.reasoning import prompts as reasoning

    if not name.startswith(f"{reasoning.FAMILY}/") or not reasoning.knows(name.partition("/")[2]):
        raise ConfigError(_unknown(name))
    return reasoning.ReasoningEnvironment(
        name.partition("/")[2], parameters, seed=seed, train_size=train_size, heldout_size=heldout_size
    )


def environment_of(section: EnvironmentSection) -> Environment:
    """Build the environment of a configuration; raises as `make_environment`."""
    return make_environment(
        section.name, section.parameters, section.seed, section.train_size, section.heldout_size
    )


def describe(name: str) -> Description:
    """Say what an environment is, what it takes, and show one problem of it.

    Raises:
        ConfigError: as `make_environment`; also for one that cannot be built with its default parameters.
    """
    environment = make_environment(name, {}, seed=0, train_size=1, heldout_size=1)
    problem = environment.problem("train", 0)
    if isinstance(environment, OutsideEnvironment):
        package = find_package(environment.reference)
        origin = "" if package is None else package.release or str(package.path)
        return Description(
            name,
            environment.about,
            environment.defaults,
            problem.text,
            problem.answer,
            origin,
            environment.reward_range,
        )
    from antiphon.environments.reasoning import prompts as reasoning

    task = name.partition("/")[2]
    return Description(
        name, reasoning.about(task), reasoning.parameters_of(task), problem.text, problem.answer
    )


def describe_all() -> list[tuple[str, str]]:
    """Return every environment's name and, of those that come with Antiphon, a sentence about it."""
    from antiphon.environments.reasoning import prompts as reasoning

    ours = {f"{reasoning.FAMILY}/{task}": reasoning.about(task) for task in reasoning.task_names()}
    return [(name, ours.get(name, "of an installed package")) for name in environment_names()]


def _unknown(name: str) -> str:
    names = environment_names()
    bare = [known for known in names if known.partition("/")[2] == name]
    close = bare or difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"names look like {names[0]}"
    return (
        f"environment.name={name!r} is unknown; {hint} (`antiphon environments` lists all; "
        "one of your own is package.module:Class)"
    )
