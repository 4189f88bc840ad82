"""Sampling config: how workers draw tokens, in training and in evaluation, and which rule a run draws by."""

from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from antiphon.core.config_sections import MOST_PROMPTS, MOST_STEPS, MOST_TOKENS, Section
from antiphon.core.records import SamplingParameters

Rule = Literal["inverse_cdf", "gumbel"]
LONGEST_STOP = 200
"""Characters of a text that ends a turn."""


def decide_rule(asked: Literal["auto", "inverse_cdf", "gumbel"], device: str) -> Rule:
    """Return the rule of a run.

    Both rules cost in proportion to the vocabulary, so its size does not change which is dearer: on a CPU the
    hash of every token costs several times the cumulative sum, whereas a GPU makes it in one pass over the
    logits, and there the bits of the logits depend on the batch, which the Gumbel rule withstands.

    Args:
        asked: `sampling.rule`.
        device: "cpu" or "gpu", what the run's first worker samples on.

    >>> decide_rule("auto", "cpu"), decide_rule("auto", "gpu"), decide_rule("gumbel", "cpu")
    ('inverse_cdf', 'gumbel', 'gumbel')
    """
    if asked != "auto":
        return asked
    return "gumbel" if device == "gpu" else "inverse_cdf"


class SamplingSection(Section):
    """How workers draw tokens."""

    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    """Divides the logits; 0 means greedy."""
    top_k: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """Always 0, which keeps all tokens: training needs the whole distribution; see evaluation.top_k."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Always 1, which keeps all tokens: training needs the whole distribution; see evaluation.top_p."""
    max_tokens: int = Field(default=192, ge=1, le=MOST_TOKENS)
    """Longest completion, in tokens."""
    stop: tuple[str, ...] = Field(default=(), max_length=16)
    """Texts that end a completion, or a turn, as its end token does: the token that completes one is the last
    one kept, and the text stays part of the answer."""
    sampler: Literal["keyed", "native"] = "keyed"
    """keyed: tokens depend on weights, prompt and seed alone; native: the engine's own sampler."""
    rule: Literal["auto", "inverse_cdf", "gumbel"] = "auto"
    """How keyed random numbers choose a token. inverse_cdf: one number a token; gumbel: one for each token of
    the vocabulary, so that rounding changes hardly any; auto: gumbel if the first worker has a GPU. All
    workers of a run use the same."""

    @field_validator("top_k", "top_p")
    @classmethod
    def _check_whole(cls, value: float, info: ValidationInfo) -> float:
        # The learner's log-probabilities are of the whole distribution: with a cut one the ratio of equal
        # policies is the kept mass, not 1.
        whole = 0 if info.field_name == "top_k" else 1
        if value != whole:
            raise ValueError(
                f"sampling.{info.field_name}={value} cuts the distribution whose log-probabilities training "
                f"needs whole; leave it at {whole}, and cut evaluation.{info.field_name} instead"
            )
        return value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [one for one in value if not one or len(one) > LONGEST_STOP or "\ufffd" in one]:
            raise ValueError(
                f"sampling.stop has {bad[0][:40]!r}; each text needs 1 to {LONGEST_STOP} characters, none of "
                "them U+FFFD, which stands for half a character"
            )
        return value

    @model_validator(mode="after")
    def _check_rule(self) -> Self:
        if self.sampler == "native" and self.rule != "auto":
            raise ValueError(
                f"sampling.rule={self.rule} has no effect with sampling.sampler=native, which draws by a "
                "rule of its own; use keyed, or leave the rule out"
            )
        return self

    def parameters(self) -> SamplingParameters:
        """Return the record that travels with a training group's lease."""
        return SamplingParameters(temperature=self.temperature, max_tokens=self.max_tokens, stop=self.stop)


class EvaluationSection(Section):
    """Held-out evaluation during training, on the workers, without stopping it."""

    interval: int = Field(default=10, ge=0, le=MOST_STEPS)
    """Versions between evaluations; 0 evaluates only the first and the last version."""
    prompts: int = Field(default=192, ge=1, le=MOST_PROMPTS)
    """Held-out prompts per evaluation."""
    samples: int = Field(default=1, ge=1, le=64)
    """Samples of each held-out prompt; a score is the mean over prompts of the mean over samples."""
    temperature: float | None = Field(default=None, ge=0.0, le=10.0)
    """Divides the logits of held-out samples; 0 means greedy; null takes sampling.temperature."""
    top_k: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """Keep only this many most probable tokens of held-out samples; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens with at least this probability mass in held-out samples."""

    def parameters(self, sampling: SamplingSection) -> SamplingParameters:
        """Return the record that travels with a held-out prompt's lease."""
        return SamplingParameters(
            temperature=sampling.temperature if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
        )
