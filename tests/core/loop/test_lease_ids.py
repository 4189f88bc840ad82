"""A lease id names one attempt, and no one works it out without the run's key."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.loop.admission import lease_id_of

KEYS = st.binary(min_size=32, max_size=32)
ATTEMPTS = st.tuples(st.sampled_from(["g0000001", "g0000011", "s000001-g001"]), st.integers(1, 120))


@given(key=KEYS, first=ATTEMPTS, second=ATTEMPTS)
def test_each_attempt_has_an_id_of_its_own(
    key: bytes, first: tuple[str, int], second: tuple[str, int]
) -> None:
    assert (lease_id_of(key, *first) == lease_id_of(key, *second)) == (first == second)


@given(key=KEYS, other=KEYS, attempt=ATTEMPTS)
def test_another_key_gives_other_ids(key: bytes, other: bytes, attempt: tuple[str, int]) -> None:
    assert (lease_id_of(key, *attempt) == lease_id_of(other, *attempt)) == (key == other)
    assert len(bytes.fromhex(lease_id_of(key, *attempt))) == 16
