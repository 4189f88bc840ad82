"""A toy environment over the toy engine's vocabulary: letters, scored by how many are vowels."""

from collections.abc import Awaitable, Callable, Sequence

from tokenizers import Tokenizer, decoders, models

from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, Observed, Prompt, TurnAnswer, TurnLimits, TurnToAnswer
from antiphon.environments.environment import Problem
from antiphon.environments.scoring.messages import Verdict
from antiphon.models.codec import TextCodec
from antiphon.services.reward.service import Scorer
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


class PacedScorer:
    """Takes its time before it scores a group."""

    def __init__(self, inner: Scorer, pace: Callable[[], Awaitable[None]]) -> None:
        self._inner, self._pace = inner, pace

    async def score(self, key: str, texts: Sequence[str]) -> list[Verdict]:
        await self._pace()
        return await self._inner.score(key, texts)


class LightPrompts:
    """The prompts of LightEnvironment for the coordinator."""

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(f"{split}-0-{index}", (1 + index % 15, 2 + index % 3))


class LightTurnPrompts(LightPrompts):
    """The same prompts, each the beginning of a conversation."""

    hosted = False

    def __init__(self, turns: int = 5, tokens: int = 40) -> None:
        self.limits = TurnLimits(turns, tokens)
        self.reward_range = (-2.0, 2.0)
        self.answer = answer_light_host if self.hosted else answer_light_turn


def light_answer(
    prompt: Sequence[int], row: Sequence[int], turns: int, limits: TurnLimits
) -> list[int] | float:
    """Return what a toy environment says to a row: tokens, also such as end a turn, or a reward."""
    said = sum(prompt) + sum((place + 1) * token for place, token in enumerate(row))
    answer = [(said + place * 7) % VOCABULARY for place in range(1 + said % 3)]
    if said % 4 == 0 or turns == limits.turns or len(row) + len(answer) >= limits.tokens:
        return said % 5 - 2.0
    return answer


async def answer_light_turn(turn: TurnToAnswer) -> TurnAnswer:
    """Answer a turn; a pure function of the row."""
    turns, named = len(turn.observed) + 1, (turn.group_id, turn.sample_index, turn.row_digest)
    said = light_answer(turn.prompt_token_ids, turn.token_ids.tolist(), turns, turn.limits)
    if not isinstance(said, float):
        return TurnAnswer(*named, token_ids=tuple(said))
    reason = FinishReason.TURNS if turns == turn.limits.turns else FinishReason.ENVIRONMENT
    return TurnAnswer(*named, finish_reason=reason, reward=said)


def check_light_turns(
    prompt: Sequence[int], row: Sequence[int], observed: Observed, reward: float, limits: TurnLimits
) -> None:
    """Check a whole row against the toy environment, which is asked again."""
    for turns, (start, stop) in enumerate(observed, 1):
        assert light_answer(prompt, row[:start], turns, limits) == list(row[start:stop])
    assert light_answer(prompt, row, len(observed) + 1, limits) == reward


class LightHostedPrompts(LightTurnPrompts):
    """Empty prompts: a host says how each sample begins."""

    hosted = True

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(f"{split}-0-{index}", ())


HostSaid = tuple[list[int], bool] | float | None
"""Tokens and whether they begin a branch, or a reward, or None where the host fails."""


def light_host_says(
    key: str, sample: int, row: Sequence[int], breaks: Sequence[int], turns: int, limits: TurnLimits
) -> HostSaid:
    """Return what a toy host says to a row of so many turns; some of its contexts begin afresh."""
    said = sum(key.encode()) + 7 * sample + 5 * sum(breaks)
    said += sum((place + 1) * token for place, token in enumerate(row))
    if not row:
        return None if said % 5 == 0 else ([1 + said % 14, 2, 3], False)
    context = row[max(breaks, default=0) :]
    fresh = said % 3 == 0
    tokens = [*context[::2], 5][-9:] if fresh else [1 + said % 15]
    size = len(tokens) + 1 if fresh else len(context) + len(tokens) + 1
    full = size > (limits.context or size) or len(row) + len(tokens) + 1 > limits.tokens
    return said % 5 - 2.0 if full or said % 7 == 0 or turns == limits.turns else (tokens, fresh)


async def answer_light_host(turn: TurnToAnswer) -> TurnAnswer:
    """Answer a turn as a host does; a pure function of the row."""
    named = (turn.group_id, turn.sample_index, turn.row_digest)
    assert turn.logprobs.size == turn.token_ids.size and not turn.prompt_token_ids
    row, turns = turn.token_ids.tolist(), len(turn.observed)
    said = light_host_says(turn.prompt_key, turn.sample_index, row, turn.breaks, turns, turn.limits)
    if said is None:
        return TurnAnswer(*named, finish_reason=FinishReason.FAILED, failure="it broke", host="h")
    if isinstance(said, float):
        return TurnAnswer(*named, finish_reason=FinishReason.ENVIRONMENT, reward=said, host="h")
    return TurnAnswer(*named, token_ids=tuple(said[0]), fresh=said[1], host="h")


def light_codec() -> TextCodec:
    """Return the codec of the toy vocabulary: `<end>` and fifteen letters."""
    words = {"<end>": END_TOKEN, **{letter: 1 + i for i, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    return TextCodec(tokenizer, [END_TOKEN], VOCABULARY)
