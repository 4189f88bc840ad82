"""Set-up: where this environment keeps what set-up made once, so that no run has to."""

import os
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

NO_REPORTS = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables under which no library reports its use to anybody, unless a person says otherwise."""


def report_nothing() -> None:
    """Let this process and all that it starts report nothing; before libraries are imported."""
    for name, value in NO_REPORTS.items():
        os.environ.setdefault(name, value)


_SCRIPT = Path(__file__).resolve().parents[1] / "antiphon"
"""The way in of a checkout; an installed package has none."""


def program_name() -> str:
    """Return how texts that are kept and read elsewhere call the antiphon command."""
    return "./antiphon" if _SCRIPT.is_file() else "antiphon"


def command() -> str:
    """Return how a shell in this folder calls the antiphon command: words to paste before a verb."""
    script, program = _SCRIPT, Path(sys.executable).with_name("antiphon")
    if script.is_file() and Path.cwd() == script.parent:
        return "./antiphon"
    found = shutil.which("antiphon")
    if found is not None and Path(found).absolute() in (script, program):
        return "antiphon"
    return shlex.quote(str(script if script.is_file() else program))


def beside(program: str) -> str:
    """Return how a shell calls a program of this environment, as a word to paste."""
    path = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    return program if found is not None and Path(found).absolute() == path else shlex.quote(str(path))


def made_once(name: str) -> Path:
    """Return where a file lies that is made once for all runs of this environment."""
    return Path(sys.prefix) / "share" / "antiphon" / name


def empty_database(package: str) -> Path:
    """Return where a database with a package's tables and no rows lies, if set-up made one."""
    return made_once(f"{package}-{metadata.version(package)}.db")
