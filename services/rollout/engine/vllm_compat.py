"""vLLM compatibility: small guarded fixes of the installed release, each with its reason."""

import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace


class _VllmModules:
    """`sys.modules`, of which a search sees vLLM's own."""

    def __getitem__(self, name: str) -> ModuleType:
        return sys.modules[name]

    def values(self) -> Iterable[ModuleType]:
        return [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]


def spare_foreign_libraries() -> None:
    """Keep vLLM's search for kernels, which are its own, from what other libraries put into modules.

    On CPU vLLM 0.32 looks through the attributes of every imported module, a third of a second, and takes
    whatever answers to `__dict__` for an instance dictionary. The wrapper of llvmlite's shared library
    answers to any name (a second engine in one process, or numba imported before the first, ended in an
    AttributeError); flask's stand-ins for the current request refuse to answer outside of one (an engine
    after MLflow in one process ended in a RuntimeError).
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # another release keeps its kernels elsewhere
        return
    dispatcher.__dict__["sys"] = SimpleNamespace(modules=_VllmModules())
