"""A call is repeated while its peer is away, with pauses that grow and that chance spreads."""

import asyncio

import pytest

from antiphon.core.errors import BlockedError, ContractError, UnavailableError
from antiphon.net.rpc.retry import FIRST_PAUSE_S, JITTER, MOST_PAUSE_S, pause_s, retry_unavailable


def test_pauses_grow_to_a_limit_and_differ_between_callers() -> None:
    for attempt in range(1, 40):
        longest = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
        found = [pause_s(f"w{i}", "coordinator.heartbeat", attempt) for i in range(32)]
        assert all((1 - JITTER) * longest <= pause <= longest for pause in found)
        assert len(set(found)) == 32
    assert pause_s("w0", "call", 3) == pause_s("w0", "call", 3)  # a simulation repeats it


def test_only_an_absent_peer_is_asked_again_and_not_for_ever() -> None:
    asked: list[str] = []

    async def away() -> None:
        asked.append("away")
        raise UnavailableError("nobody listens")

    async def refuses() -> None:
        asked.append("refuses")
        raise ContractError("another run")

    async def comes_back() -> int:
        asked.append("back")
        if asked.count("back") < 3:
            raise UnavailableError("nobody listens")
        return 7

    async def story() -> None:
        with pytest.raises(UnavailableError, match=r"coordinator.pull had no answer for 0.3 s \(nobody"):
            await retry_unavailable("coordinator.pull", away, 0.3, "w0")
        assert asked.count("away") >= 2
        with pytest.raises(ContractError, match="another run"):
            await retry_unavailable("coordinator.pull", refuses, 5.0)
        assert asked.count("refuses") == 1
        assert await retry_unavailable("coordinator.pull", lambda: comes_back(), 5.0) == 7

    asyncio.run(story())


def test_a_peer_that_is_blocked_is_not_away() -> None:
    """Its outage has a patience of its own, and absence before and after it is counted again."""
    left = 30

    async def blocked() -> int:
        nonlocal left
        left -= 1
        if left:
            raise BlockedError("no space is left")
        return 7

    async def story() -> None:
        with pytest.raises(BlockedError, match="no space is left"):
            await retry_unavailable("coordinator.commit", blocked, 60.0, outage_s=0.3)
        assert 0 < left < 30
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("antiphon.net.rpc.retry.MOST_PAUSE_S", 0.02)
            assert await retry_unavailable("coordinator.commit", blocked, 0.05) == 7

    asyncio.run(story())
