"""A clone in miniature: what git tracks or would take, and nothing that runs left behind."""

import shutil
import subprocess
from pathlib import Path

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org")


def copy_checkout(root: Path, folder: Path) -> None:
    """Copy a checkout without its history, and without the ledgers that were kept of its runs."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, listed):
        kept = name.startswith("ledger/") and name.endswith(".dvc")
        if (root / name).is_file() and not kept:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def begin_history(folder: Path) -> None:
    """Make a folder a git repository whose one commit has all of it."""
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "begin"]):
        subprocess.run(["git", *IDENTITY, *command], cwd=folder, check=True, timeout=60)


def changes(folder: Path) -> list[str]:
    """Return what git says is new or changed."""
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()
