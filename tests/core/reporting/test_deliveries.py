"""Deliveries are summed by version, and only the newest are kept one by one."""

from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.reporting.deliveries import NEWEST, Deliveries


def test_versions_say_how_long_the_last_worker_took_and_what_the_origin_was_spared() -> None:
    deliveries = Deliveries()
    deliveries.add(DeliveryRecord(2, "w0", 3.0, bytes_from={"": 60, "w1": 20}), 10.0)
    deliveries.add(DeliveryRecord(2, "w1", 5.0, bytes_from={"w0": 80}), 8.0)
    deliveries.add(DeliveryRecord(1, "w0", 0.1), 7.0)
    first, second = deliveries.in_order()
    assert (first.version, first.bytes, first.relayed_share) == (1, 0, 0.0)
    assert (second.workers, second.seconds_to_last, second.at) == (2, 5.0, 10.0)
    assert (second.bytes, second.relayed_bytes, second.relayed_share) == (160, 100, 0.625)


def test_a_long_run_keeps_sums_of_what_is_past() -> None:
    deliveries = Deliveries()
    for version in range(3 * NEWEST):
        deliveries.add(DeliveryRecord(version, "w0", 1.0, bytes_from={"": 1}), float(version))
    assert len(deliveries.newest) == NEWEST
    assert len(deliveries.in_order()) == 3 * NEWEST
