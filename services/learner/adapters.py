"""Adapters: low-rank changes that train in place of a model's weights, by peft's modules.

peft puts them into the model (`inject_adapter_in_model`, which unlike its wrapper renames their modules
alone). Published are whole weights, merged as weights/adapter.py says, and what they were merged from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file

from antiphon.core.config_sections import LoraSection
from antiphon.models.adapters import (
    ADAPTER_WEIGHTS,
    DOWN,
    PREFIX,
    UP,
    check_start,
    chosen_linears,
    start_folder,
)
from antiphon.weights.adapter import CACHED_ROWS, merge_into

_OWN = "default"
"""peft's name of an adapter that nobody named."""


class Adapters:
    """Where the adapters of a causal model are, and what its weights are with them."""

    def __init__(
        self, causal_model: Any, section: LoraSection, published: torch.dtype, base_path: str, seed: int
    ) -> None:
        """Put adapters into a model, in place: B is zero, A random by the seed, and all else is frozen.

        Args:
            causal_model: in the type in which it trains.
            section: with a rank.
            published: type of published weights.
            base_path: model.path, for words.
            seed: of A.

        Raises:
            ConfigError: when there is no module of a name, or no adapter to start from that fits.
        """
        from peft import LoraConfig, inject_adapter_in_model  # seconds, and not needed without

        self.scale, self._published = section.scale, published
        shapes = {name: tuple(weight.shape) for name, weight in causal_model.named_parameters()}
        modules = chosen_linears(section.targets, linears_of(causal_model), shapes)
        if section.start is not None:
            _merge_start(causal_model, section, shapes, base_path)
        settings = LoraConfig(r=section.rank, lora_alpha=section.scale * section.rank, target_modules=modules)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            inject_adapter_in_model(settings, causal_model)
        self._modules = frozenset(modules)

    def parts(self, name: str) -> list[str]:
        """Return the parameters that a published weight is made of: itself, or W, A and B."""
        module, _, kind = name.rpartition(".")
        if module not in self._modules:
            return [name]
        if kind != "weight":  # a bias has no adapter
            return [f"{module}.base_layer.{kind}"]
        own = [f"{module}.lora_{letter}.{_OWN}.weight" for letter in "AB"]
        return [f"{module}.base_layer.weight", *own]

    def merged(
        self, name: str, parts: Sequence[torch.Tensor], pairs: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return a weight with its adapter, float32, from W, A and B.

        All are first rounded to what is published of them; A and B are kept so in `pairs`, by peft's names.
        """
        base, *pair = (part.detach().to(self._published) for part in parts)
        module = name.removesuffix(".weight")
        for kind, tensor in zip((DOWN, UP), pair, strict=True):
            pairs[f"{PREFIX}{module}{kind}"] = tensor.to("cpu", copy=True)
        whole = base.to(torch.float32, copy=True)
        # Each piece is three kernels a rank, and a GPU has no cache to spare for one.
        rows = len(whole) if whole.is_cuda else CACHED_ROWS
        down, up = (tensor.float() for tensor in pair)
        merge_into(whole, down, up, self.scale, rows)
        return whole


def linears_of(causal_model: Any) -> list[str]:
    """Return the names of the linear modules that may have an adapter: all but the head."""
    head = causal_model.get_output_embeddings()
    return [
        name
        for name, module in causal_model.named_modules()
        if type(module) is torch.nn.Linear and module is not head
    ]


def _merge_start(
    causal_model: Any, section: LoraSection, shapes: Mapping[str, tuple[int, ...]], base_path: str
) -> None:
    folder = start_folder(str(section.start))
    scale = check_start(folder, section, shapes, base_path)
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    weights = dict(causal_model.named_parameters())
    for name, down in tensors.items():
        if name.endswith(DOWN):
            module = name.removesuffix(DOWN)
            held = weights[f"{module.removeprefix(PREFIX)}.weight"].data
            whole = held.float()
            whole = whole.clone() if whole is held else whole
            merge_into(whole, down.float(), tensors[f"{module}{UP}"].float(), scale)
            held.copy_(whole)
