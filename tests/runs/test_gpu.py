"""Checks of a GPU: each stands alone, and a machine without one is told so."""

import importlib.util
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.runs.gpu.checks import CHECKS, Check
from antiphon.runs.gpu.conformance import conform, run_apart, run_one

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / "gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=240)


def summary(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("name", ["merge", "samplers", "loss", "attention"])
def test_a_check_runs_small_on_a_cpu(name: str, capsys: Any) -> None:
    code = run_one(name, "cpu")
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert code == 0 and not found["failures"] and found["figures"], said


def test_the_last_line_tells_all(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run("--device", "cpu", "--only", "copies", "merge", "--out", str(out))
    told = summary(done)
    assert told == json.loads(out.read_text())
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


def test_a_check_that_fails_or_hangs_stops_no_other(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_apart("merge", "cpu", 0.01)
    assert found["failures"] == ["it took more than 0 s"]

    def broken(device: Any, found: Any) -> None:
        found.note("before", 1)
        raise ValueError("it broke")

    monkeypatch.setitem(CHECKS, "merge", Check("it breaks", broken))
    assert run_one("merge", "cpu") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "figures": {"before": 1},
        "failures": ["ValueError: it broke"],
        "skipped": [],
    }


def test_each_check_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "merge", replace(CHECKS["merge"], limit_s=0.01))
    told = conform("cpu", ["merge", "copies", "graphs"])
    assert told["failed"] == ["merge"] and told["checks"]["copies"]["failures"] == []
    assert told["checks"]["merge"]["failures"] == ["it took more than 0 s"]
    assert "vLLM" in told["skipped"]["graphs"]


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("pairs", ["0 and 1: sum of 2 MiB, GB/s"]),
        ("memory", [f"stage {x}: planned, GiB" for x in ("0, bfloat16", "2, bfloat16", "0, float32")]),
    ],
)
def test_a_check_of_several_processes_or_engines_runs_apart(name: str, figures: list[str]) -> None:
    found = run_apart(name, "cpu", 270.0)
    assert not found["failures"] and list(found["figures"]) == figures
    assert all(value > 0 for value in found["figures"].values())


def test_a_page_of_a_record_without_figures_says_so() -> None:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "scripts" / "pages.py")
    assert spec is not None and spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    kept = json.loads((ROOT / "docs" / "data" / "gpu.json").read_text())
    samplers = {"inverse_cdf plain, 256 rows, ms": 0.00012345}
    sums = {"0 and 1: sum of 1024 MiB, GB/s": 301.5}
    checks = {"samplers": {"figures": samplers}, "pairs": {"figures": sums}}
    skipped = {"loss": "this Python has no liger_kernel"}
    page = pages.gpu_page({**kept, "failed": ["samplers"], "skipped": skipped, "checks": checks})
    assert "- `inverse_cdf`: 256 rows 0.000123 ms, with top-p 0.95 not run;" in page
    assert "- 0 and 1: 301.5" in page and "Failed: samplers." in page
    assert "not run to not run" not in page
    named = dict(re.findall(r"^- `(\w+)`, .*: (.*)\.$", page, re.MULTILINE))
    assert named.keys() == CHECKS.keys() - checks.keys()
    assert named["loss"] == skipped["loss"] and named["merge"] == "not run" and "vLLM" in named["swap"]
