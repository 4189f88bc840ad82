"""scripts/gpu: each check stands alone, and a machine without a GPU is told so."""

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / "gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=240)


def summary(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_checks", ROOT / "scripts" / "gpu_checks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["merge", "samplers", "loss", "attention"])
def test_a_check_runs_small_on_a_cpu(checks: ModuleType, name: str, capsys: Any) -> None:
    code = checks.run_one(name, "cpu")
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert code == 0 and not found["failures"] and found["figures"], said


def test_the_last_line_tells_all() -> None:
    done = run("--device", "cpu", "--only", "copies", "merge")
    told = summary(done)
    assert done.returncode == 0 and told["failed"] == [], done.stdout + done.stderr
    assert list(told["checks"]) == ["copies", "merge"]
    assert told["skipped"] == {"copies: 0": "there is no device to copy to"}
    assert told["checks"]["merge"]["figures"]["digests, device and CPU"]


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run()
    assert done.returncode == 2 and "torch sees no GPU here; --device cpu" in done.stderr


def test_what_finds_no_time_is_skipped_and_named() -> None:
    told = summary(run("--device", "cpu", "--only", "merge", "--seconds", "1"))
    assert told["skipped"] == {"merge": "no time is left"} and told["checks"] == {}


def test_a_check_that_fails_or_hangs_stops_no_other(
    checks: ModuleType, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checks.run_apart("merge", "cpu", 0.01)
    assert found["failures"] == ["it took more than 0 s"]

    def broken(device: Any, found: Any) -> None:
        found.note("before", 1)
        raise ValueError("it broke")

    monkeypatch.setitem(checks.CHECKS, "merge", (broken, ()))
    assert checks.run_one("merge", "cpu") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "figures": {"before": 1},
        "failures": ["ValueError: it broke"],
        "skipped": [],
    }
