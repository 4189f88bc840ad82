"""vLLM compatibility: small guarded fixes of the installed release, each with its reason."""

import builtins
from collections.abc import Mapping
from typing import Any


def spare_foreign_libraries() -> None:
    """Keep vLLM's search for kernels from stumbling over what other libraries put into modules.

    On CPU vLLM 0.32 looks through the attributes of every imported module and takes whatever
    answers to `__dict__` for an instance dictionary. The wrapper of llvmlite's shared library
    answers to any name (a second engine in one process, or numba imported before the first, ended
    in an AttributeError); flask's stand-ins for the current request refuse to answer outside of
    one (an engine after MLflow in one process ended in a RuntimeError). What has no readable
    dictionary cannot hold a kernel and is passed over.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # another release keeps its kernels elsewhere
        return
    dispatcher.__dict__["hasattr"] = _answers_to
    dispatcher.__dict__["vars"] = _real_vars


def _answers_to(value: Any, name: str) -> bool:
    """`hasattr`, which also says no where the value refuses to answer."""
    try:
        return builtins.hasattr(value, name)
    except RuntimeError:  # hasattr itself expects an AttributeError only
        return False


def _real_vars(value: Any) -> Mapping[str, Any]:
    found = builtins.vars(value)
    return found if isinstance(found, Mapping) else {}
