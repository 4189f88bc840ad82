"""Adapters: which modules of a model get one, and folders of them as peft writes and reads them."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from antiphon.core.config_sections import LoraSection
from antiphon.core.errors import ConfigError
from antiphon.models.codec import model_folder

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""How peft names A and B of a module."""
_FURTHER = (
    *("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "target_parameters", "trainable_token_indices"),
)
"""What an adapter may be more than W + alpha / r * B A, where these are set."""
_PLAIN = {"peft_type": "LORA", "bias": "none"}


def chosen_linears(
    targets: Sequence[str], linears: Sequence[str], shapes: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return the names of the modules that get an adapter.

    Args:
        targets: as configured, last parts of names; none for all.
        linears: names of the model's linear modules but the head.
        shapes: of each weight, by its name.

    Raises:
        ConfigError: when a target is none of them.

    >>> chosen_linears(["q"], ["layers.0.q", "layers.0.k"], {})
    ['layers.0.q']
    """
    kinds = sorted({name.rpartition(".")[2] for name in linears})
    for target in targets:
        if target in kinds:
            continue
        fused = next((name for name, shape in shapes.items() if _is_fused(name, target, shape)), None)
        if fused is not None:
            problem = f"is part of the fused tensor {fused}, which is no linear module"
        elif any(target in name.split(".") for name in shapes):
            problem = "is no linear module of the model's layers"
        else:
            problem = "does not exist in the model"
        raise ConfigError(
            f"learner.lora.targets: {target!r} {problem} of model.path; choose from {', '.join(kinds)}"
        )
    return [name for name in linears if not targets or name.rpartition(".")[2] in targets]


def _is_fused(name: str, target: str, shape: Sequence[int]) -> bool:
    """Return whether a weight holds those of several modules, one of which a target means."""
    place = name.removesuffix(".weight").split(".")
    parts = {*place, *place[-1].split("_")}
    return len(shape) > 2 and (target in parts or target.removesuffix("_proj") in parts)


def start_folder(start: str) -> Path:
    """Return the folder that `learner.lora.start` means, found as that of `model.path` is."""
    return model_folder(start) or Path(start)


def check_start(
    folder: Path, section: LoraSection, shapes: Mapping[str, Sequence[int]], base_path: str
) -> float:
    """Check an adapter that a run is to start from, by the headers alone, and return its alpha / rank.

    Raises:
        ConfigError: when there is none, or it is of another rank, kind or base.
    """
    said = f"learner.lora.start={folder}"
    try:
        tree: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        with safe_open(folder / ADAPTER_WEIGHTS, framework="numpy") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        rank, alpha = int(tree["r"]), float(tree["lora_alpha"])
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"{said} holds no adapter that can be read ({' '.join(str(error).split())[:120]}); give a folder "
            f"with peft's {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        ) from error
    if rank != section.rank:
        raise ConfigError(f"{said} has rank {rank}; set learner.lora.rank={rank}, or start without it")
    further = {name: tree[name] for name in _FURTHER if tree.get(name)}
    further |= {name: tree[name] for name, plain in _PLAIN.items() if tree.get(name, plain) != plain}
    for name, value in further.items():
        raise ConfigError(f"{said} has {name}={value}, which cannot be merged here; give an adapter without")
    for name, shape in found.items():
        module = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
        rows, columns = (*shapes.get(f"{module}.weight", ()), 0, 0)[:2]
        wanted = {f"{PREFIX}{module}{DOWN}": (rank, columns), f"{PREFIX}{module}{UP}": (rows, rank)}
        if shape != wanted.get(name) or not wanted.keys() <= found.keys():
            of = f"{list(shape)} there" if rows else "nothing to change in that model"
            raise ConfigError(
                f"{said} is of another base than model.path={base_path}: its {name} has {of}; give one that "
                "was made for this model"
            )
    return alpha / rank


def adapter_config(section: LoraSection, base: str, modules: Collection[str]) -> bytes:
    """Return peft's description of an adapter that a run trained.

    Args:
        section: of the run.
        base: folder or name of the model that it changes.
        modules: whole names of the linear modules that have one.
    """
    alpha = section.scale * section.rank
    tree = {
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": int(alpha) if math.floor(alpha) == alpha else alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": section.rank,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
    }
    return json.dumps(tree, indent=2).encode() + b"\n"
