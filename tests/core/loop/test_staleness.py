"""The bound is kept at the source and at assembly, and the fixed rule always finds a version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError
from antiphon.core.loop.staleness import StalenessBound, VersionWindow, oldest_allowed_version

GRID = [(kappa, bound) for kappa in range(1, 5) for bound in range(7) if bound >= kappa - 1]


@pytest.mark.parametrize(("kappa", "bound"), GRID)
def test_oldest_allowed_version_is_published_exists_and_stays_within_the_bound(
    kappa: int, bound: int
) -> None:
    for step in range(60):
        version = oldest_allowed_version(step, bound, kappa)
        assert version % kappa == 0
        assert 0 <= version <= step  # made by step version - 1, so it exists when the step trains
        assert step - version <= bound
        assert VersionWindow(step - bound).admits(version)
        older = version - kappa
        assert older < 0 or step - older > bound  # the oldest one that is allowed


@pytest.mark.parametrize(("kappa", "bound"), GRID)
def test_oldest_allowed_version_never_falls(kappa: int, bound: int) -> None:
    versions = [oldest_allowed_version(step, bound, kappa) for step in range(60)]
    assert versions == sorted(versions)


@pytest.mark.parametrize("kappa", range(1, 5))
@pytest.mark.parametrize("bound", range(7))
@pytest.mark.parametrize("mode", ["elastic", "fixed"])
def test_a_publish_interval_beyond_the_bound_is_refused(kappa: int, bound: int, mode: str) -> None:
    tree = {
        "loop": {"mode": mode, "max_staleness": bound, "publish_interval": kappa},
        "broadcast": {"snapshots_kept": bound + 2},
    }
    if bound >= kappa - 1:
        build_config(tree)
        return
    with pytest.raises(ConfigError, match=rf"publish_interval={kappa} needs .* >= {kappa - 1}, but it is"):
        build_config(tree)
    assert any(oldest_allowed_version(step, bound, kappa) > step for step in range(60))


@given(st.integers(0, 50), st.integers(0, 500), st.integers(1, 40), st.integers(1, 40), st.integers(0, 6))
def test_room_is_the_most_that_the_gate_grants(
    held: int, issued: int, groups: int, places: int, bound: int
) -> None:
    gate = StalenessBound(bound)
    last = (issued + groups - 1) // places  # the step at which the last of them trains
    assert VersionWindow(last - bound).admits(held) == (groups <= gate.room(held, issued, places))
