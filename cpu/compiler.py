"""C++ compiler: torch compiles a model's operations with it on a CPU."""

import os
import shutil
import sys

from antiphon.core.errors import ConfigError


def why_not_compiling() -> str | None:
    """Return why torch cannot compile here, in a clause with what to do; None where it can."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"{compiler} is not there; install it, name another one in CXX"
    if " " in sys.prefix:
        return f"torch does not quote paths for it, and {sys.prefix} has a blank; move the checkout elsewhere"
    return None


def check_compiler(setting: str) -> None:
    """Check that torch can compile on this machine, which a setting as `key=value` needs.

    Raises:
        ConfigError: when it cannot.
    """
    if reason := why_not_compiling():
        raise ConfigError(f"{setting} needs a C++ compiler on a CPU, and {reason}, or leave the key out")
