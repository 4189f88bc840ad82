"""Policy: a Hugging Face causal model, seen as hidden states and a linear head.

The loss needs only the hidden states that predict completion tokens and the output embedding.
A model whose logits are anything but `head @ hidden` is refused at the start, by comparison
with its own forward pass, instead of being trained wrongly. So is one that computes something else while it
trains than while it samples: every dropout is set to 0, since an importance weight would be its noise.
"""

import copy
import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.cpu.layers import quicken_linears, quicken_norms
from antiphon.cpu.shared_rows import ATTENTION, SharedRows, common_lengths, share_rows
from antiphon.models.codec import resolve_model_path
from antiphon.models.directory import expected_tensors, weight_files
from antiphon.models.experts import Piece, pieces_in_files
from antiphon.services.learner.objective import Objective, UpdateTotals
from antiphon.services.learner.packing import MicroBatch

_PROBE_TOKENS = 8
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By their names in safetensors."""
_FEW_TOKENS = 64
"""Of the vocabulary of a model that is only tried."""
_PROBE_TOLERANCE = 1e-3
_ROUNDED_TOLERANCE = 3e-2
"""Of bfloat16, whose last place is 2^-8."""


class Policy(torch.nn.Module):  # type: ignore[misc]
    """Model and loss in one module, so that sharded weights are whole where both need them."""

    def __init__(self, causal_model: Any, objective: Objective) -> None:
        super().__init__()
        self.causal_model = causal_model
        self._objective = objective
        quicken_norms(causal_model)
        quicken_linears(causal_model)
        self.shares_rows = _share_attention(causal_model)

    def forward(
        self,
        batch: MicroBatch,
        totals: UpdateTotals | None = None,
        proximal_logprobs: torch.Tensor | None = None,
        temperature: float | None = None,
    ) -> Any:
        """Return (loss, token metrics) of a micro-batch, or its logprobs [R, T] without `totals`.

        The latter at `temperature`, if it is another one than the run's.
        """
        states = _states if self.shares_rows else _padded_states
        # [P, H]: those that predict the batch's pairs.
        hidden = batch.pairs.take(states(self.causal_model, batch.input_ids, batch.shared))
        head = self.causal_model.get_output_embeddings().weight
        if totals is None:
            return self._objective.logprobs(hidden, head, batch, temperature)
        return self._objective.loss(hidden, head, batch, totals, proximal_logprobs)


def _states(model: Any, input_ids: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """Return the states [N, H] of the distinct positions, each computed once."""
    ids, places = (
        functional.pad(part[None], (0, shared.padding)) for part in (input_ids, shared.position_ids)
    )
    found = model.get_decoder()(
        input_ids=ids,
        position_ids=places,
        use_cache=False,
        shared_rows=shared,
    )
    states: torch.Tensor = found.last_hidden_state[0, : len(input_ids)]
    return states


def _padded_states(model: Any, input_ids: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """Return the same from whole sequences, for models whose attention cannot be replaced.

    No attention mask: padding stands on the right, where a causal model never looks at it.
    """
    ids = input_ids[shared.slots.index].split([rows * length for rows, length in shared.blocks])
    found = [
        model.get_decoder()(input_ids=part.view(shape), use_cache=False).last_hidden_state.flatten(0, 1)
        for part, shape in zip(ids, shared.blocks, strict=True)
    ]
    return shared.collect(torch.cat(found))


def _share_attention(model: Any) -> bool:
    """Let a model compute each distinct position once, if its states then are what they were.

    Attention over a window, or with other terms than softmax(query x key), is left as it is. Of a model whose
    weights are in parts one of a single layer is tried, as it was before the weights were loaded.
    """
    if not is_whole(model):
        shares = _share_attention(_one_layer(model.config, model.dtype))
        if shares:
            model.set_attn_implementation(ATTENTION)
        return shares
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if not getattr(model, "_supports_attention_backend", False) or kinds != {"full_attention"}:
        return False
    tokens = np.arange(_PROBE_TOKENS, dtype=np.int64) % model.get_output_embeddings().weight.shape[0]
    rows = [tokens, np.append(tokens[:-2], tokens[:1])]
    shared, positions = share_rows([len(row) for row in rows], common_lengths(rows))
    ids = torch.zeros_like(shared.position_ids)
    for row, own in zip(rows, positions, strict=True):
        ids[own] = torch.from_numpy(row)
    before, training = model.config._attn_implementation, model.training
    model.eval()
    with torch.no_grad():
        expected = _padded_states(model, ids, shared).float()
        model.set_attn_implementation(ATTENTION)
        try:
            apart = float((_states(model, ids, shared).float() - expected).norm() / expected.norm())
        except (NotImplementedError, TypeError):
            apart = float("inf")
    model.train(training)
    same = apart <= (_PROBE_TOLERANCE if model.dtype == torch.float32 else _ROUNDED_TOLERANCE)
    if not same:
        model.set_attn_implementation(before)
    return same


def load_causal_model(path: str, dtype: torch.dtype, gradient_checkpointing: bool) -> Any:
    """Load the model of `model.path`, ready to train.

    Args:
        path: directory or hub name, as configured.
        dtype: of the weights in memory.
        gradient_checkpointing: recompute activations in the backward pass.

    Raises:
        ConfigError: when there is no such model, a tensor of it is missing, or its logits are not a linear
            map of its hidden states.
    """
    disable_progress_bar()
    with _load_errors(path):
        model, found = AutoModelForCausalLM.from_pretrained(
            resolve_model_path(path), dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    _check_missing(path, found["missing_keys"])
    _silence_dropout(model)
    _check_head(model, path)
    return _ready(model, gradient_checkpointing)


def check_kind(path: str, dtype: torch.dtype) -> None:
    """Check a model as `load_causal_model` does, by one of a single layer, before its weights are made.

    Raises:
        ConfigError: as `load_causal_model`.
    """
    with _load_errors(path):
        config = AutoConfig.from_pretrained(resolve_model_path(path))
        model = _one_layer(config, dtype)
    _check_head(model, path)


def empty_causal_model(path: str, dtype: torch.dtype, gradient_checkpointing: bool) -> Any:
    """Make the model of `model.path` without weights, where a context takes parameters as they are made."""
    config = AutoConfig.from_pretrained(resolve_model_path(path))
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    _silence_dropout(model)
    return _ready(model, gradient_checkpointing)


def fill_parts(model: Any, path: str, rank: int) -> None:
    """Read a rank's part of every weight: elements [rank * n, (rank + 1) * n) of the tensor, flat.

    Args:
        model: of `empty_causal_model`, whose parameters have their parts, n elements, as `ds_tensor`.
        path: as configured.
        rank: of this process.

    Raises:
        ConfigError: when a file cannot be read, or a tensor is in none.
    """
    parts = {name: parameter.ds_tensor for name, parameter in model.named_parameters()}
    pieces = published_pieces(model, path)
    missing = {name for name, piece in pieces.items() if piece.tensor in parts}
    for file in weight_files(Path(resolve_model_path(path))):
        # Not mapped: the pages of a mapped file count as memory of this rank, which is to have a part alone.
        with _load_errors(path), file.open("rb") as content:
            header = int.from_bytes(content.read(8), "little")
            entries = json.loads(content.read(header))
            for name in missing & entries.keys():
                dtype, (begin, _) = _DTYPES[entries[name]["dtype"]], entries[name]["data_offsets"]
                piece, into = pieces[name], parts[pieces[name].tensor].data
                # Elements of the model's tensor that are in the piece and of this rank.
                first = max(rank * len(into), piece.offset)
                stop = min((rank + 1) * len(into), piece.offset + math.prod(piece.shape))
                if first < stop:
                    content.seek(8 + header + begin + (first - piece.offset) * dtype.itemsize)
                    data = bytearray(content.read((stop - first) * dtype.itemsize))
                    own = torch.frombuffer(data, dtype=dtype)
                    start = first - rank * len(into)
                    into[start : start + len(own)].copy_(own)
                missing.discard(name)
    _check_missing(path, missing)


def is_whole(model: Any) -> bool:
    """Return whether each rank has all of every weight."""
    return not any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())


def _one_layer(config: Any, dtype: torch.dtype) -> Any:
    """Return a model of a configuration with one layer, few tokens and weights at random."""
    config = copy.deepcopy(config)
    changed = {"num_hidden_layers": 1, "vocab_size": _FEW_TOKENS, "pad_token_id": None}
    if kinds := getattr(config, "layer_types", None):
        if len(set(kinds)) > 1:
            changed["num_hidden_layers"] = len(kinds)  # each kind is tried
        else:
            changed["layer_types"] = kinds[:1]
    config.update(changed)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    _silence_dropout(model)
    return model


@contextmanager
def _load_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path={path} cannot be loaded: {' '.join(str(error).split())[:300]}; give the directory "
            "of a Hugging Face causal language model with its weights"
        ) from error


def _check_missing(path: str, missing: Collection[str]) -> None:
    if missing:
        raise ConfigError(
            f"model.path={path} lacks {len(missing)} tensors, {min(missing)} among them, which would be made "
            "up at random; copy the model again"
        )


def _ready(model: Any, gradient_checkpointing: bool) -> Any:
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def _silence_dropout(model: Any) -> None:
    """Set every probability of dropping something to 0, in layers and where an attention keeps its own."""
    for module in (*model.modules(), model.config):
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def published_names(causal_model: Any) -> list[str]:
    """Return the names of the tensors a snapshot holds: each weight once, tied heads left out."""
    # named_parameters lists a shared tensor under its first name only, which is the embedding's.
    parameters = [name for name, _ in causal_model.named_parameters()]
    kept = set(causal_model.state_dict())
    return parameters + [name for name, _ in causal_model.named_buffers() if name in kept]


def published_pieces(causal_model: Any, path: str) -> dict[str, Piece]:
    """Return the tensors of a snapshot, under the names of the files in `model.path`, and where each lies."""
    held = causal_model.state_dict(keep_vars=True)
    shapes = {
        name: getattr(held[name], "ds_shape", held[name].shape) for name in published_names(causal_model)
    }
    return pieces_in_files(shapes, expected_tensors(Path(resolve_model_path(path))).keys())


def load_published(causal_model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill a model with a snapshot's tensors, in place; a tied head is published once.

    Raises:
        IntegrityError: when one of them has no place in the model.
    """
    held = causal_model.state_dict()
    pieces = pieces_in_files({name: tensor.shape for name, tensor in held.items()}, tensors.keys())
    for name, tensor in tensors.items():
        if name not in pieces or pieces[name].shape != tuple(tensor.shape):
            raise IntegrityError(
                f"there is a tensor {name} that the base model lacks or has in another shape; give the run's "
                "own model (replay: --model)"
            )
        pieces[name].of(held[pieces[name].tensor]).copy_(tensor)


def _check_head(model: Any, path: str) -> None:
    head = model.get_output_embeddings()
    problem = None
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        problem = "has no plain linear output head"
    else:
        model.eval()
        tokens = torch.arange(_PROBE_TOKENS)[None] % head.weight.shape[0]
        with torch.no_grad():
            states = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
            ours = (states @ head.weight.T).float()
            theirs = model(input_ids=tokens, use_cache=False).logits.float()
            model.train()
            training = model(input_ids=tokens, use_cache=False).logits.float()
        if not torch.allclose(ours, theirs, atol=_PROBE_TOLERANCE, rtol=_PROBE_TOLERANCE):
            problem = "scales or caps its logits after the output head"
        elif not torch.allclose(training, theirs, atol=_PROBE_TOLERANCE, rtol=_PROBE_TOLERANCE):
            problem = "computes with noise while it trains (a dropout that its modules do not show)"
    if problem:
        raise ConfigError(
            f"model.path={path} {problem}, which the learner's loss does not support; use another"
        )
