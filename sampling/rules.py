"""Rules: the ways in which keyed random numbers choose a token, by their names in `sampling.rule`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from antiphon.sampling import gumbel, keyed_sampler
from antiphon.sampling.keyed_sampler import Int64Array, RowSampling, UInt64Array


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
