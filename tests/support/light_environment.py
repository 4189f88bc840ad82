"""A toy environment over the toy engine's vocabulary: letters, scored by how many are vowels."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models

from antiphon.core.errors import ContractError
from antiphon.core.records import Prompt
from antiphon.environments.environment import Problem
from antiphon.models.codec import TextCodec
from tests.support.light_engine import END_TOKEN, VOCABULARY

LETTERS = "abcdefghijklmno"


class LightEnvironment:
    """Problems by index; the reward is 1 when at least a third of the letters are vowels."""

    name = "light/vowels"
    only_compares = True

    def problem(self, split: str, index: int) -> Problem:
        return Problem(key=f"{split}-0-{index}", text=LETTERS[index % 15], answer="a")

    def size(self, split: str) -> int:
        return 64

    def problem_by_key(self, key: str) -> Problem:
        split, _, index = key.split("-")
        if split not in ("train", "heldout"):
            raise ContractError(f"{key} was not made by this environment")
        return self.problem(split, int(index))

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        return [
            float(3 * sum(letter in "aeio" for letter in text) >= max(1, len(text))) for text in completions
        ]


class LightPrompts:
    """The prompts of LightEnvironment for the coordinator."""

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(f"{split}-0-{index}", (1 + index % 15, 2 + index % 3))


def light_codec() -> TextCodec:
    """Return the codec of the toy vocabulary: `<end>` and fifteen letters."""
    words = {"<end>": END_TOKEN, **{letter: 1 + i for i, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    return TextCodec(tokenizer, [END_TOKEN], VOCABULARY)
