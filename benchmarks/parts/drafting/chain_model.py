"""Chain model: a Qwen3 whose next-token distribution is known exactly, made without training.

Attention and MLP outputs are zero, so the residual stream holds the last token's embedding alone:
``logits = W rmsnorm(E[token])``. W leads from each token of a chain to the next and from a chain's
last token to the end token; there is one chain per prompt, of log-normal length. Greedy decoding
therefore recites the prompt's chain. At temperature 1 the scale of W decides how often sampling
falls off it: at 14 with 8,192 tokens the chain continues with probability 0.99, at 9 with 0.5.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from antiphon.core.errors import ConfigError
from antiphon.core.seeds import generator

Float64Array = npt.NDArray[np.float64]
Float32Matrix = npt.NDArray[np.float32]

PAD, BEGIN, END, RESERVED = 0, 1, 2, 4
"""Token ids with a meaning of their own; prompts and chains start at RESERVED."""

EPSILON = 1e-6
"""Of the normalisation, as in the written configuration."""

SHORTEST_CHAIN = 4
"""Tokens; a chain shorter than that says nothing about drafts."""

SHARED = math.sqrt(0.2)
"""Share of a chain's own direction in its tokens' embeddings: slips stay in the chain more often."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainModel:
    """The two matrices that decide everything (V vocabulary, H hidden size), and the chains."""

    embeddings: Float32Matrix
    """E, [V, H] float32, rows of length one."""
    head: Float32Matrix
    """W, [V, H] float32."""
    chains: tuple[tuple[int, ...], ...]
    """Tokens of each prompt's chain, without the end token."""
    layers: int

    @property
    def vocabulary(self) -> int:
        """Number of tokens V."""
        return len(self.head)

    def prompt(self, index: int) -> tuple[int, ...]:
        """Return the token ids of a prompt, 0 <= index < number of chains."""
        return (BEGIN, RESERVED + index)

    def greedy(self, index: int) -> tuple[int, ...]:
        """Return what greedy decoding of a prompt gives, the end token included."""
        return (*self.chains[index], END)

    def save(self, folder: Path) -> Path:
        """Write a Hugging Face model directory (float32 weights, no tokenizer) and return it."""
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        hidden = self.embeddings.shape[1]
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=self.vocabulary,
                hidden_size=hidden,
                intermediate_size=2 * hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=max(2, hidden // 32),
                num_key_value_heads=max(1, hidden // 64),
                head_dim=32,
                tie_word_embeddings=False,
                max_position_embeddings=2048,
                rms_norm_eps=EPSILON,
                bos_token_id=BEGIN,
                eos_token_id=END,
                pad_token_id=PAD,
            )
        )
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(torch.from_numpy(self.embeddings))
            model.lm_head.weight.copy_(torch.from_numpy(self.head))
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        model.save_pretrained(folder)
        (folder / "chains.json").write_text(json.dumps([len(chain) for chain in self.chains]) + "\n")
        return folder


def build_chain_model(
    vocabulary: int = 8192,
    prompts: int = 64,
    scale: float = 14.0,
    median_length: float = 110.0,
    hidden: int = 256,
    layers: int = 4,
    seed: int = 0,
) -> ChainModel:
    """Make a chain model.

    Args:
        vocabulary: tokens V; chains are shortened alike where they would not fit into it.
        prompts: number of prompts, each with a chain of its own.
        scale: logit of the next token of a chain; larger is closer to greedy.
        median_length: median of the log-normal chain lengths (sigma 0.6), tokens.
        hidden: size of the embeddings, a multiple of 64.
        layers: transformer layers, which cost time and add nothing.
        seed: of the model's own streams.

    Raises:
        ConfigError: when the vocabulary has no room for chains of `SHORTEST_CHAIN` tokens.
    """
    room = vocabulary - RESERVED - prompts
    if prompts < 1 or room < prompts * SHORTEST_CHAIN:
        raise ConfigError(
            f"a vocabulary of {vocabulary} has no room for {prompts} chains of {SHORTEST_CHAIN} tokens; "
            "raise it or lower the number of prompts"
        )
    chance = generator("chain-model", seed)
    lengths = _fit(chance.lognormal(math.log(median_length), 0.6, prompts), room)
    edges = RESERVED + prompts + np.concatenate([[0], np.cumsum(lengths)])
    chains = tuple(tuple(range(a, b)) for a, b in pairwise(edges.tolist()))
    own = _unit(chance.standard_normal((vocabulary, hidden)))
    shared = _unit(chance.standard_normal((prompts, hidden)))
    embeddings = own.copy()
    for index, chain in enumerate(chains):
        members = [RESERVED + index, *chain]
        embeddings[members] = _unit(math.sqrt(1 - SHARED**2) * own[members] + SHARED * shared[index])
    ending = _unit(chance.standard_normal((1, hidden)))[0]
    embeddings[[chain[-1] for chain in chains]] = ending
    head = np.zeros_like(embeddings)
    for index, chain in enumerate(chains):
        head[list(chain)] = embeddings[[RESERVED + index, *chain[:-1]]]
    head[END] = ending
    # A normalised embedding has length sqrt(H), so `scale` is the logit of the right next token.
    head *= scale / math.sqrt(hidden)
    return ChainModel(embeddings.astype(np.float32), head.astype(np.float32), chains, layers)


def _fit(wanted: Sequence[float] | Float64Array, room: int) -> npt.NDArray[np.int64]:
    lengths = np.clip(wanted, SHORTEST_CHAIN, 600)
    while int(lengths.astype(np.int64).sum()) > room:
        lengths = np.maximum(lengths * 0.97, SHORTEST_CHAIN)
    return lengths.astype(np.int64)


def _unit(rows: npt.NDArray[np.floating]) -> Float64Array:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))
