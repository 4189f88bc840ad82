"""./antiphon names what a machine lacks before it does anything, and leaves a ready one alone."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = shlex.quote(sys.executable)
TOOLS = (
    *(
        "awk",
        "cat",
        "cksum",
        "cut",
        "date",
        "df",
        "dirname",
        "du",
        "grep",
        "head",
        "mkdir",
        "mv",
        "rm",
        "sleep",
    ),
    *("tail", "tr", "uname"),
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without an environment: what the bootstrap reads, and nothing else."""
    folder = tmp_path / "checkout"
    (folder / "requirements").mkdir(parents=True)
    for name in (
        "antiphon",
        "pyproject.toml",
        *(f"requirements/{lock}.lock" for lock in ("cpu", "cuda", "uv")),
    ):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A folder of programs as on a machine where little is installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (folder / tool).symlink_to(found)
    return folder


def start(checkout: Path, programs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(checkout / "antiphon"), "test"],
        env={"PATH": str(programs), "HOME": str(checkout), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def refusal(done: subprocess.CompletedProcess[str], checkout: Path) -> str:
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("antiphon: "), done.stderr
    assert not (checkout / ".venv").exists()
    return lines[0]


def test_an_unknown_variant(checkout: Path, bare_path: Path) -> None:
    said = refusal(start(checkout, bare_path, ANTIPHON_VARIANT="tpu"), checkout)
    assert "ANTIPHON_VARIANT=tpu is not a variant; use cpu or cuda" in said


def test_no_python(checkout: Path, bare_path: Path) -> None:
    assert "apt-get install python3" in refusal(start(checkout, bare_path), checkout)


def test_a_python_without_venv(checkout: Path, bare_path: Path) -> None:
    program(bare_path, "python3", f'case "$2" in *ensurepip*) exit 1 ;; esac\nexec {PYTHON} "$@"')
    assert "apt-get install python3-venv" in refusal(start(checkout, bare_path), checkout)


def test_no_compiler(checkout: Path, bare_path: Path) -> None:
    (bare_path / "python3").symlink_to(sys.executable)
    assert "apt-get install gcc" in refusal(start(checkout, bare_path), checkout)


def test_no_headers(checkout: Path, bare_path: Path) -> None:
    program(bare_path, "python3", f'case "$2" in *Python.h*) exit 1 ;; esac\nexec {PYTHON} "$@"')
    program(bare_path, "cc", "exit 0")
    assert "apt-get install python3-dev" in refusal(start(checkout, bare_path), checkout)


def test_too_little_space(checkout: Path, bare_path: Path) -> None:
    program(bare_path, "cc", "exit 0")
    (bare_path / "python3").symlink_to(sys.executable)
    (bare_path / "df").unlink()
    program(bare_path, "df", "echo head; echo disk 1 1 100 1% /")
    assert "has 100 MB free and set-up needs 6000 MB" in refusal(start(checkout, bare_path), checkout)


def test_a_gpu_is_found_and_wants_more_space(checkout: Path, bare_path: Path) -> None:
    program(bare_path, "nvidia-smi", "exit 0")
    program(bare_path, "cc", "exit 0")
    (bare_path / "python3").symlink_to(sys.executable)
    (bare_path / "df").unlink()
    program(bare_path, "df", "echo head; echo disk 1 1 7000 1% /")
    assert "set-up needs 18000 MB" in refusal(start(checkout, bare_path), checkout)
    assert "needs 6000 MB" not in start(checkout, bare_path, ANTIPHON_VARIANT="cuda").stderr


def stamp(checkout: Path) -> None:
    """Make the checkout look set up: ask the script's own sum by the same words."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    files = "requirements/cpu.lock requirements/uv.lock pyproject.toml"
    command = f'{{ cat {files}; echo "cpu {checkout}"; }} | cksum'
    total = subprocess.run(
        ["/bin/sh", "-c", command], cwd=checkout, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    (checkout / ".venv" / ".antiphon").write_text(f"cpu\n{total}")
    program(checkout / ".venv" / "bin", "python", "exit 0")
    program(checkout / ".venv" / "bin", "antiphon", 'echo "verb $*"')
    (checkout / "scripts").mkdir()
    program(checkout / "scripts", "test", 'echo "tests $*"')


def test_a_ready_checkout_is_handed_over_at_once(checkout: Path, bare_path: Path) -> None:
    stamp(checkout)
    done = start(checkout, bare_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tests \n", "")
    (checkout / "pyproject.toml").write_text("changed")
    assert start(checkout, bare_path).returncode == 2  # set-up is due, and this machine lacks a Python


def test_system_packages_lists_and_refuses() -> None:
    script = str(ROOT / "scripts" / "system-packages")
    listed = subprocess.run([script, "--run"], capture_output=True, text=True, timeout=30, check=True)
    assert "gcc" in listed.stdout.split() and "chromium" not in listed.stdout.split()
    wrong = subprocess.run([script, "--all"], capture_output=True, text=True, timeout=30, check=False)
    assert wrong.returncode == 2 and "no option --all" in wrong.stderr
