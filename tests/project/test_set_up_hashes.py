"""Set-up installs what the lock's sha256 hashes name, and nothing else."""

import base64
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.project.test_bootstrap import PYTHON, bare_path, checkout, program

__all__ = ["bare_path", "checkout"]


def wheel(folder: Path, text: str) -> str:
    """Write a package `tiny` of one module and return the sha256 of its wheel."""
    folder.mkdir(exist_ok=True)
    info = "tiny-1.0.dist-info"
    files = {
        "tiny.py": text,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, body in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(body.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(body)}\n"
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(zipfile.ZipInfo(name), body)  # without the time, which would change the hash
    return hashlib.sha256(path.read_bytes()).hexdigest()


def set_up(checkout: Path, bare_path: Path, lock: str) -> subprocess.CompletedProcess[str]:
    """Set a checkout up whose lock is `lock`, with nothing to install from but the folder of wheels."""
    (checkout / "requirements" / "cpu.lock").write_text(lock)
    program(bare_path, "cc", "exit 0")
    program(bare_path, "python3", f'exec {PYTHON} "$@"')
    if not (bare_path / "ln").exists():
        (bare_path / "ln").symlink_to("/bin/ln")
    (bare_path / "df").unlink(missing_ok=True)
    program(bare_path, "df", "echo head; echo disk 1 1 9000 1% /")
    return subprocess.run(
        ["/bin/sh", str(checkout / "antiphon"), "test"],
        env={
            "PATH": str(bare_path),
            "HOME": str(checkout),
            "ANTIPHON_VARIANT": "cpu",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(checkout / "wheels"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def installed(checkout: Path) -> list[Path]:
    return list((checkout / ".venv").glob("lib/python3*/site-packages/tiny.py"))


def test_a_line_without_a_hash_is_refused(checkout: Path, bare_path: Path) -> None:
    digest = wheel(checkout / "wheels", "x = 1\n")
    for lock in (
        "tiny==1.0\n",
        f"other==2.0\n    # via x\ntiny==1.0 \\\n    --hash=sha256:{digest}\n",
        f"tiny==1.0 \\\n    --hash=sha256:{digest}\nother==2.0\n",
    ):
        done = set_up(checkout, bare_path, lock)
        bare = "tiny==1.0" if lock.startswith("tiny==1.0\n") else "other==2.0"
        assert done.returncode == 2
        assert f"requirements/cpu.lock pins {bare} without a sha256 hash; restore" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1 and not (checkout / ".venv").exists()


@pytest.mark.timeout(240)
def test_a_package_of_another_hash_is_not_installed(checkout: Path, bare_path: Path) -> None:
    digest = wheel(checkout / "wheels", "x = 1\n")
    lock = f"tiny==1.0 \\\n    --hash=sha256:{digest}\n"
    assert wheel(checkout / "wheels", "x = 'another'\n") != digest
    done = set_up(checkout, bare_path, lock)
    assert done.returncode == 2 and not installed(checkout)
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr + done.stdout
    assert "antiphon: set-up failed; the lines above say why" in done.stderr
    wheel(checkout / "wheels", "x = 1\n")
    set_up(checkout, bare_path, lock)  # goes on to the project itself, which this checkout lacks
    assert len(installed(checkout)) == 1
