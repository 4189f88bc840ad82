"""Policy files: a published snapshot is one safetensors file that any library opens.

The learner writes it, workers fetch it, and the records link it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from antiphon.core.digests import PIECE_BYTES
from antiphon.core.errors import IntegrityError
from antiphon.core.records import TensorEntry
from antiphon.system.files import unusable

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Name of a dtype here -> its name in the format."""

_HEADER_LIMIT = 100_000_000
"""Bytes of the longest header the format allows."""
_RESTORE = "restore it with `dvc checkout` or `dvc pull`"


def policy_header(run_id: str, version: int, weights_digest: str, tensors: Sequence[TensorEntry]) -> bytes:
    """Return what stands before the first tensor of a policy file: a length of 8 bytes, then JSON.

    The file is this and the bytes of the tensors, without gaps, in the order of `tensors`, which is
    that of their names. It depends on the arguments alone, so equal versions give equal files.

    Raises:
        IntegrityError: when a dtype has no name in the format.
    """
    return safetensors_header({"run": run_id, "version": version, "weights_digest": weights_digest}, tensors)


def safetensors_header(facts: Mapping[str, object], tensors: Sequence[TensorEntry]) -> bytes:
    """Return what stands before the first tensor of a file that says `facts` of itself.

    Raises:
        IntegrityError: when a dtype has no name in the format.
    """
    # Releases of transformers before 5 open no file that does not name the format of its tensors.
    header: dict[str, object] = {
        "__metadata__": {"antiphon": json.dumps(facts, sort_keys=True), "format": "pt"}
    }
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise IntegrityError(
                f"tensor {tensor.name} has dtype {tensor.dtype}, "
                "which safetensors does not know; publish in float32 or bfloat16"
            )
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset, tensor.offset + tensor.length],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers want tensors at multiples of eight bytes
    return len(text).to_bytes(8, "little") + text


def copy_policy(path: Path, take: Callable[[bytes], object] = lambda piece: None) -> str:
    """Read a policy file once and return the digest of the weights in it; `take` gets its bytes, in order.

    Raises:
        IntegrityError: when it is no whole policy file.
        UnavailableError: when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            text = file.read(min(length, _HEADER_LIMIT))
            shapes, payload_bytes = _canonical_header(path, text)
            if path.stat().st_size != 8 + length + payload_bytes:
                raise IntegrityError(f"{path} is cut off, or has bytes that no tensor owns; {_RESTORE}")
            hasher = blake3(shapes)
            take(prefix + text)
            while piece := file.read(PIECE_BYTES):
                hasher.update(piece)
                take(piece)
    except OSError as error:
        raise unusable(error, path.parent) from error
    return hasher.hexdigest()


def _canonical_header(path: Path, text: bytes) -> tuple[bytes, int]:
    """Return what the weights digest says of names, dtypes and shapes, and the bytes of all tensors."""
    names = {short: dtype for dtype, short in DTYPES.items()}
    try:
        tree = json.loads(text)
        tree.pop("__metadata__", None)
        tensors = sorted(tree.items())
        listed = [[name, names[entry["dtype"]], entry["shape"]] for name, entry in tensors]
        edges = [0, *(edge for _, entry in tensors for edge in entry["data_offsets"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} is no safetensors file of a published version; {_RESTORE}") from error
    if edges[0:-1:2] != edges[1::2]:
        raise IntegrityError(f"{path} does not hold its tensors in the order of their names; {_RESTORE}")
    body = json.dumps(listed, separators=(",", ":")).encode()
    return len(body).to_bytes(8, "little") + body, edges[-1]


def tensors_of(path: Path) -> tuple[TensorEntry, ...]:
    """Return the tensors of a policy file, in their order.

    Raises:
        IntegrityError: when it is none.
    """
    names = {short: dtype for dtype, short in DTYPES.items()}
    try:
        with path.open("rb") as file:
            tree = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _HEADER_LIMIT)))
        tree.pop("__metadata__", None)
        return tuple(
            TensorEntry(name, names[entry["dtype"]], tuple(entry["shape"]), start, stop - start)
            for name, entry in tree.items()
            for start, stop in [entry["data_offsets"]]
        )
    except OSError as error:
        raise unusable(error, path.parent) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} is no safetensors file of a published version; {_RESTORE}") from error


def policy_facts(path: Path) -> dict[str, Any]:
    """Return what a policy file says of itself (`run`, `version`, `weights_digest`); {} for a foreign one."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            return {}
        try:
            facts = json.loads(json.loads(file.read(length))["__metadata__"]["antiphon"])
        except (ValueError, KeyError, TypeError):
            return {}
    return dict(facts)
