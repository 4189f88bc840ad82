"""The guides hold what was run, as it was run.

Their commands are executed elsewhere: those of deployments.md and scheduled-benchmarks.md by
tests/flows/test_deployments.py, those of reproduce.md by tests/e2e/test_repro.py, the script of
compare-experiments.md by tests/e2e/test_browser.py; each compares with its page. Here the two runs
of compare-experiments.md are resolved down to the last field but not trained, and the options of
its server are looked up, because tests/lineage/tracking/test_tracking_server.py starts one.
"""

import re
import shlex
from pathlib import Path

import pytest

from antiphon.cli import app as cli

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
IMAGES = ROOT / "docs" / "images"
LARGEST_BYTES = 200_000
"""A picture in the repository; a clone carries them for ever."""


def commands(page: str) -> list[str]:
    """Return the shell commands of a page, continued lines joined, scripts left out."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    told = "\n".join(block for block in blocks if "<<'END'" not in block)
    return [
        line.partition("  #")[0].strip() for line in told.replace("\\\n", " ").splitlines() if line.strip()
    ]


def test_every_guide_is_in_the_index() -> None:
    index = (GUIDES / "README.md").read_text(encoding="utf-8")
    for page in GUIDES.glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index
        assert commands(page.name) or page.name == "README.md"


def test_the_runs_to_compare_are_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [line for line in commands("compare-experiments.md") if line.startswith("./antiphon run")]
    assert len(runs) == 2
    shown = []
    for run in runs:
        assert cli.execute(["config", *shlex.split(run)[2:]]) == 0
        shown.append(capsys.readouterr().out.splitlines())
    differ = {line.strip() for line in set(shown[0]) ^ set(shown[1])}
    assert differ == {"max_staleness: 0", "max_staleness: 2", "enabled: false", "enabled: true"}


def test_the_options_of_the_server_exist() -> None:
    from mlflow.cli import server

    (command,) = [line for line in commands("compare-experiments.md") if "mlflow server" in line]
    known = {option for parameter in server.params for option in parameter.opts}
    assert {word for word in shlex.split(command) if word.startswith("--")} <= known


def test_pictures_are_small_and_made_by_the_test() -> None:
    maker = (ROOT / "tests" / "e2e" / "test_browser.py").read_text(encoding="utf-8")
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    for picture in IMAGES.iterdir():
        assert picture.suffix == ".png" and picture.stat().st_size <= LARGEST_BYTES
        assert f'"{picture.name}"' in maker, f"no test makes docs/images/{picture.name}"
        assert f"/images/{picture.name})" in pages, f"no page shows docs/images/{picture.name}"
