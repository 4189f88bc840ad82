"""Rules: how keyed random numbers choose a token, by the names in `sampling.rule`, and what is refused.

Penalties, biases, minimum probabilities, logits processors and structured outputs have no place
in the sampling record; a field that is added to it is refused until the engine learns it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

import torch

from antiphon.core.errors import ConfigError
from antiphon.core.records import SamplingParameters
from antiphon.sampling import gumbel, keyed_sampler
from antiphon.sampling.keyed_sampler import Int64Array, RowSampling, UInt64Array

_KNOWN = {"temperature", "top_k", "top_p", "max_tokens", "stop", "stop_token_ids"}


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


@dataclass(frozen=True, slots=True)
class DrawingRule:
    """One of the rules."""

    numbers: Callable[[UInt64Array, Int64Array], Any]
    """Makes of request keys [R] and positions [R] what `pick` takes, an array [R]."""
    pick: Callable[[torch.Tensor, torch.Tensor, RowSampling], tuple[torch.Tensor, torch.Tensor]]

    def draw(
        self, logits: torch.Tensor, keys: UInt64Array, positions: Int64Array, rows: RowSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the tokens at `positions`.

        Args:
            logits: [R, V], any float dtype, on any device; left unchanged.
            keys: [R] uint64, from `request_key`.
            positions: [R] int64, index of the token to draw in its whole sequence, prompt included.
            rows: how each row is sampled.

        Returns:
            Tokens [R] int64 and log-probabilities [R] float32, as `keyed_sampler.draw` does.
        """
        return self.pick(logits, torch.from_numpy(self.numbers(keys, positions)).to(logits.device), rows)


RULES: Mapping[str, DrawingRule] = {
    "inverse_cdf": DrawingRule(keyed_sampler.uniforms, keyed_sampler.draw),
    "gumbel": DrawingRule(gumbel.row_keys, gumbel.draw),
}
