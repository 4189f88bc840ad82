"""Engines in the process of the tests begin and end as quickly as in one of their own."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def what_was_loaded_is_no_garbage() -> Iterator[None]:
    """vLLM collects some ten times for an engine, and at its end unfreezes all: here much more is loaded."""
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield
