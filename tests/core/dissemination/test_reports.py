"""A worker tells the coordinator each delivery once, and everything again when it was forgotten."""

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.dissemination.reports import DeliveryRecord, NetworkLog, check_report


def test_a_delivery_is_told_once_complete_and_once() -> None:
    log = NetworkLog()
    log.round_trip(0.3)
    log.round_trip(0.1)
    log.delivered(DeliveryRecord(3, "", 2.0, 0.5, {"": 100}, {"": 60.0}))
    log.delivered(
        DeliveryRecord(3, "", 1.0, 0.2, {"": 50, "w-1": 20}, {"": 40.0}, {"w-1": "sent chunk 2 altered"})
    )
    told = log.report()
    assert told is not None and told.round_trip_s == 0.1 and told.down_bytes_per_s == 70.0
    assert told.deliveries == ()  # it was not loaded yet
    log.confirmed(told)
    assert log.report() is None
    log.loaded(3, 0.25, 0.75)
    told = log.report()
    assert told is not None
    assert told.deliveries == (
        DeliveryRecord(
            3, "", 3.0, 0.5, {"": 150, "w-1": 20}, {"": 60.0}, {"w-1": "sent chunk 2 altered"}, 0.25, 0.75
        ),
    )
    assert log.report() == told  # until it is confirmed
    log.confirmed(told)
    assert log.report() is None
    log.forgotten()
    again = log.report()
    assert again is not None and again.deliveries == () and again.down_bytes_per_s == 70.0


def test_a_version_that_was_never_loaded_is_told_with_the_next_that_is() -> None:
    log = NetworkLog()
    log.delivered(DeliveryRecord(1, "", 1.0))
    log.delivered(DeliveryRecord(2, "", 1.0))
    log.loaded(2, 0.1, 0.2)
    told = log.report()
    assert told is not None
    assert [(one.version, one.load_s) for one in told.deliveries] == [(1, 0.0), (2, 0.2)]


_names = st.text(st.sampled_from("abc-1"), min_size=1, max_size=8)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.dictionaries(_names, st.integers(0, 10**9), max_size=20))),
    st.dictionaries(_names, st.text(max_size=400), max_size=30),
)
def test_whatever_was_measured_the_report_is_well_formed(
    came: list[tuple[int, dict[str, int]]], culprits: dict[str, str]
) -> None:
    log = NetworkLog(culprits=culprits)
    for version, sent in came:
        log.delivered(
            DeliveryRecord(
                version, "", 0.5, 0.1, sent, {name: float(count) for name, count in sent.items()}, culprits
            )
        )
        log.loaded(version, 0.1, 0.1)
    log.held = tuple(f"{number:064x}" for number in range(100))
    while (told := log.report()) is not None:
        check_report(told)
        log.confirmed(told)
