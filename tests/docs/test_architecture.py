"""docs/architecture.md is true: its rooms are those of the contracts, its ways those that are counted."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WAYS = ("group", "chunk", "metric")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named(text: str) -> list[str]:
    """Return what stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def test_the_house_has_the_rooms_and_floors_of_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    floors = [{room.strip().removeprefix("antiphon.") for room in layer.split("|")} for layer in layers]
    shown = [set(named(rooms)) for _, rooms, _ in rows("The house")]
    assert shown == [floor for floor in floors if floor != {"benchmarks"}]
    assert [int(height) for height, *_ in rows("The house")] == list(range(len(shown), 0, -1))


def test_each_feature_has_one_room_that_is_there() -> None:
    features = rows("Where a feature lives")
    assert len(features) == 10
    assert len({room for _, room, _ in features}) == 10
    for _, room, start in features:
        (folder,), (path,) = named(room), named(start)
        assert (ROOT / folder).is_dir() and path.startswith(folder) and (ROOT / path).is_file()
        importlib.import_module("antiphon." + path.removesuffix(".py").replace("/", "."))


def test_the_ways_are_those_that_a_run_takes() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "hops", "--list"], text=True, capture_output=True, timeout=300
    )
    assert not done.returncode, done.stderr
    *lines, last = done.stdout.splitlines()
    counts = json.loads(last)
    assert counts["group_shapes"] > 0
    heading, hops = "", dict[str, list[str]]()
    for line in lines:
        if line.startswith("    "):
            hops[heading].append(line.strip().partition(": ")[2])
        else:
            heading = line.partition(":")[0]
            hops[heading] = []
    for way in WAYS:
        taken = hops[f"{way}_functions"]
        assert len(taken) == counts[f"{way}_functions"] > 0
        shown = PAGE.partition(f"<!-- way: {way} -->")[2].partition("<!-- /way -->")[0]
        for function in named(shown):
            if "/" not in function:
                assert function in taken, (
                    f"docs/architecture.md: no {way} passes {function}; see scripts/hops --list"
                )
