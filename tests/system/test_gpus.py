"""GPUs: what CUDA_VISIBLE_DEVICES says comes first, then the driver's program."""

from pathlib import Path

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.system.gpus import gpu_names


@pytest.mark.parametrize(
    "given, found", [("4,GPU-7", ["4", "GPU-7"]), ("", []), ("-1", []), ("2, 3", ["2", "3"])]
)
def test_a_process_sees_what_its_variable_names(
    given: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert gpu_names() == found


def test_without_the_variable_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_names() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0\necho 1\n")
    program.chmod(0o755)
    assert gpu_names() == ["0", "1"]
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(UnavailableError, match="does not say which GPUs there are"):
        gpu_names()
