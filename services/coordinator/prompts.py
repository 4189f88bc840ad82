"""Prompts: the environment's problems as token ids, checked to fit before anything starts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from antiphon.core.checks import TokenRules
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.core.message_sizes import fits, group_bytes
from antiphon.core.records import Prompt, TurnLimits
from antiphon.core.seeds import conversation_seed
from antiphon.environments.conversation import AnyEnvironment, ConversationEnvironment, opening
from antiphon.environments.environment import Problem, reward_range_of
from antiphon.environments.file import FileEnvironment
from antiphon.environments.host import HostEnvironment
from antiphon.models.codec import StopStrings, TextCodec, resolve_model_path
from antiphon.models.directory import end_tokens
from antiphon.models.rendering import Renderer
from antiphon.services.coordinator.journal.pinned import input_files
from antiphon.system.memory import give_back

MOST_KNOWN = 16_384
"""Prompts that are remembered; those that were asked for first are forgotten first."""


class EnvironmentPrompts:
    """The prompts of an environment, tokenised when first asked for; the last `MOST_KNOWN` are remembered."""

    def __init__(
        self,
        environment: AnyEnvironment,
        renderer: Renderer,
        max_prompt_tokens: int,
        rules: TokenRules | None = None,
        files: Mapping[str, str] | None = None,
        limits: TurnLimits | None = None,
        seed: int = 0,
    ) -> None:
        """Begin with no prompt known.

        `limits` are those of conversations, None for a task without; `seed` is `environment.seed`.
        """
        self.rules = rules
        self.limits, self._seed = limits, seed
        self.files = files
        """What `input_files` found."""
        self.reward_range = reward_range_of(environment)
        self.hosted = isinstance(environment, HostEnvironment)
        """Whether prompts are empty, and rows begin with what a host says."""
        self._environment = environment
        self._renderer = renderer
        self._max_prompt_tokens = max_prompt_tokens
        self._known: dict[tuple[str, int], Prompt] = {}

    def prompt(self, split: str, index: int) -> Prompt:
        known = self._known.get((split, index))
        if known is not None:
            return known
        problem = self._environment.problem(split, index)
        token_ids = self._token_ids(problem)
        if len(token_ids) > self._max_prompt_tokens:
            rows = self._environment
            place = f", {rows.where(split, index)}," if isinstance(rows, FileEnvironment) else ""
            raise ConfigError(
                f"prompt {problem.key}{place} has {len(token_ids)} tokens, but rollout.max_model_tokens - "
                f"sampling.max_tokens leaves {self._max_prompt_tokens}; raise the former or lower the latter"
            )
        prompt = Prompt(key=problem.key, token_ids=token_ids)
        if len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[split, index] = prompt
        return prompt

    def _token_ids(self, problem: Problem) -> tuple[int, ...]:
        if self.hosted:
            return ()
        if not isinstance(self._environment, ConversationEnvironment):
            return self._renderer.encode_prompt(problem.text)
        messages = opening(self._environment, problem, conversation_seed(self._seed, problem.key))
        return self._renderer.opening(messages, self._environment.tools)

    def check_all(self, train: int, heldout: int) -> None:
        """Tokenise the first prompts of both splits, those that could be too long.

        Raises:
            ConfigError: naming the first prompt that does not fit.
        """
        for split, size in (("train", train), ("heldout", heldout)):
            for index in self.doubtful(split, size):
                self.prompt(split, index)

    def doubtful(self, split: str, size: int) -> Sequence[int]:
        """Return which of the first prompts of a split must be tokenised to know that they fit.

        Of a file's only long ones: a tokenizer makes no more tokens of a text than it has bytes, and as many
        around one text as around another.
        """
        rows = self._environment
        if self.hosted:
            return ()
        if not isinstance(rows, FileEnvironment):
            return range(size)
        room = self._max_prompt_tokens - len(self._renderer.encode_prompt("x"))
        found: list[int] = np.flatnonzero(rows.most_bytes(split)[:size] > room).tolist()
        return found


class ClientPrompts:
    """Stands for the prompts of a run that a client drives: they come with its requests."""

    def __init__(self, codec: TextCodec, rules: TokenRules) -> None:
        self.rules, self._codec = rules, codec

    def stops(self, texts: Sequence[str]) -> Callable[[Sequence[int]], int | None]:
        """Return how many of a completion's tokens there are when one of some texts is complete."""
        return StopStrings(self._codec, texts).end

    def prompt(self, split: str, index: int) -> Prompt:
        raise ConfigError(f"prompt {index} of {split} was asked for, but a client brings the prompts")


class RestingPrompts:
    """Stands for the prompts of a run that is only looked at: nothing is leased, sealed or rewarded."""

    def prompt(self, split: str, index: int) -> Prompt:
        raise ConfigError(f"prompt {index} of {split} was asked for, but the run is only looked at")


def prompts_of(
    config: RunConfig,
    environment: AnyEnvironment,
    renderer: Renderer,
    rules: TokenRules | None = None,
    files: Mapping[str, str] | None = None,
) -> EnvironmentPrompts:
    """Return the prompts of a run whose environment and renderer are there."""
    section, limits = config.environment, None
    if isinstance(environment, ConversationEnvironment):
        limits = config.turn_limits
        if config.algorithm.overlong_margin_tokens is not None:
            raise ConfigError(
                "algorithm.overlong_margin_tokens does not fit an environment with turns: it compares whole "
                "trajectories with sampling.max_tokens, which is of one turn; leave it out"
            )
        samples = max(config.loop.group_size, config.evaluation.samples)
        size = group_bytes(samples, samples * limits.tokens, config.rollout.max_model_tokens)
        if not fits(size):
            raise ConfigError(
                f"groups of {samples} trajectories of up to {limits.tokens} tokens take {size >> 20} MiB, "
                "more than one message carries; lower environment.max_trajectory_tokens or loop.group_size"
            )
    room = config.rollout.max_model_tokens - config.sampling.max_tokens
    return EnvironmentPrompts(environment, renderer, room, rules, files, limits, section.seed)


def renders_turns(environment: AnyEnvironment) -> bool:
    """Return whether a run needs a renderer that goes on with conversations; hosts may have their own."""
    return isinstance(environment, ConversationEnvironment) and not isinstance(environment, HostEnvironment)


def client_prompts(config: RunConfig) -> ClientPrompts:
    """Return what stands for the prompts of a run that a client drives.

    Raises:
        ConfigError: when the tokenizer cannot be used.
    """
    codec = TextCodec.load(resolve_model_path(config.model.path))
    return ClientPrompts(codec, TokenRules(codec.vocabulary_size, _end_tokens(config)))


def _end_tokens(config: RunConfig) -> frozenset[int]:
    folder = Path(resolve_model_path(config.model.path))
    # A model on a hub is not fetched for its list of end tokens; then only the vocabulary is checked.
    return frozenset(end_tokens(folder)) if folder.is_dir() else frozenset()


def load_prompts(config: RunConfig) -> EnvironmentPrompts:
    """Build the prompts of a run from its environment and its model's tokenizer, and check them.

    Raises:
        ConfigError: when the environment, the tokenizer or a prompt cannot be used.
    """
    from antiphon.environments.registry import environment_of  # brings every task along: slow to import

    environment = environment_of(config.environment)
    renderer = Renderer.load(config, turns=renders_turns(environment))
    stop = None if renderer.stops is None else renderer.stops.end
    rules = TokenRules(renderer.codec.vocabulary_size, _end_tokens(config), stop)
    prompts = prompts_of(config, environment, renderer, rules, input_files(config))
    prompts.check_all(config.environment.train_size, config.evaluation.prompts)
    give_back()  # a large tokenizer takes twice its size while it is made
    return prompts
