"""Reference config: a second model that scores the policy's own tokens, and what its log-probabilities do."""

from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from antiphon.core.config_sections import MOST_THREADS, Section


class ReferenceSection(Section):
    """A model that never changes, as KL reference or as teacher; see docs/guides/teachers.md."""

    model: str = ""
    """Its directory, with the vocabulary and the tokenizer of model.path; empty: model.path itself, before
    any training."""
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
        return self

    @property
    def used(self) -> bool:
        """Return whether there is a reference model."""
        return self.kl > 0.0 or self.distillation > 0.0

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
