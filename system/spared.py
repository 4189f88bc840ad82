"""Spared: a library that others import where it is installed, and do without where it is not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any


class _Hiding(MetaPathFinder):
    """Has Python find no library of one name."""

    def __init__(self, library: str) -> None:
        self._library = library

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == self._library:
            raise ModuleNotFoundError(f"{fullname} is spared", name=fullname)


@contextmanager
def without(library: str) -> Iterator[None]:
    """Have what is imported here find no such library, unless it is imported already.

    >>> with without("cProfile"):
    ...     import cProfile
    Traceback (most recent call last):
    ModuleNotFoundError: cProfile is spared
    """
    hiding = _Hiding(library)
    sys.meta_path.insert(0, hiding)
    try:
        yield
    finally:
        sys.meta_path.remove(hiding)
