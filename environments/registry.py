"""Registry: an environment by its name, built from its parameters.

`reasoning/<task>`, `poker` and `file` are ours, `package.module:Class` is a class of any other package, and
another plain name one that an installed package gives as an entry point. Every process of a run builds the
same environment from the same five values, so a prompt key means the same problem on each of them.
"""

import asyncio
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from antiphon.core.client_records import CLIENT
from antiphon.core.config import RunConfig, build_config
from antiphon.core.config_sections import FILE, HOST, MOST_PROMPTS, EnvironmentSection
from antiphon.core.errors import ConfigError
from antiphon.core.messages import UNIT_RANGE, Message, RewardRange, Tool
from antiphon.environments.conversation import AnyEnvironment, opening
from antiphon.environments.environment import SPLITS, Environment
from antiphon.environments.file import MATH, FileEnvironment, located
from antiphon.environments.host import HostEnvironment
from antiphon.environments.outside import OutsideEnvironment, installed_names
from antiphon.environments.scoring.messages import Failed, ScoringTask, Verdict
from antiphon.system.packages import OURS, environment_facts, find_package, reference_of

TRIAL_S, TRIAL_BYTES = 5.0, 2 << 30
"""What a program may take of time and address space whose verdict is shown."""


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
    opening: tuple[Message, ...] = ()
    """Of one with turns: the first messages of the prompt's conversation."""
    tools: tuple[Tool, ...] = ()
    reward_range: RewardRange = UNIT_RANGE


def environment_names() -> list[str]:
    """Return the names that `make_environment` knows: ours, then those of installed packages, each sorted.

    Any `package.module:Class` can be built besides.
    """
    from antiphon.environments.reasoning import prompts as reasoning  # slow to import

    ours = [f"{reasoning.FAMILY}/{task}" for task in reasoning.task_names()]
    return [*ours, *OURS, *installed_names()]


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
    if name == FILE:
        return FileEnvironment(parameters, seed, train_size, heldout_size)
    if name == HOST:
        raise ConfigError(f"environment.name={HOST} has nothing to show or to judge here: its hosts do that")
    if (reference := reference_of(name)) is not None:
        return OutsideEnvironment(name, reference, parameters, seed, train_size, heldout_size)
    from antiphon.environments.reasoning import prompts as reasoning

    if not name.startswith(f"{reasoning.FAMILY}/") or not reasoning.knows(name.partition("/")[2]):
        raise ConfigError(_unknown(name))
    return reasoning.ReasoningEnvironment(
        name.partition("/")[2], parameters, seed=seed, train_size=train_size, heldout_size=heldout_size
    )


def refuse_client(section: EnvironmentSection) -> None:
    """Refuse what has no prompts of its own.

    Raises:
        ConfigError: with `environment.name: client`.
    """
    if section.name == CLIENT:
        raise ConfigError(
            f"environment.name={CLIENT} has no prompts of its own and is served by `antiphon door`, where "
            "clients bring them; name another environment for this command"
        )


def environment_of(section: EnvironmentSection) -> AnyEnvironment:
    """Build the environment of a configuration; raises as `make_environment`."""
    refuse_client(section)
    if section.name == HOST:
        return HostEnvironment(section)
    return make_environment(
        section.name, section.parameters, section.seed, section.train_size, section.heldout_size
    )


def with_sizes(config: RunConfig) -> RunConfig:
    """Return the configuration with the number of rows of each split where a file is to give all of them.

    Raises:
        ConfigError: when the files cannot be used, or another field does not fit the numbers.
    """
    section = config.environment
    if section.name != FILE or MOST_PROMPTS not in (section.train_size, section.heldout_size):
        return config
    environment, tree = environment_of(section), config.model_dump(mode="json")
    tree["environment"] |= {f"{split}_size": environment.size(split) for split in SPLITS}
    return build_config(tree)


def describe_file(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows and digests of prompts from files, one prompt, and what three answers to it would earn.

    Raises:
        ConfigError: as `FileEnvironment` and its `try_out`: every row is read.
    """
    from antiphon.environments.scoring.pool import InProcess, ScoringPool

    environment = FileEnvironment(parameters, 0, MOST_PROMPTS, MOST_PROMPTS)
    environment.try_out()
    problem = environment.problem("train", 0)
    others = (environment.problem("train", index).answer for index in range(environment.size("train")))
    answers = problem.answer, "", next((answer for answer in others if answer != problem.answer), "?")

    async def scored() -> list[Verdict]:
        if not environment.runs_programs and parameters["score"] != MATH:  # which take a main thread
            return await InProcess(environment).score(problem.key, answers)
        named, files = located(parameters)
        task = ScoringTask(FILE, named, 0, MOST_PROMPTS, MOST_PROMPTS, TRIAL_S, TRIAL_BYTES, readable=files)
        async with ScoringPool(task, processes=1, attempts=1, sandbox=True, patience_s=TRIAL_S) as pool:
            return await pool.score(problem.key, answers)

    verdicts = asyncio.run(scored())
    return {
        "rows": {split: environment.size(split) for split in SPLITS},
        "files": environment_facts(EnvironmentSection(name=FILE, parameters=dict(parameters))),
        "prompt": problem.text,
        "answers": [
            {"answer": answer, "earns": verdict.reason if isinstance(verdict, Failed) else verdict}
            for answer, verdict in zip(answers, verdicts, strict=True)
        ],
    }


def describe(name: str, parameters: Mapping[str, Any] | None = None) -> Description:
    """Say what an environment is, what it takes, and show one problem of it.

    Raises:
        ConfigError: as `make_environment`; also for one that cannot be built with these parameters.
    """
    environment = make_environment(name, parameters or {}, seed=0, train_size=1, heldout_size=1)
    problem = environment.problem("train", 0)
    if isinstance(environment, OutsideEnvironment):
        package = find_package(environment.reference)
        origin = "" if package is None else package.release or str(package.path)
        found = Description(
            name,
            environment.about,
            environment.defaults,
            problem.text,
            problem.answer,
            origin,
            reward_range=environment.reward_range,
        )
        if environment.has_turns:
            begun, tools = opening(environment, problem, 1), tuple(environment.tools)
            return replace(found, opening=begun, tools=tools)
        return found
    from antiphon.environments.reasoning import prompts as reasoning

    task = name.partition("/")[2]
    return Description(
        name, reasoning.about(task), reasoning.parameters_of(task), problem.text, problem.answer
    )


def describe_all() -> list[tuple[str, str]]:
    """Return every environment's name and, of those that come with Antiphon, a sentence about it."""
    from antiphon.environments.reasoning import prompts as reasoning

    ours = {f"{reasoning.FAMILY}/{task}": reasoning.about(task) for task in reasoning.task_names()}
    ours["poker"] = "no-limit hold'em of two to six seats against scripted opponents"
    found = [(name, ours.get(name, "of an installed package")) for name in environment_names()]
    return [
        *found,
        (FILE, "prompts and reference answers from files: JSON lines or Parquet"),
        (HOST, "environments of others, which programs beside the run hold"),
    ]


def _unknown(name: str) -> str:
    names = environment_names()
    bare = [known for known in names if known.partition("/")[2] == name]
    close = bare or difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"names look like {names[0]}"
    return (
        f"environment.name={name!r} is unknown; {hint} (`antiphon environments` lists all; "
        "one of your own is package.module:Class)"
    )
