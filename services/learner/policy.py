"""Policy: a Hugging Face causal model, seen as hidden states and a linear head.

The loss needs only the hidden states that predict completion tokens and the output embedding.
A model whose logits are anything but `head @ hidden` is refused at the start, by comparison
with its own forward pass, instead of being trained wrongly. So is one that computes something else while it
trains than while it samples: every dropout is set to 0, since an importance weight would be its noise.
"""

from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from antiphon.core.errors import ConfigError
from antiphon.cpu.layers import quicken_linears, quicken_norms
from antiphon.cpu.shared_rows import ATTENTION, SharedRows, common_lengths, share_rows
from antiphon.models.codec import resolve_model_path
from antiphon.services.learner.objective import Objective, UpdateTotals
from antiphon.services.learner.packing import MicroBatch

_PROBE_TOKENS = 8
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

    Attention over a window, or with other terms than softmax(query x key), is left as it is.
    """
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
    place = resolve_model_path(path)
    disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={path} cannot be loaded: {' '.join(str(error).split())[:300]}; give the directory "
            "of a Hugging Face causal language model with its weights"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"model.path={path} lacks {len(missing)} tensors, {missing[0]} among them, which would be made "
            "up at random; copy the model again"
        )
    _silence_dropout(model)
    _check_head(model, path)
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
