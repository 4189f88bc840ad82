"""An engine that brings no token for a multiple of the usual pause is found, and none that works is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.loop.leases import PAUSES_NEEDED, EngineSign, EngineWatch, UsualPause

HEARTBEAT_S, LEASE_S, FACTOR, LONGEST_S = 2.0, 30.0, 5.0, 300.0


def sign(
    tokens: int = 0,
    *,
    gained: bool = False,
    busy_s: float = 0.0,
    version: int = 0,
    sampling: bool = True,
    leased: bool = True,
    attempts: int = 0,
) -> EngineSign:
    return EngineSign(tokens, gained, busy_s, version, sampling, leased, attempts)


class Fleet:
    """Workers whose heartbeats come at the usual pace."""

    def __init__(self, steps_are_tokens: bool = False) -> None:
        self.watch = EngineWatch(HEARTBEAT_S, LEASE_S, FACTOR, LONGEST_S, steps_are_tokens)
        self.now = 0.0

    def beat(self, said: EngineSign, worker: str = "w", after_s: float = HEARTBEAT_S) -> bool:
        self.now += after_s
        return self.watch.hear(worker, said, self.now)

    def learn(self, pause_s: float = HEARTBEAT_S) -> None:
        """Hear what is usual from another worker."""
        for _ in range(PAUSES_NEEDED + 1):
            assert not self.beat(sign(gained=True), "other", after_s=pause_s)

    def silent_until_hung(self, said: EngineSign, worker: str = "w") -> float:
        self.beat(said, worker)
        began = self.now
        while not self.beat(said, worker):
            assert self.now < 1e5
        return self.now - began


def test_the_usual_pause_is_measured() -> None:
    usual = UsualPause(shortest_s=2.0, unknown_s=30.0)
    for _ in range(PAUSES_NEEDED - 1):
        usual.add(0.5)
    assert usual.seconds == 30.0
    usual.add(0.5)
    assert usual.seconds == 2.0  # heartbeats tell no shorter ones
    for _ in range(10):
        usual.add(7.0)
    assert usual.seconds == 7.0


def test_silence_ends_after_a_multiple_of_the_usual_pause() -> None:
    fleet = Fleet()
    assert fleet.silent_until_hung(sign()) == LEASE_S  # nothing is known yet
    fleet = Fleet()
    fleet.learn()
    assert fleet.silent_until_hung(sign()) == FACTOR * HEARTBEAT_S
    assert fleet.watch.stands_still_s("w") == FACTOR * HEARTBEAT_S
    assert fleet.watch.stands_still_s("other") == 0.0
    fleet = Fleet()
    fleet.learn(pause_s=5.0)
    assert fleet.silent_until_hung(sign()) == pytest.approx(FACTOR * 5.0, abs=HEARTBEAT_S)


def test_tokens_of_any_lease_are_life_and_finished_completions_count() -> None:
    fleet = Fleet()
    fleet.learn()
    for count in range(200):
        quiet = [fleet.beat(sign(count)) for _ in range(4)]
        assert not any([*quiet, fleet.beat(sign(count + 1)), fleet.beat(sign(count + 1, gained=True))])


def test_weights_and_uploads_have_the_patience_of_their_own() -> None:
    for said in (sign(sampling=False),):
        fleet = Fleet()
        fleet.learn()
        assert fleet.silent_until_hung(said) == LONGEST_S
    fleet = Fleet()
    fleet.learn()
    for version in range(100):  # weights that are loaded are a sign of life too
        assert not any(fleet.beat(sign(version=version)) for _ in range(5))


def test_without_leases_or_heartbeats_nothing_hangs() -> None:
    fleet = Fleet()
    fleet.learn()
    assert not any(fleet.beat(sign(leased=False)) for _ in range(50))
    fleet.beat(sign())
    assert not fleet.beat(sign(), after_s=1000.0)  # the worker was not heard, or the coordinator slept
    assert fleet.beat(sign()) or fleet.beat(sign())


def test_silence_outlasts_leases_that_end_for_another_reason() -> None:
    fleet = Fleet()
    fleet.learn()
    for _ in range(int(FACTOR) // 2):  # too old for every step before they were waited for long enough
        assert not any([fleet.beat(sign()), fleet.beat(sign()), fleet.beat(sign(leased=False))])
    assert fleet.silent_until_hung(sign()) < FACTOR * HEARTBEAT_S


def test_a_hung_engine_gets_nothing_then_one_lease_then_all() -> None:
    fleet = Fleet()
    fleet.learn()
    fleet.silent_until_hung(sign())
    assert fleet.watch.most_leases("w") == 0 and fleet.watch.most_leases("other") is None
    assert not any(fleet.beat(sign(leased=False)) for _ in range(20))
    assert fleet.watch.most_leases("w") == 0
    assert fleet.watch.stands_still_s("w") == (FACTOR + 20) * HEARTBEAT_S
    assert not fleet.beat(sign(leased=False, busy_s=1.0))  # its step came to an end after all
    assert fleet.watch.most_leases("w") == 1
    assert fleet.silent_until_hung(sign(busy_s=1.0)) == FACTOR * HEARTBEAT_S
    assert fleet.watch.most_leases("w") == 0
    assert not fleet.beat(sign(gained=True))
    assert fleet.watch.most_leases("w") is None and fleet.watch.stands_still_s("w") == 0.0
    fleet.silent_until_hung(sign())
    fleet.watch.forget("w")
    assert fleet.watch.most_leases("w") is None


def test_a_group_that_engines_stood_still_with_is_waited_for_longer() -> None:
    fleet = Fleet()
    fleet.learn()
    waits = [fleet.silent_until_hung(sign(attempts=n), f"w{n}") for n in (0, 1, 2, 6, 60)]
    assert waits == [FACTOR * HEARTBEAT_S * doubled for doubled in (1, 2, 4, 64, 64)]


def test_steps_are_life_where_unfinished_completions_are_not_reported() -> None:
    fleet = Fleet(steps_are_tokens=True)
    for step in range(200):
        assert not fleet.beat(sign(busy_s=float(step)))
    assert fleet.silent_until_hung(sign(busy_s=200.0)) == FACTOR * HEARTBEAT_S
    fleet = Fleet()
    fleet.learn()
    assert any(fleet.beat(sign(busy_s=float(step))) for step in range(7))  # steps without a token


@given(st.lists(st.integers(1, 4), min_size=1, max_size=200), st.integers(0, 30))
def test_no_engine_that_works_is_found_and_each_that_hangs_is(gaps: list[int], idle: int) -> None:
    fleet = Fleet()
    fleet.learn()
    for gap in gaps:  # beats until the next token
        assert not any(fleet.beat(sign()) for _ in range(gap - 1)) and not fleet.beat(sign(gained=True))
    for _ in range(idle):
        assert not fleet.beat(sign(leased=False))
    usual_s = fleet.watch.usual.seconds
    assert HEARTBEAT_S <= usual_s <= 4 * HEARTBEAT_S
    assert fleet.silent_until_hung(sign()) <= FACTOR * usual_s + HEARTBEAT_S
