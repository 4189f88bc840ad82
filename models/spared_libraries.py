"""Spared libraries: what transformers imports or looks up for functions that nothing here calls.

Importing one of its models also gets its scores for assisted generation (scikit-learn, and pandas with
it) and its losses for object detection (scipy.optimize): three seconds of CPU in each engine and learner.
"""

import importlib.metadata
import sys
from importlib.metadata import packages_distributions
from typing import Any

NAMED_ALIKE = frozenset({"torch", "accelerate", "mistral_common"})
"""Modules that transformers asks for while it loads, and that are called like their packages."""


class Packages(dict[str, list[str]]):
    """Module -> names of the packages that bring it, read once one is asked for that may be called otherwise.

    The metadata of every installed package take half a second of CPU, and transformers reads them whenever it
    loads. Where it finds no name it takes that of the module.

    >>> Packages().get("torch", []), Packages().get("yaml")
    ([], ['PyYAML'])
    """

    def get(self, module: str, default: Any = None) -> Any:
        if not self and module not in NAMED_ALIKE:
            self.update(packages_distributions())
        return super().get(module, default)


def spare_unused_libraries() -> None:
    """Have transformers, which must not have been used yet, do without them."""
    if "transformers" not in sys.modules:
        setattr(importlib.metadata, "packages_distributions", Packages)  # noqa: B010  (mypy takes no other)
        try:
            import transformers  # noqa: F401
        finally:
            setattr(importlib.metadata, "packages_distributions", packages_distributions)  # noqa: B010
    from transformers import utils

    for name in ("is_sklearn_available", "is_scipy_available"):
        if hasattr(utils, name):  # another release may ask otherwise; then nothing is spared
            setattr(utils, name, _unavailable)


def _unavailable() -> bool:
    return False
