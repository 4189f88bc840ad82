"""Spared: a library that others import where it is installed, and do without where it is not."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any


class _Hiding(MetaPathFinder):
    """Has Python find no library of one name in one thread."""

    def __init__(self, library: str) -> None:
        self._library, self._thread = library, threading.get_ident()

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == self._library and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is spared", name=fullname)


@contextmanager
def without(library: str) -> Iterator[None]:
    """Have what this thread imports meanwhile find no such library, unless it is imported already.

    Others find it: while Prefect loads in a thread, an environment of the user's may need that very library.

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
