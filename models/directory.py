"""Checkpoint shape: which tensors and end tokens a Hugging Face model directory declares.

Read from the headers alone, so a snapshot can be checked before it touches the engine. A digest says
whether the directory is still the one that a run was begun with.
"""

import json
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from antiphon.core.errors import ConfigError

WHOLE_BYTES = 32 << 20
"""Files up to this size count with every byte: the configuration, the tokenizer, small weights."""
SAMPLE_BYTES = 1 << 20
"""Of each larger file, the beginning, the middle and the end count with so many bytes each."""

TENSOR_TABLE = "tensors.json"
"""Of a directory without weights: [name, dtype, shape] of each tensor that a snapshot must bring."""


def model_digest(model_dir: Path) -> str:
    """Return a digest of the files of a model directory, by name: 64 hex digits.

    It is made in a moment whatever the size of the model: of large files only samples are read, which
    differ between any two states of training. Hidden files and folders are left out.
    """
    found = blake3()
    for path in sorted(model_dir.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        size = path.stat().st_size
        found.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                found.update(file.read())
                continue
            for start in (0, size // 2, size - SAMPLE_BYTES):
                file.seek(start)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def expected_tensors(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the directory's tensors, in file order, without a tied lm_head.

    A directory without weights has a table of them instead.

    Raises:
        ConfigError: when the directory holds no model in safetensors form, or not the whole of it.
    """
    config = _read_json(model_dir / "config.json")
    if config is None:
        raise ConfigError(f"model.path={model_dir} has no config.json; give a Hugging Face model directory")
    shapes = {name: shape for name, _, shape in tensor_table(model_dir)}
    if config.get("tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    return shapes


def lacks_weights(model_dir: Path) -> bool:
    """Return whether a directory describes a model without holding its weights."""
    return (model_dir / TENSOR_TABLE).is_file() and not any(model_dir.glob("*.safetensors"))


def tensor_table(model_dir: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype as safetensors spells it, shape) of the directory's tensors, in file order.

    Raises:
        ConfigError: when the directory holds no model in safetensors form, or not the whole of it.
    """
    if lacks_weights(model_dir):
        return _read_table(model_dir / TENSOR_TABLE)
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path={model_dir} has no .safetensors file; save the model in that format")
    parts = set((_read_json(model_dir / "model.safetensors.index.json") or {}).get("weight_map", {}).values())
    if absent := sorted(parts - {file.name for file in files}):
        raise ConfigError(
            f"model.path={model_dir} lacks {', '.join(absent)}, which its index names; copy it there"
        )
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    tensor = tensors.get_slice(name)
                    found.append((name, tensor.get_dtype(), tuple(tensor.get_shape())))
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"model.path={model_dir}: {file.name} cannot be read ({error}); copy it anew"
            ) from error
    return found


def _read_table(path: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    try:
        return [
            (str(name), str(dtype), tuple(int(size) for size in shape))
            for name, dtype, shape in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no table of tensors ({error}); fetch the worker kit again") from error


def end_tokens(model_dir: Path) -> tuple[int, ...]:
    """Return the end tokens of the generation config, else of the model config.

    Raises:
        ConfigError: when neither names one.
    """
    for name in ("generation_config.json", "config.json"):
        value = (_read_json(model_dir / name) or {}).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    raise ConfigError(f"model.path={model_dir} names no eos_token_id; add it to generation_config.json")


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else None
