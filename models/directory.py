"""Checkpoint shape: which tensors and end tokens a Hugging Face model directory declares.

Read from the headers alone, so a snapshot can be checked before it touches the engine. A digest says
whether the directory is still the one that a run was begun with.
"""

import json
import math
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from antiphon.core.capacity.model_shape import SHAPES, ModelShape, Tensors, shape_of
from antiphon.core.errors import ConfigError, InfeasibleError

WHOLE_BYTES = 32 << 20
"""Files up to this size count with every byte: the configuration, the tokenizer, small weights."""
SAMPLE_BYTES = 1 << 20
"""Of each larger file, the beginning, the middle and the end count with this many bytes each."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
TENSOR_TABLE = "tensors.json"
"""Of a directory without weights: [name, dtype, shape] of each tensor that a snapshot must bring."""


_POINTER = b"version https://git-lfs"
"""Begins a file that git-lfs left instead of the content."""
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
"""Keys under which a model's configuration names its positions, as vLLM looks for them."""
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of position embedding whose configuration names the longer context itself."""


def model_digest(model_dir: Path) -> str:
    """Return a digest of the files of a model directory, by name: 64 hex digits.

    It is made in a moment whatever the size of the model: of large files only samples are read, which
    differ between any two states of training. Hidden files, folders and weights that do not count are left
    out.
    """
    found = blake3()
    counted = set(weight_files(model_dir))
    for path in sorted(model_dir.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix == ".safetensors" and path not in counted:
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


def weight_files(model_dir: Path) -> list[Path]:
    """Return the files that hold the model's tensors: those that its index names, else the one; or none.

    Beside an index, weights in other files, as publishers add them in names of their own, do not count.

    Raises:
        ConfigError: when the index names a file that is not there, or it is unclear which files count.
    """
    one = model_dir / WEIGHTS
    named = set(read_json(model_dir / INDEX).get("weight_map", {}).values())
    if not named:
        others = [path.name for path in sorted(model_dir.glob("*.safetensors")) if path != one]
        if others:
            raise ConfigError(
                f"model.path={model_dir} has {', '.join(others)}, which no index names; move it away, or "
                f"copy {INDEX} there"
            )
        return [one] if one.is_file() else []
    if absent := sorted(name for name in named if not (model_dir / name).is_file()):
        raise ConfigError(
            f"model.path={model_dir} lacks {', '.join(absent)}, which its index names; copy it there"
        )
    if one.is_file() and WEIGHTS not in named:
        raise ConfigError(
            f"model.path={model_dir} has {WEIGHTS} and an index that names other files; "
            "move one of the two away"
        )
    return [model_dir / name for name in sorted(named)]


def check_pointers(model_dir: Path) -> None:
    """Check that the files of a folder are there, and not only what git-lfs leaves in their place.

    Raises:
        ConfigError: naming the first that is such a pointer.
    """
    for path in sorted(model_dir.glob("[!.]*")):
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(_POINTER):
            raise ConfigError(
                f"model.path={model_dir}: {path.name} is a pointer of git-lfs, not the file itself; "
                "run `git lfs pull` in that clone"
            )


def most_positions(model_dir: Path) -> int | None:
    """Return how many positions the model has, tokens, as vLLM counts them; None where no file says it."""
    tree = read_json(model_dir / "config.json")
    tree = tree.get("text_config") or tree
    found = [tree[name] for name in _LENGTHS if isinstance(tree.get(name), int)]
    if not found:
        return None
    rope = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    scaled = (rope.get("rope_type") or rope.get("type")) in _SCALED_ALREADY
    return int(min(found) * (1.0 if scaled else rope.get("factor") or 1.0))


def check_parts(model_dir: Path, parts: int) -> None:
    """Check that each layer of a model can be cut into `parts`, as vLLM cuts them for tensor parallelism.

    Raises:
        ConfigError: when it cannot.
    """
    if parts == 1:
        return
    try:
        shape = shape_of(read_json(model_dir / "config.json", required=True))
    except InfeasibleError as error:
        raise ConfigError(
            f"rollout.tensor_parallel={parts} needs a model whose layers are known to be cut into parts, and "
            f"those of model.path={model_dir} are not ({error}); set rollout.tensor_parallel=1"
        ) from error
    counts = {
        "attention heads": shape.heads,
        "numbers between the halves of an MLP": shape.intermediate,
        "tokens of its vocabulary, filled up to a multiple of 64,": -(-shape.vocabulary // 64) * 64,
    }
    found = next((f"{size} {what}" for what, size in counts.items() if size % parts), "")
    if not found and shape.cached_heads % parts and parts % shape.cached_heads:  # else each head has copies
        found = f"{shape.cached_heads} key-value heads"
    if found:
        fits = [
            n for n in range(1, parts) if not any(size % n for size in (*counts.values(), shape.cached_heads))
        ]
        raise ConfigError(
            f"rollout.tensor_parallel={parts} does not divide the {found} of model.path={model_dir}; set it "
            f"to {fits[-1]}"
        )


def count_parameters(model_dir: Path) -> int:
    """Return the parameters of a model, a tied head not counted twice; raises as `expected_tensors`."""
    return sum(math.prod(shape) for shape in expected_tensors(model_dir).values())


def known_tensors(path: str, folder: Path | None) -> tuple[Tensors, ModelShape | None]:
    """Return the tensors of a model, and what it computes with where its kind is known; no weight is read.

    Args:
        path: as configured.
        folder: where it lies; None where it does not.

    Raises:
        ConfigError: when its folder cannot be read.
        InfeasibleError: when nothing is known of it.
    """
    if folder is None:
        if path not in SHAPES:
            raise InfeasibleError(
                f"nothing is known of model.path={path}; give a folder that has its config.json, or one of "
                f"{', '.join(SHAPES)}"
            )
        return SHAPES[path].tensors(), SHAPES[path]
    try:
        shape = shape_of(read_json(folder / "config.json", required=True))
    except InfeasibleError:
        if not weight_files(folder):
            raise
        return expected_tensors(folder), None
    return shape.tensors(), shape


def expected_tensors(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the directory's tensors, in file order, without a tied head.

    A directory without weights has a table of them instead.

    Raises:
        ConfigError: when the directory holds no model in safetensors form, or not the whole of it.
    """
    config = read_json(model_dir / "config.json", required=True)
    shapes = {name: shape for name, _, shape in tensor_table(model_dir)}
    if config.get("tie_word_embeddings", False):
        shapes.pop(HEAD, None)
    return shapes


def check_tensors(
    model_dir: Path, asked: dict[str, tuple[int, ...]], tied: dict[str, str], have: dict[str, tuple[int, ...]]
) -> None:
    """Compare what `expected_tensors` found, `have`, with what the directory's configuration asks for.

    Args:
        model_dir: for the words, and for the values of tied tensors.
        asked: name -> shape of each weight once, as the learner publishes them.
        tied: further names of such a weight -> its name in `asked`.

    Raises:
        ConfigError: when one is missing, has another shape or no place, or differs from what it is tied to.
    """
    found = [
        f"{name} has shape {list(have[name])} where config.json asks for {list(shape)}"
        if name in have
        else f"{name} is missing"
        + (" (if the embedding is the head, set tie_word_embeddings to true)" if name == HEAD else "")
        for name, shape in asked.items()
        if have.get(name) != shape
    ]
    found += [f"{name} has no place in the model of config.json" for name in have if name not in asked]
    for pair in tied.items():
        digests = {_values_digest(file, name) for name in pair for file in weight_files(model_dir)}
        if len(digests - {None}) > 1:
            found.append(
                f"{pair[0]} is not {pair[1]} (if it is to be its own, set tie_word_embeddings to false)"
            )
    if found:
        said = found if len(found) < 4 else [*found[:2], f"{len(found) - 3} more", found[-1]]
        raise ConfigError(
            f"the weights in model.path={model_dir} do not fit its config.json: {', '.join(said)}; copy the "
            "model again, or put the config.json of these weights beside them"
        )


def _values_digest(file: Path, name: str) -> str | None:
    """Return the digest of a tensor's bytes; None where the file has none of that name."""
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        entry = json.loads(content.read(size)).get(name)
        if entry is None:
            return None
        start, stop = entry["data_offsets"]
        content.seek(8 + size + start)
        digest = blake3(entry["dtype"].encode())
        for at in range(start, stop, WHOLE_BYTES):
            digest.update(content.read(min(WHOLE_BYTES, stop - at)))
        return digest.hexdigest()


def lacks_weights(model_dir: Path) -> bool:
    """Return whether a directory describes a model without holding its weights."""
    return (model_dir / TENSOR_TABLE).is_file() and not weight_files(model_dir)


def tensor_table(model_dir: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, dtype as safetensors spells it, shape) of the directory's tensors, in file order.

    Raises:
        ConfigError: when the directory holds no model in safetensors form, or not the whole of it.
    """
    if lacks_weights(model_dir):
        return _read_table(model_dir / TENSOR_TABLE)
    files = weight_files(model_dir)
    if not files:
        raise ConfigError(f"model.path={model_dir} has no {WEIGHTS}; save the model in that format")
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    tensor = tensors.get_slice(name)
                    found.append((name, tensor.get_dtype(), tuple(tensor.get_shape())))
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"model.path={model_dir}: {file.name} cannot be read ({error}); copy it again"
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
    """Return every token that ends a completion, by `end_tokens_by_file`."""
    return tuple(dict.fromkeys(token for found in end_tokens_by_file(model_dir).values() for token in found))


def tokenizer_settings(model_dir: Path) -> dict[str, Any]:
    """Return what tokenizer_config.json says, and where it lists no tokens special_tokens_map.json before it.

    transformers reads them so.
    """
    tree = read_json(model_dir / "tokenizer_config.json")
    return tree if "added_tokens_decoder" in tree else tree | read_json(model_dir / "special_tokens_map.json")


def end_tokens_by_file(model_dir: Path, tokenizer: Tokenizer | None = None) -> dict[str, tuple[int, ...]]:
    """Return the end tokens that each file of a directory names, the tokenizer's first.

    Raises:
        ConfigError: when none names any.
    """
    found: dict[str, tuple[int, ...]] = {}
    named = tokenizer_settings(model_dir).get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    if named is not None:
        tokenizer = tokenizer or Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        if (token := tokenizer.token_to_id(str(named))) is not None:
            found["tokenizer_config.json"] = (token,)
    for name in ("generation_config.json", "config.json"):
        value = read_json(model_dir / name).get("eos_token_id")
        if isinstance(value, (int, list)) and value != []:
            found[name] = tuple(value) if isinstance(value, list) else (value,)
    if not found:
        raise ConfigError(
            f"model.path={model_dir} names no end token that its tokenizer has; set eos_token in "
            "tokenizer_config.json or eos_token_id in generation_config.json"
        )
    return found


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """Return what a JSON file of a model directory says; nothing where it is absent and not `required`.

    Raises:
        ConfigError: when it is absent, cannot be read or holds something else.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ConfigError(
            f"model.path={path.parent} has no {path.name}; give a Hugging Face model directory"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path.parent}: cannot read {path.name} ({error}); fix it") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"model.path={path.parent}: {path.name} must hold a mapping; fix it")
    return tree
