"""vLLM compatibility: small guarded mends of the installed release, each with its reason."""

import builtins
from collections.abc import Mapping
from typing import Any


def spare_foreign_libraries() -> None:
    """Keep vLLM's search for kernels from stumbling over numba's compiler bindings.

    On CPU vLLM 0.32 looks through the attributes of every imported module and takes whatever
    answers to `__dict__` for an instance dictionary. The wrapper of llvmlite's shared library
    answers to any name, so a second engine in one process, or numba imported before the first,
    ended in an AttributeError. Objects without a real dictionary are passed over instead.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # another release keeps its kernels elsewhere
        return
    dispatcher.__dict__["vars"] = _real_vars


def _real_vars(value: Any) -> Mapping[str, Any]:
    found = builtins.vars(value)
    return found if isinstance(found, Mapping) else {}
