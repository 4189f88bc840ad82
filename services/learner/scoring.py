"""Scoring: recorded completions under given weights, as the keyed sampler's distributions see them.

Teacher forcing: one forward pass over prompt and completion gives every token's distribution at once, where
the engine had one pass for each token.

Legend: K tokens looked at, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.records import IntArray, SamplingParameters
from antiphon.sampling.keyed_sampler import RowSampling

TokenIds = Sequence[int] | IntArray
Places = npt.NDArray[np.int64]
PASS_TOKENS = 8192
"""Most positions of one forward pass, padding included, if a row has no more."""


def completion_logits(
    model: Any,
    rows: Sequence[tuple[TokenIds, TokenIds]],
    wanted: Sequence[Places],
    most: int,
    float32_head: bool = False,
) -> Iterator[tuple[int, Places, torch.Tensor]]:
    """Yield, shorter rows first, the place of a row, [K] places in its completion, and their logits [K, V].

    Args:
        model: a Hugging Face causal model.
        rows: token ids of prompt and completion.
        wanted: of each row, the places in its completion.
        most: logits that are made at a time, or one token's.
        float32_head: whether states meet the output embedding in float32, whatever the model's precision is.
    """
    head = model.get_output_embeddings().weight
    width = torch.float32 if float32_head else head.dtype
    at_once = max(1, most // len(head))
    lengths = [len(prompt) + len(tokens) for prompt, tokens in rows]
    passes: list[list[int]] = [[]]
    for place in sorted(range(len(rows)), key=lengths.__getitem__):
        if passes[-1] and (len(passes[-1]) + 1) * lengths[place] > PASS_TOKENS:
            passes.append([])
        passes[-1].append(place)
    for part in filter(None, passes):
        inputs = np.zeros((len(part), lengths[part[-1]]), dtype=np.int64)
        for line, place in enumerate(part):
            inputs[line, : lengths[place]] = np.concatenate([np.asarray(ids) for ids in rows[place]])
        with torch.no_grad():
            # Padding stands on the right, where a causal model never looks at it.
            hidden = model.get_decoder()(
                input_ids=torch.from_numpy(inputs).to(head.device), use_cache=False
            ).last_hidden_state
            for line, place in enumerate(part):
                states = hidden[line, len(rows[place][0]) - 1 :]
                for start in range(0, wanted[place].size, at_once):
                    chosen = wanted[place][start : start + at_once]
                    found = states[torch.from_numpy(chosen).to(head.device)].to(width)
                    yield place, chosen, found @ head.T.to(width)


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
