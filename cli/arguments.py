"""Arguments: what several verbs share, found and checked in one place."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from antiphon.core.errors import ConfigError
from antiphon.system.set_up import program_name

if TYPE_CHECKING:
    from antiphon.core.config import RunConfig


Json = Annotated[bool, Parameter(name="--json")]
"""The option for programs: one JSON document instead of words."""


def credentials_folder(given: Path | None, config: "RunConfig | None" = None) -> str | None:
    """Return the bundle that an option, the configuration or ANTIPHON_CREDENTIALS names, in this order."""
    if given is not None:
        return str(given)
    named = None if config is None else config.services.credentials
    return named or os.environ.get("ANTIPHON_CREDENTIALS") or None


def shipped(example: str) -> Path:
    """Return the path of a file under examples/, of the checkout or of the installed package.

    Raises:
        ConfigError: when it is not there.
    """
    path = Path(__file__).resolve().parents[1] / "examples" / example
    if not path.exists():
        raise ConfigError(f"the shipped {example} is not at {path}; install antiphon again")
    return path


def command_line() -> str:
    """Return what was typed, as a shell takes it; empty where another program calls a verb.

    The interpreter's options are no part of it, nor where the command lies.
    """
    program = Path(sys.argv[0])
    if program.name != "antiphon" and program.resolve() != Path(__file__).resolve().with_name("app.py"):
        return ""
    return shlex.join([program_name(), *sys.argv[1:]])


def check_address(address: str, option: str) -> str:
    """Return HOST:PORT unchanged.

    Raises:
        ConfigError: when it is of another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{option} {address} is not of the form HOST:PORT; write 127.0.0.1:7700")
    return address


def columns(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Return a line for each row with its cells below each other; all but the first lean right if asked.

    >>> columns([("a", "bcd"), ("bc", "d")], right=True)
    ['a   bcd', 'bc    d']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lean = str.rjust if right else str.ljust
    lines = [[row[0].ljust(widths[0]), *map(lean, row[1:], widths[1:])] for row in rows]
    return ["  ".join(cells).rstrip() for cells in lines]
