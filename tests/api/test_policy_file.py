"""Policy files: the snapshot's tensors, bit for bit, in a file that safetensors reads."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load

from antiphon.api.policy_file import policy_facts, policy_header
from antiphon.core.errors import IntegrityError
from antiphon.core.records import TensorEntry

TENSORS = {
    "bias": np.zeros(0, dtype=np.float32),
    "lm_head": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model.norm": np.arange(5, dtype=np.float32),
}
DIGEST = "ab" * 32


def policy() -> tuple[tuple[TensorEntry, ...], bytes]:
    body, entries = b"", []
    for name, tensor in TENSORS.items():
        entries.append(TensorEntry(name, "float32", tensor.shape, len(body), tensor.nbytes))
        body += tensor.tobytes()
    return tuple(entries), policy_header("demo-1", 3, DIGEST, entries) + body


def test_safetensors_reads_the_same_tensors() -> None:
    entries, payload = policy()
    back = load(payload)
    assert set(back) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert back[name].tobytes() == tensor.tobytes() and back[name].shape == tensor.shape
    assert len(policy_header("demo-1", 3, DIGEST, entries)) % 8 == 0


def test_the_file_names_its_version(tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    path.write_bytes(policy()[1])
    with safe_open(path, "np") as file:
        facts = json.loads(file.metadata()["antiphon"])
    assert facts == {"run": "demo-1", "version": 3, "weights_digest": DIGEST} == policy_facts(path)


def test_unknown_dtypes_are_refused() -> None:
    entries, _ = policy()
    with pytest.raises(IntegrityError, match="complex64"):
        policy_header("demo-1", 3, DIGEST, (replace(entries[0], dtype="complex64"),))
