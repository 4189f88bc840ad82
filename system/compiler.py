"""C++ compiler: torch compiles a model's operations with it on a CPU."""

import os
import shutil

from antiphon.core.errors import ConfigError


def missing_compiler() -> str | None:
    """Return the name of the compiler that torch would call, if it is not there: that of CXX, or g++."""
    compiler = os.environ.get("CXX", "g++")
    return compiler if shutil.which(compiler) is None else None


def check_compiler(key: str) -> None:
    """Check that this machine has a compiler, which the configuration's `key` needs.

    Raises:
        ConfigError: when it has none.
    """
    compiler = missing_compiler()
    if compiler is not None:
        raise ConfigError(
            f"{key}=true needs a C++ compiler on a CPU, and {compiler} is not there; install it, "
            "name another one in CXX, or leave the key out"
        )
