"""Mixture of experts: a small one, and how far engine and learner agree on it, swap after swap.

`moe_logprob_difference` is the largest difference between the engine's log-probability of a probe's token
and the learner's, nats, over all swaps. `router_drift` is the share of (layer, token) for which the engine's
router chose other experts than the learner's with the same weights: rounding near a router's edge.
`router_moves` is the share for which the learner itself chose others a step before: by those a trajectory
that is one version old was computed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerFast

from antiphon.benchmarks.parts.warmstart.tiny_model import MixtureShape, build_model, save_tiny_model
from antiphon.services.rollout.engine.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from antiphon.benchmarks.probe import Policy

SHAPE = MixtureShape(layers=2, mlp_size=64)
"""Of the small one: 2 of 4 experts."""


def make_mixture(tokenizer: Path, folder: Path, seed: int = 0) -> Path:
    """Write a small mixture with the tokenizer of a model's folder, and return its folder."""
    save_tiny_model(build_model(SHAPE, seed), PreTrainedTokenizerFast.from_pretrained(tokenizer), folder)
    return folder


@contextmanager
def routed(model: Any, used: int) -> Iterator[list[torch.Tensor]]:
    """Give what the routers of a model choose inside the block: experts [T, used] of each call, sorted."""
    found: list[torch.Tensor] = []

    def note(module: Any, given: Any, out: Any) -> None:
        found.append(out[0].detach().float().topk(used).indices.sort().values)

    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(note) for gate in gates]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def compare(engine: VllmEngine, policy: "Policy", used: int, swaps: int) -> dict[str, float]:
    """Make steps, swap to each version, and return the three figures.

    Args:
        engine: of the model that the policy began with.
        policy: a learner.
        used: experts that a token chooses of each layer.
        swaps: at least 1.
    """
    apart, other, moved, places = 0.0, 0, 0, 0
    with routed(policy.model, used) as before:
        policy.published()
    before = before[-_layers(engine) :]
    for _ in range(swaps):
        with routed(policy.model, used) as theirs:
            version = policy.step()
        assert version.probe is not None
        tokens, theirs = version.probe.tokens, theirs[-_layers(engine) :]
        weights = version.handed_over()
        engine.load_weights(version.number, weights, weights.digest)
        with routed(engine._runner.get_model(), used) as ours:
            scores = engine._scores(tokens).cpu()
        scores = scores.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)
        apart = max(apart, float((scores - torch.tensor(version.probe.logprobs)).abs().max()))
        count = len(tokens) - 1
        other += _differing(ours, theirs, count)
        moved += _differing(before, theirs, count)
        places += count * len(theirs)
        before = theirs
    return {
        "moe_logprob_difference": apart,
        "router_drift": other / places,
        "router_moves": moved / places,
    }


def _layers(engine: VllmEngine) -> int:
    return int(engine._runner.model_config.hf_text_config.num_hidden_layers)


def _differing(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], tokens: int) -> int:
    """Count the (layer, token) with other experts."""
    pairs = zip(ours, theirs, strict=True)
    return sum(int((mine[:tokens] != other[:tokens]).any(-1).sum()) for mine, other in pairs)
