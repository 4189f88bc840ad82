"""`dvc repro` runs the main job, repeats it to the byte in fixed mode, and never loses a ledger."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.checkout import begin_history, changes, copy_checkout
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]

SMALL = {
    "loop": {"prompts_per_step": 8, "group_size": 4},
    "environment": {
        "parameters": {"min_terms": 3, "max_terms": 6, "min_digits": 1, "max_digits": 1},
        "train_size": 32,
        "heldout_size": 16,
    },
    "sampling": {"max_tokens": 96},
    "rollout": {"concurrent_groups": 8},
    "evaluation": {"prompts": 16, "interval": 0},
    "record": {"mlflow": False},
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, standing: Standing) -> Iterator[Path]:
    """A clone in miniature: the tracked files, a git repository, smaller parameters, no run so far."""
    folder = tmp_path_factory.mktemp("repro") / "checkout"
    copy_checkout(ROOT, folder)
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    parameters = yaml.safe_load((folder / "params.yaml").read_text())
    parameters["train"] |= {"config": "small.yaml", "steps": 3}
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    begin_history(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in standing.prefect.items():
            patch.setenv(name, value)
        yield folder


def say(checkout: Path, *command: str) -> str:
    """Run a command as in a shell with the virtual environment active, and return what it said."""
    scripts = Path(sys.executable).parent
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ANTIPHON_", "MLFLOW_"))}
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": "t", f"GIT_{role}_EMAIL": "t@example.org"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def repro(checkout: Path, *arguments: str) -> str:
    return say(checkout, "dvc", "repro", *arguments)


def commands_of_the_guide() -> list[str]:
    """Return the commands of docs/guides/reproduce.md, in order."""
    page = (ROOT / "docs" / "guides" / "reproduce.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def ledgers(checkout: Path) -> dict[str, str]:
    """Return the pointer of each ledger, kept or not, by the run's name."""
    found = (path for path in (checkout / "ledger").iterdir() if path.suffix in (".dvc", ".pointer"))
    return {path.stem: path.read_text() for path in found}


@pytest.mark.long(in_ci=True)
def test_repro_twice_gives_the_same_metrics_and_keeps_both_ledgers(checkout: Path) -> None:
    said = repro(checkout)
    assert "'warmstart' didn't change" in said, "dvc.lock is older than the warm start; see CONTRIBUTING.md"
    metrics = (checkout / "results/train/metrics.json").read_bytes()
    score = json.loads((checkout / "results/evaluation.json").read_text())
    assert len(json.loads(metrics)["steps"]) == 3 and score
    first = ledgers(checkout)
    assert len(first) == 1

    assert "Data and pipelines are up to date" in repro(checkout)

    repro(checkout, "--force", "--single-item", "train")
    assert (checkout / "results/train/metrics.json").read_bytes() == metrics
    both = ledgers(checkout)
    assert len(both) == 2 and first.items() <= both.items(), "a run took another run's ledger"
    assert not [line for line in changes(checkout) if "ledger" in line], "a run changed what git sees"


@pytest.mark.long
def test_the_guide_goes_on_from_there(checkout: Path) -> None:
    """A variant, its comparison, and the audit, as docs/guides/reproduce.md gives them."""
    activate, *twice = commands_of_the_guide()[:3]
    assert activate == ". .venv/bin/activate" and twice == ["dvc repro", "dvc repro"]  # done above
    said = {line: say(checkout, *shlex.split(line)) for line in commands_of_the_guide()[3:]}

    def of(begin: str) -> str:
        (found,) = [text for line, text in said.items() if line.startswith(begin)]
        return found

    metrics = json.loads((checkout / "results/train/metrics.json").read_text())
    steps = metrics["steps"]
    assert len(steps) == 3 and set(metrics["staleness"]) == {"0"}
    assert re.search(
        r"results/train/metrics.json +weights +[0-9a-f]{64} +[0-9a-f]{64}", of("dvc metrics diff")
    )
    drawn = (checkout / "dvc_plots" / "index.html").read_text()
    assert str(checkout) in of("dvc plots diff") and "Training reward" in drawn and "Held-out pass@1" in drawn
    assert json.dumps(steps[0]["reward"]) in drawn
    assert "bit for bit" in of("antiphon replay")
    assert "batch" in of("antiphon lineage v2")
    assert len(ledgers(checkout)) == 3
    assert "ledger/" in of("antiphon keep") and len([*(checkout / "ledger").glob("*.dvc")]) == 1
