"""Sampling rules: what the rollout engine honours exactly, and what it refuses.

Penalties, biases, minimum probabilities, logits processors and structured outputs have no place
in the sampling record; a field that is added to it is refused until the engine learns it.
"""

from dataclasses import fields
from math import isfinite

from antiphon.core.errors import ConfigError
from antiphon.core.records import SamplingParameters

_KNOWN = {"temperature", "top_k", "top_p", "max_tokens"}


def check_sampling(sampling: SamplingParameters, sampler: str) -> None:
    """Refuse sampling parameters that the engine would not honour exactly.

    Raises:
        ConfigError: naming the field, its value and the fix.
    """
    if not (isfinite(sampling.temperature) and sampling.temperature >= 0.0):
        raise ConfigError(f"sampling.temperature={sampling.temperature} is not possible; use 0 or more")
    if sampling.top_k < 0:
        raise ConfigError(f"sampling.top_k={sampling.top_k} is not possible; use 0 to keep all tokens")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"sampling.top_p={sampling.top_p} is not possible; use a share in (0, 1]")
    if sampling.max_tokens < 1:
        raise ConfigError(f"sampling.max_tokens={sampling.max_tokens} is not possible; use 1 or more")
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if field.name not in _KNOWN and value != field.default:
            raise ConfigError(
                f"sampling.{field.name}={value} is not supported by the rollout engine; leave it out"
            )
    if sampler == "native" and sampling.temperature > 2.0:
        raise ConfigError(
            f"sampling.temperature={sampling.temperature} exceeds 2, the most that "
            "sampling.sampler=native takes; lower it or use keyed"
        )
