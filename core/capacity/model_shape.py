"""Shape: the tensors of a decoder-only transformer, from the numbers of its config.json.

It is what transformers builds for Llama, Qwen2, Qwen3 and their mixtures of experts, name by name; a model of
another kind is known by the header of its weights alone.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from antiphon.core.errors import InfeasibleError

Tensors = Mapping[str, tuple[int, ...]]
"""Name -> shape of each weight, once."""
KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of the models whose tensors are as here."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its tensors and what it computes with."""

    vocabulary: int
    hidden: int
    intermediate: int
    """Of a dense block, or of one expert."""
    layers: int
    heads: int
    cached_heads: int
    """Heads of keys and values."""
    head_size: int
    tied: bool = False
    """Embedding and output head are one tensor."""
    experts: int = 0
    """Of each layer; 0 where its block is dense."""
    experts_used: int = 1
    """By one token."""
    head_norms: bool = True
    """Queries and keys are normalised, as in Qwen3."""
    input_biases: bool = False
    """Queries, keys and values have biases, as in Qwen2."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors by their names in transformers."""
        width, queries, cached = self.hidden, self.heads * self.head_size, self.cached_heads * self.head_size
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, width)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for name, size in (("q", queries), ("k", cached), ("v", cached)):
                found[f"{at}.self_attn.{name}_proj.weight"] = (size, width)
                if self.input_biases:
                    found[f"{at}.self_attn.{name}_proj.bias"] = (size,)
            found[f"{at}.self_attn.o_proj.weight"] = (width, queries)
            if self.head_norms:
                found |= {f"{at}.self_attn.{name}_norm.weight": (self.head_size,) for name in "qk"}
            if self.experts:
                found[f"{at}.mlp.gate.weight"] = (self.experts, width)
                found[f"{at}.mlp.experts.gate_up_proj"] = (self.experts, 2 * self.intermediate, width)
                found[f"{at}.mlp.experts.down_proj"] = (self.experts, width, self.intermediate)
            else:
                for name in ("gate", "up"):
                    found[f"{at}.mlp.{name}_proj.weight"] = (self.intermediate, width)
                found[f"{at}.mlp.down_proj.weight"] = (width, self.intermediate)
            found |= {f"{at}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        found["model.norm.weight"] = (width,)
        return found if self.tied else found | {"lm_head.weight": (self.vocabulary, width)}


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises:
        InfeasibleError: when it is of a kind that is not known here, or lacks a number.
    """
    kind = config.get("model_type")
    sparse = kind == "qwen3_moe"
    if kind not in KNOWN_TYPES or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise InfeasibleError(
            f"the memory of a model of model_type={kind} is not known; known are {', '.join(KNOWN_TYPES)}"
        )
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelShape(
            int(config["vocab_size"]),
            hidden,
            int(config["moe_intermediate_size" if sparse else "intermediate_size"]),
            int(config["num_hidden_layers"]),
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("head_dim") or hidden // heads),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=int(config["num_experts"]) if sparse else 0,
            experts_used=int(config["num_experts_per_tok"]) if sparse else 1,
            head_norms=kind in ("qwen3", "qwen3_moe"),
            input_biases=kind == "qwen2",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InfeasibleError(f"config.json says nothing of {error}, which the memory depends on") from error


def count(tensors: Tensors) -> int:
    """Return the parameters of tensors."""
    return sum(map(math.prod, tensors.values()))


def adapter_tensors(tensors: Tensors, rank: int, targets: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a LoRA adapter: of each target [out, in], A [rank, in] and B [out, rank].

    Args:
        tensors: of the model.
        rank: of the adapter.
        targets: names of modules, such as q_proj; empty for all within layers but routers of experts.

    >>> adapter_tensors({"model.layers.0.self_attn.q_proj.weight": (8, 4)}, 2)
    {'model.layers.0.self_attn.q_proj.lora_A': (2, 4), 'model.layers.0.self_attn.q_proj.lora_B': (8, 2)}
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        module = name.removesuffix(".weight")
        place = module.split(".")
        # Embedding and head are in no numbered layer.
        chosen = place[-1] in targets if targets else any(map(str.isdigit, place)) and place[-1] != "gate"
        chosen = chosen and "experts" not in place  # one tensor when they train, whatever a file has
        if len(shape) == 2 and module != name and chosen:
            found |= {f"{module}.lora_A": (rank, shape[1]), f"{module}.lora_B": (shape[0], rank)}
    return found


def frozen_names(names: Collection[str], kinds: Collection[str]) -> set[str]:
    """Return those of a model's tensors that are parts of a mixture of experts of some kinds.

    Args:
        names: of tensors, as a model or a file has them.
        kinds: `experts` or `routers`.

    >>> names = ["mlp.gate.weight", "mlp.gate_proj.weight", "mlp.experts.down_proj", "experts.0.up_proj"]
    >>> sorted(frozen_names(names, ["routers"])), len(frozen_names(names, ["experts"]))
    (['mlp.gate.weight'], 2)
    """
    segments = {{"experts": "experts", "routers": "gate"}[kind] for kind in kinds}
    return {name for name in names if segments & set(name.split("."))}


SHAPES = {
    "Qwen/Qwen3-0.6B": ModelShape(151_936, 1024, 3072, 28, 16, 8, 128, tied=True),
    "Qwen/Qwen3-1.7B": ModelShape(151_936, 2048, 6144, 28, 16, 8, 128, tied=True),
    "Qwen/Qwen3-4B": ModelShape(151_936, 2560, 9728, 36, 32, 8, 128, tied=True),
    "Qwen/Qwen3-8B": ModelShape(151_936, 4096, 12_288, 36, 32, 8, 128),
    "Qwen/Qwen3-14B": ModelShape(151_936, 5120, 17_408, 40, 40, 8, 128),
    "Qwen/Qwen3-32B": ModelShape(151_936, 5120, 25_600, 64, 64, 8, 128),
    "Qwen/Qwen3-30B-A3B": ModelShape(151_936, 2048, 768, 48, 32, 4, 128, experts=128, experts_used=8),
}
"""Models by their name on the Hugging Face hub, from their config.json."""
