"""Reference config: a second model that scores the policy's own tokens, and what its log-probabilities do."""

from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from antiphon.core.config_sections import MOST_THREADS, URL, VARIABLE, Section

WHO_SCORES = frozenset({"model", "url", "key", "timeout_s", "threads"})
"""Fields of the section that say who scores; the others say what is made of it."""


class ReferenceSection(Section):
    """A model that never changes, as KL reference or as teacher; see docs/guides/teachers.md."""

    model: str = Field(default="", max_length=1024)
    """Its directory, with the vocabulary and the tokenizer of model.path; empty: model.path itself, before
    any training. With `url`, what that server calls it."""
    url: str = ""
    """Base of an OpenAI-compatible server that answers `prompt_logprobs`, as vLLM does, such as
    `http://127.0.0.1:8000/v1`; it scores in place of a process of this run."""
    key: str | None = None
    """Name of a variable, such as TEACHER_KEY, whose value is sent to `url` as the API key."""
    timeout_s: float = Field(default=60.0, gt=0.0, le=3600.0)
    """Seconds that one request to `url` may take; it asks for all completions of a prompt."""
    kl: float = Field(default=0.0, ge=0.0, le=1000.0)
    """Weight of the estimate of KL(policy || reference). With 0 here and in `distillation` no reference model
    is started."""
    kl_estimator: Literal["k1", "k3"] = "k3"
    """Estimate of the KL of a token, with d = reference - policy logprob. k1: -d; k3: exp(d) - 1 - d, which
    is never negative."""
    kl_place: Literal["loss", "reward"] = "loss"
    """loss: added to the loss of each token; reward: its sum over a trajectory is taken from the reward
    before advantages are made of it."""
    distillation: float = Field(default=0.0, ge=0.0, le=1000.0)
    """Weight of reference - behaviour logprob in the advantage of each token: on-policy distillation."""
    keep_reward: bool = True
    """Distillation comes on top of the rewards' advantages; false: in their place."""
    threads: int = Field(default=1, ge=1, le=MOST_THREADS)
    """CPU threads that score."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = type(self).model_fields
        # What stands in url and key is not repeated: it may be the key itself.
        if self.url and not URL.fullmatch(self.url):
            raise ValueError(
                "reference.url is no address such as http://127.0.0.1:8000/v1; a key belongs in a variable "
                "that reference.key names"
            )
        if self.key is not None and not VARIABLE.fullmatch(self.key):
            raise ValueError(
                "reference.key is no name of a variable for secrets; name one, as TEACHER_KEY, and export it"
            )
        if self.url and not self.model:
            raise ValueError("reference.url needs reference.model, as its server calls the model")
        changed = [name for name in fields if getattr(self, name) != fields[name].default]
        if changed and not self.used:
            raise ValueError(
                f"reference.{changed[0]} has no effect without reference.kl or reference.distillation; set "
                "one of these, or leave it out"
            )
        if not self.keep_reward and not self.distillation:
            raise ValueError(
                "reference.keep_reward=false leaves nothing to learn from without reference.distillation; "
                "set that, or leave it out"
            )
        for name in ("kl_estimator", "kl_place"):
            if name in changed and not self.kl:
                raise ValueError(
                    f"reference.{name} has no effect without reference.kl; set that, or leave it out"
                )
        for name in ("threads",) if self.url else ("key", "timeout_s"):
            if name in changed:
                raise ValueError(
                    f"reference.{name} has no effect {'with' if self.url else 'without'} reference.url; "
                    f"{'leave either out' if self.url else 'set that, or leave it out'}"
                )
        return self

    @property
    def used(self) -> bool:
        """Return whether there is a reference model."""
        return self.kl > 0.0 or self.distillation > 0.0

    @property
    def own_process(self) -> bool:
        """Return whether a process of the run scores, and no server elsewhere."""
        return self.used and not self.url

    @property
    def in_loss(self) -> bool:
        """Return whether its log-probabilities are needed by the loss."""
        return (self.kl > 0.0 and self.kl_place == "loss") or self.distillation > 0.0

    @property
    def of_rewards(self) -> float:
        """Return what the KL of a trajectory takes from its reward, per nat."""
        return self.kl if self.kl_place == "reward" else 0.0


def kl_estimate(
    estimator: str, logprobs: npt.NDArray[Any], reference_logprobs: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Return the estimate of KL(policy || reference) of each token, [T] nats, by Schulman's k1 or k3.

    Tokens are sampled by the policy. Source: http://joschu.net/blog/kl-approx.html.

    >>> float(kl_estimate("k1", np.array([-1.0]), np.array([-3.0]))[0])
    2.0
    """
    apart = np.asarray(reference_logprobs, np.float64) - np.asarray(logprobs, np.float64)
    found: npt.NDArray[np.float64] = -apart if estimator == "k1" else np.expm1(apart) - apart
    return found
