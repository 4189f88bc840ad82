"""Doctor: each thing that may be wrong with a machine is found, and named with its fix."""

import json
import os
import subprocess
import sys
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import pytest

from antiphon.cli.doctor import doctor as verb
from antiphon.core.errors import ConfigError
from antiphon.runs import doctor
from antiphon.runs.doctor import Finding, examine
from antiphon.runs.gpu.checks import CHECKS
from antiphon.system import shared_memory
from antiphon.system.shared_memory import leftovers, remove_leftovers


def finding(name: str, home: Path, **places: Path) -> Finding:
    (found,) = [one for one in examine(home, **places) if one.name == name]
    return found


def test_a_machine_is_said_in_lines_and_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "antiphon.cli.app", "doctor"]
    environment = os.environ | {"ANTIPHON_HOME": str(tmp_path / "home")}
    plain = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    told = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=120)
    rows = json.loads(told.stdout)["findings"]
    assert [row["name"] for row in rows] == [line[6:21].strip() for line in plain.stdout.splitlines()]
    assert plain.returncode == told.returncode == any(row["needed"] and not row["ok"] for row in rows)
    assert not (tmp_path / "home").exists()


def test_little_memory_and_a_full_disk_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "host_bytes", lambda: 2 << 30)
    monkeypatch.setattr(doctor, "free_bytes", lambda folder: 1 << 30)
    for name, fix in (("memory", "more"), ("disk", "make room")):
        found = finding(name, tmp_path / "not" / "there")
        assert found.needed and not found.ok and fix in found.said


def test_no_compiler_and_no_sandbox_are_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for name in ("compiler", "sandbox"):
        found = finding(name, tmp_path)
        assert not found.ok and not found.needed and "install" in found.said


def test_a_segment_is_left_over_once_no_process_has_it() -> None:
    segment = SharedMemory(create=True, size=4096)
    try:
        own = Path("/dev/shm", segment.name.lstrip("/"))
        assert own not in set(leftovers(Path("/dev/shm")))
    finally:
        segment.close()
    assert own in set(leftovers(Path("/dev/shm")))
    found = finding("shared memory", Path("/"))
    assert not found.ok and not found.needed and found.figures["leftovers"] >= 1
    segment.unlink()
    assert own not in set(leftovers(Path("/dev/shm")))


def test_the_option_that_removes_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_memory, "remove_leftovers", partial(remove_leftovers, tmp_path))
    file = tmp_path / "psm_1a2b"
    for options in ({"as_json": True}, {"as_json": True, "fix": True}, {"fix": True}):
        file.touch()
        os.utime(file, (0, 0))
        verb(**options)
        said = capsys.readouterr().out
        assert file.exists() is not options.get("fix", False)
        if "as_json" in options:
            assert json.loads(said).get("removed") == ([str(file)] if "fix" in options else None)
        else:
            assert f"fixed shared memory  {file} removed" in said


def test_without_a_gpu_each_of_its_checks_is_named_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "gpu.json"
    code = verb(gpu=True, out=out, as_json=True)
    said, noted = capsys.readouterr()
    told = json.loads(said)
    assert code == any(row["needed"] and not row["ok"] for row in told["findings"])
    assert told["gpu"] == json.loads(out.read_text())
    assert told["gpu"]["skipped"].keys() == CHECKS.keys() and not told["gpu"]["checks"]
    assert all(f"{name}: skipped, {why}" in noted for name, why in told["gpu"]["skipped"].items())
    assert told["gpu"]["skipped"]["samplers"] == "torch sees no GPU here"
    assert "vLLM" in told["gpu"]["skipped"]["swap"]


@pytest.mark.parametrize(("gpu", "fix"), [(False, "give --gpu too"), (True, "make the folder")])
def test_a_file_for_no_figures_is_refused_before_anything_starts(tmp_path: Path, gpu: bool, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        verb(gpu=gpu, out=tmp_path / "none" / "gpu.json")


@pytest.mark.parametrize(
    ("needs", "driver", "ok", "said"),
    [
        (["nvidia-cuda-runtime==13.0.96"], "580.65.06", True, "driver 580 for CUDA 13"),
        (["nvidia-cuda-runtime==13.0.96"], "570.86.15", False, "needs 580 or newer"),
        (["nvidia-cuda-runtime-cu12==12.8.90"], "570.86.15", True, "for CUDA 12"),
        ([], "580.65.06", False, "for processors alone"),
    ],
)
def test_a_driver_is_as_new_as_its_library_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: list[str], driver: str, ok: bool, said: str
) -> None:
    file = tmp_path / "version"
    file.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Feb 27 2026\n")
    monkeypatch.setattr(doctor, "requires", lambda name: needs)
    found = finding("GPU", tmp_path, driver=file)
    assert found.ok is ok and said in found.said
    assert finding("GPU", tmp_path, driver=tmp_path / "none").ok


def test_a_clock_that_nothing_keeps_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for state in (0, 5):
        kernel = SimpleNamespace(adjtimex=lambda room, state=state: state)
        monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name, kernel=kernel: kernel)
        found = doctor._clock()
        assert found.ok is (state == 0) and not (state == 5 and found.needed)
