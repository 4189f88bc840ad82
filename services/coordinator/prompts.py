"""Prompts: the environment's problems as token ids, checked to fit before anything starts."""

from collections.abc import Mapping
from pathlib import Path

from antiphon.core.checks import TokenRules
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.core.records import Prompt
from antiphon.environments.environment import Environment, reward_range_of
from antiphon.models.codec import TextCodec, resolve_model_path
from antiphon.models.directory import end_tokens
from antiphon.services.coordinator.journal.pinned import input_files


class EnvironmentPrompts:
    """The prompts of an environment, tokenised when first asked for and then remembered."""

    def __init__(
        self,
        environment: Environment,
        codec: TextCodec,
        max_prompt_tokens: int,
        rules: TokenRules | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        self.rules = rules
        self.files = files
        """What `input_files` found."""
        self.reward_range = reward_range_of(environment)
        self._environment = environment
        self._codec = codec
        self._max_prompt_tokens = max_prompt_tokens
        self._known: dict[tuple[str, int], Prompt] = {}

    def prompt(self, split: str, index: int) -> Prompt:
        known = self._known.get((split, index))
        if known is not None:
            return known
        problem = self._environment.problem(split, index)
        token_ids = self._codec.encode_prompt(problem.text)
        if len(token_ids) > self._max_prompt_tokens:
            raise ConfigError(
                f"prompt {problem.key} has {len(token_ids)} tokens, but rollout.max_model_tokens - "
                f"sampling.max_tokens leaves {self._max_prompt_tokens}; raise the former or lower the latter"
            )
        prompt = Prompt(key=problem.key, token_ids=token_ids)
        self._known[split, index] = prompt
        return prompt

    def check_all(self, train: int, heldout: int) -> None:
        """Tokenise the first prompts of both splits.

        Raises:
            ConfigError: naming the first prompt that does not fit.
        """
        for split, size in (("train", train), ("heldout", heldout)):
            for index in range(size):
                self.prompt(split, index)


class RestingPrompts:
    """Stands for the prompts of a run that is only looked at: nothing is leased, sealed or rewarded."""

    def prompt(self, split: str, index: int) -> Prompt:
        raise ConfigError(f"prompt {index} of {split} was asked for, but the run is only looked at")


def load_prompts(config: RunConfig) -> EnvironmentPrompts:
    """Build the prompts of a run from its environment and its model's tokenizer, and check them.

    Raises:
        ConfigError: when the environment, the tokenizer or a prompt cannot be used.
    """
    from antiphon.environments.registry import environment_of  # brings every task along: slow to import

    environment = environment_of(config.environment)
    codec = TextCodec.load(resolve_model_path(config.model.path))
    room = config.rollout.max_model_tokens - config.sampling.max_tokens
    folder = Path(resolve_model_path(config.model.path))
    # A model on a hub is not fetched for its list of end tokens; then only the vocabulary is checked.
    ends = frozenset(end_tokens(folder)) if folder.is_dir() else frozenset[int]()
    rules = TokenRules(codec.vocabulary_size, ends)
    prompts = EnvironmentPrompts(environment, codec, room, rules, input_files(config))
    prompts.check_all(config.environment.train_size, config.evaluation.prompts)
    return prompts
