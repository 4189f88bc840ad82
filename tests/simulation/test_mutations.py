"""The invariants bite: production code is broken on purpose, and some seed sees it."""

from collections.abc import Callable

import pytest

from antiphon.benchmarks.parts.mutations import MOST_SEEDS, MUTATIONS, Patch, survives


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_promise_is_found(
    mutation: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = survives(mutation, monkeypatch)
    assert seen is None, f"{MOST_SEEDS} seeds did not see it; they saw {seen}"
