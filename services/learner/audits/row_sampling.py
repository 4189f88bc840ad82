"""Row sampling: a run's sampling parameters as the keyed sampler takes them, to score tokens again."""

from typing import Any

import torch

from antiphon.core.records import SamplingParameters
from antiphon.sampling.keyed_sampler import RowSampling


def row_sampling(sampling: SamplingParameters, rows: int, vocabulary: int) -> RowSampling:
    """Return the sampling of `rows` tokens that share their parameters."""

    def column(value: Any, dtype: torch.dtype, used: bool) -> torch.Tensor | None:
        return torch.full((rows,), value, dtype=dtype) if used else None

    greedy = sampling.temperature == 0.0
    return RowSampling(
        temperature=column(sampling.temperature, torch.float64, not greedy and sampling.temperature != 1.0),
        top_k=column(sampling.top_k, torch.int64, not greedy and 0 < sampling.top_k < vocabulary),
        top_p=column(sampling.top_p, torch.float64, not greedy and sampling.top_p < 1.0),
        greedy=column(True, torch.bool, greedy),
        all_greedy=greedy,
    )
