"""Adapters that cannot be: one sentence each, from names and headers alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from antiphon.core.config_sections import LoraSection
from antiphon.core.errors import ConfigError
from antiphon.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_start, chosen_linears

LINEARS = ["layers.0.q_proj", "layers.0.o_proj", "layers.1.q_proj"]
SHAPES = {
    **{f"{name}.weight": (8, 4) for name in LINEARS},
    "layers.0.mlp.experts.gate_up_proj": (4, 16, 8),
    "embed_tokens.weight": (32, 4),
}


@pytest.mark.parametrize(
    "target, problem",
    [
        ("w_pack", "does not exist in the model"),
        ("embed_tokens", "is no linear module of the model's layers"),
        ("gate_up_proj", r"is part of the fused tensor layers.0.mlp.experts.gate_up_proj"),
        ("gate_proj", r"is part of the fused tensor layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_a_target_that_is_no_linear_module_is_refused(target: str, problem: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"learner.lora.targets: '{target}' {problem}.*choose from o_proj, q"
    ):
        chosen_linears(["q_proj", target], LINEARS, SHAPES)


def test_targets_are_last_parts_of_names_and_none_means_all() -> None:
    assert chosen_linears(["q_proj"], LINEARS, SHAPES) == ["layers.0.q_proj", "layers.1.q_proj"]
    assert chosen_linears([], LINEARS, SHAPES) == LINEARS


def save(folder: Path, shapes: dict[str, tuple[int, int]], **settings: Any) -> Path:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "bias": "none", "use_dora": False}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(plain | settings))
    return folder


A, B = (f"base_model.model.layers.0.q_proj.lora_{letter}.weight" for letter in "AB")
GOOD = {A: (2, 4), B: (8, 2)}


def test_an_adapter_that_fits_counts_alpha_over_rank(tmp_path: Path) -> None:
    assert check_start(save(tmp_path, GOOD), LoraSection(rank=2), SHAPES, "m") == 1.5


@pytest.mark.parametrize(
    "shapes, settings, problem",
    [
        (GOOD, {"r": 4}, "has rank 4; set learner.lora.rank=4"),
        (GOOD, {"use_dora": True}, "has use_dora=True, which cannot be merged"),
        (GOOD, {"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        (GOOD, {"bias": "all"}, "has bias=all"),
        (GOOD, {"peft_type": "IA3"}, "has peft_type=IA3"),
        (
            {A: (2, 6), B: (8, 2)},
            {},
            r"is of another base than model.path=m: its .*lora_A.weight has \[2, 6\]",
        ),
        ({A: (2, 4)}, {}, "is of another base"),
        (
            {name.replace("layers.0", "layers.7"): s for name, s in GOOD.items()},
            {},
            "nothing to change in that",
        ),
    ],
)
def test_an_adapter_of_another_rank_kind_or_base_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, int]], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"learner.lora.start=.*{problem}"):
        check_start(save(tmp_path, shapes, **settings), LoraSection(rank=2), SHAPES, "m")


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no adapter that can be read.*adapter_config.json"):
        check_start(tmp_path, LoraSection(rank=2), SHAPES, "m")
