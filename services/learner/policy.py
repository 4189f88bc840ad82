"""Policy: a Hugging Face causal model, seen as hidden states and a linear head.

The loss needs only the hidden states that predict completion tokens and the output embedding.
A model whose logits are anything but `head @ hidden` is refused at the start, by comparison
with its own forward pass, instead of being trained wrongly.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from antiphon.core.errors import ConfigError
from antiphon.models.codec import resolve_model_path
from antiphon.services.learner.objective import Objective, UpdateTotals
from antiphon.services.learner.packing import MicroBatch

_PROBE_TOKENS = 8
_PROBE_TOLERANCE = 1e-3


class Policy(torch.nn.Module):  # type: ignore[misc]
    """Model and loss in one module, so that sharded weights are whole where both need them."""

    def __init__(self, causal_model: Any, objective: Objective) -> None:
        super().__init__()
        self.causal_model = causal_model
        self._objective = objective

    def forward(
        self,
        batch: MicroBatch,
        totals: UpdateTotals | None = None,
        proximal_logprobs: torch.Tensor | None = None,
    ) -> Any:
        """Return (loss, token metrics) of a micro-batch, or its logprobs [R, T] without `totals`."""
        hidden = self._hidden(batch)
        head = self.causal_model.get_output_embeddings().weight
        if totals is None:
            return self._objective.logprobs(hidden, head, batch)
        return self._objective.loss(hidden, head, batch, totals, proximal_logprobs)

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        # No attention mask: padding stands on the right, where a causal model never looks at it,
        # and packed sequences differ by positions that start again at 0.
        arguments: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.position_ids is not None:
            arguments["position_ids"] = batch.position_ids
        states: torch.Tensor = self.causal_model.get_decoder()(**arguments).last_hidden_state
        flat = states.reshape(-1, states.shape[-1])
        return flat.index_select(0, batch.token_index.reshape(-1)).reshape(*batch.token_index.shape, -1)


def load_causal_model(path: str, dtype: torch.dtype, gradient_checkpointing: bool) -> Any:
    """Load the model of `model.path`, ready to train.

    Args:
        path: directory or hub name, as configured.
        dtype: of the weights in memory.
        gradient_checkpointing: recompute activations in the backward pass.

    Raises:
        ConfigError: when there is no such model, or its logits are not a linear map of its
            hidden states.
    """
    place = resolve_model_path(path)
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={path} cannot be loaded: {' '.join(str(error).split())[:300]}; give the directory "
            "of a Hugging Face causal language model with its weights"
        ) from error
    _check_head(model, path)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


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
        if not torch.allclose(ours, theirs, atol=_PROBE_TOLERANCE, rtol=_PROBE_TOLERANCE):
            problem = "scales or caps its logits after the output head"
    if problem:
        raise ConfigError(
            f"model.path={path} {problem}, which the learner's loss does not support; use another"
        )
