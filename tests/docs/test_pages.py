"""The pages say what is there: links resolve, paths and tests exist, examples run, nothing is left out."""

import doctest
import os
import re
import subprocess
from pathlib import Path

import pytest

from antiphon.cli.verbs import VERBS
from antiphon.core.loop.events import event_kinds
from antiphon.core.metrics import (
    BATCH_METRICS,
    DRAFTING_METRICS,
    LEARNER_METRICS,
    STALENESS_METRICS,
    SYSTEM_METRICS,
)

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
MADE_BY_RUNS = {"build", "ledger", "results"}
"""Folders whose content is no part of the repository."""
CONCEPTS = sorted(path for path in (ROOT / "docs" / "concepts").glob("*.md") if path.name != "README.md")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[A-Za-z0-9_.*-]+(?:/[A-Za-z0-9_.*-]*)+")


def prose(text: str) -> str:
    """Return a page without its code blocks."""
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as the usual viewers make them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def names_of_tests() -> set[str]:
    """Return the names of all test functions."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found.update(
            re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
    return found


ALL_TESTS = names_of_tests()


@pytest.mark.parametrize("name", NAMES)
def test_relative_links_resolve(name: str) -> None:
    page = ROOT / name
    for target in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        found = (page.parent / place).resolve() if place else page
        assert found.is_file(), f"{name} links to {target}"
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{name} links to {target}"


@pytest.mark.parametrize("name", NAMES)
def test_paths_exist(name: str) -> None:
    for code in _CODE.findall(prose((ROOT / name).read_text(encoding="utf-8"))):
        if not _PATH.fullmatch(code) or code.split("/")[0] not in FOLDERS - MADE_BY_RUNS:
            continue
        if re.search(r"\b[A-Z]{2,}\b", code.removesuffix("README.md")):
            continue  # a placeholder such as NAME
        if code.removeprefix("system/") in {metric.name for metric in SYSTEM_METRICS}:
            continue
        assert list(ROOT.glob(code.rstrip("/"))), f"{name} names {code}"


@pytest.mark.parametrize("name", NAMES)
def test_tests_exist(name: str) -> None:
    for code in _CODE.findall(prose((ROOT / name).read_text(encoding="utf-8"))):
        if re.fullmatch(r"test_\w+", code):
            assert code in ALL_TESTS, f"{name} names {code}"


@pytest.mark.parametrize(
    "name", [name for name in NAMES if ">>> " in (ROOT / name).read_text(encoding="utf-8")]
)
def test_examples_are_true(name: str) -> None:
    runner = doctest.DocTestRunner()
    names: dict[str, object] = {}
    for kind, body in _FENCE.findall((ROOT / name).read_text(encoding="utf-8")):
        if kind == "python":
            example = doctest.DocTestParser().get_doctest(body, names, name, name, None)
            runner.run(example, clear_globs=False)
            names = example.globs
    outcome = runner.summarize(verbose=False)
    assert outcome.failed == 0 and outcome.attempted > 0


@pytest.mark.parametrize("path", CONCEPTS, ids=lambda path: path.stem)
def test_every_concept_has_its_parts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for part in (
        "| symbol |",
        "**The naive way**",
        "**The rule",
        "```python",
        "**Checked by**",
        "**Files.**",
    ):
        # The page of the two modes compares them instead of listing symbols.
        assert part in text or (part == "| symbol |" and path.stem == "modes"), f"{path.name} lacks {part}"
    index = (path.parent / "README.md").read_text(encoding="utf-8")
    assert f"({path.name})" in index


def test_every_decision_has_its_parts() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        text = path.read_text(encoding="utf-8")
        for part in ("**Context.**", "**Decision.**", "**Consequences.**", "**What would change our mind.**"):
            assert part in text, f"{path.name} lacks {part}"
        assert f"({path.name})" in index


def test_the_generated_pages_are_current() -> None:
    subprocess.run([ROOT / "scripts" / "docs", "--check"], check=True)


def test_nothing_is_left_out() -> None:
    said = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for metric in (*LEARNER_METRICS, *BATCH_METRICS, *DRAFTING_METRICS, *STALENESS_METRICS):
        assert f"`{metric.name}" in said
    for kind in event_kinds():
        assert f"`{kind}`" in said
    used = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "docs" / "operations.md").read_text(
        encoding="utf-8"
    )
    for verb in VERBS:
        assert f"`antiphon {verb}`" in said
        assert f"./antiphon {verb}" in used, f"no page shows antiphon {verb}"


def test_every_page_can_be_reached() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        for target in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
            if not re.match(r"[a-z]+:", target) and target.partition("#")[0]:
                waiting.append((page.parent / target.partition("#")[0]).resolve())
    assert set(PAGES) <= reached


def test_the_shell_examples_name_verbs_that_exist() -> None:
    known = {*VERBS, "test"}
    for page in PAGES:
        for kind, body in _FENCE.findall(page.read_text(encoding="utf-8")):
            if kind == "sh":
                for verb in re.findall(r"\./antiphon (\S+)", body):
                    assert verb in known or verb.startswith("--"), f"{page.name} calls antiphon {verb}"


def test_scripts_named_in_pages_can_be_run() -> None:
    for page in PAGES:
        for script in re.findall(r"\bscripts/([a-z-]+)", page.read_text(encoding="utf-8")):
            path = ROOT / "scripts" / script
            assert path.is_file(), f"{page.name} names scripts/{script}"
            assert os.access(path, os.X_OK), f"scripts/{script} cannot be run"
