"""Weights section of the report: how versions came to the workers, from whom, and how long it took."""

from collections.abc import Sequence

from antiphon.core.dissemination.plan import ORIGIN
from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.reporting.deliveries import Deliveries
from antiphon.report.canvas import BLUE, GREEN, MUTED, ORANGE, Plot
from antiphon.report.line_panels import Panel, Series, draw_panels

ROWS = 40
"""Deliveries in the table, the newest."""
SOURCES = 4
"""Sources that one row names, those that sent most."""
COLUMNS = (
    *("version", "worker", "MB", "from, MB", "first chunk, s", "last chunk, s", "verified, s", "loaded, s"),
    "sent wrong",
)


def deliveries_plot(deliveries: Deliveries) -> Plot | None:
    """Draw how long each version took to its slowest worker, and its bytes; None without deliveries."""
    versions = deliveries.in_order()
    if not versions:
        return None

    def series(name: str, colour: str, values: Sequence[float], hidden: bool = False) -> Series:
        points = [(float(known.version), value) for known, value in zip(versions, values, strict=True)]
        return Series(name, colour, points, hidden=hidden)

    seconds = [
        series("seconds to the last worker", ORANGE, [known.seconds_to_last for known in versions]),
        series("workers", MUTED, [float(known.workers) for known in versions], hidden=True),
    ]
    relayed = [known.relayed_bytes / 1e6 for known in versions]
    sent = [
        series(
            "from the origin, MB", BLUE, [(known.bytes - known.relayed_bytes) / 1e6 for known in versions]
        ),
        series("from other sources, MB", GREEN, relayed),
    ]
    panels = [
        Panel("policy version", seconds, y="seconds", low=0, whole=True),
        Panel("policy version", sent, y="MB to all workers", low=0, whole=True),
    ]
    label = "Seconds until the last worker had each version, and the bytes that went to the workers"
    return draw_panels("deliveries", label, panels, height_in=3.0)


def deliveries_rows(deliveries: Deliveries) -> list[tuple[object, ...]]:
    """Return the newest deliveries as rows of `COLUMNS`, the newest first."""
    return [_row(delivery) for delivery in reversed([*deliveries.newest][-ROWS:])]


def _row(delivery: DeliveryRecord) -> tuple[object, ...]:
    wrong = "; ".join(f"{_name(source)} {what}" for source, what in sorted(delivery.culprits.items()))
    return (
        delivery.version,
        delivery.worker_id,
        f"{delivery.bytes / 1e6:,.1f}",
        _sources(delivery),
        f"{delivery.first_chunk_s:.2f}",
        f"{delivery.seconds:.2f}",
        f"{delivery.verify_s:.2f}" if delivery.verify_s else "",
        f"{delivery.load_s:.2f}" if delivery.load_s else "",
        wrong,
    )


def _sources(delivery: DeliveryRecord) -> str:
    if not delivery.bytes_from:
        return "linked on the origin's machine"
    most = sorted(delivery.bytes_from.items(), key=lambda entry: (-entry[1], entry[0]))
    named = [f"{_name(source)} {sent / 1e6:,.1f}" for source, sent in most[:SOURCES]]
    if others := most[SOURCES:]:
        named.append(f"{len(others)} others {sum(sent for _, sent in others) / 1e6:,.1f}")
    return ", ".join(named)


def _name(source: str) -> str:
    return "origin" if source == ORIGIN else source
