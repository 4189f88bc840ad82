"""Published results: what is predicted has inputs and a band, what lacks one says why."""

from pathlib import Path

from antiphon.benchmarks.published_costs import consumer_gpus, hosted, others

ROWS = [*hosted(), consumer_gpus(), *others()]


def test_every_prediction_has_inputs_and_a_band_and_every_gap_a_reason() -> None:
    for row in ROWS:
        if row.predicted is None:
            assert row.note and not row.counted
        else:
            assert row.inputs and row.band is not None
            assert row.band[0] <= row.predicted <= row.band[1]


def test_figures_with_complete_inputs_are_within_15_percent() -> None:
    errors = [abs(row.error) for row in ROWS if row.counted and row.error is not None]
    assert len(errors) == 2 and max(errors) <= 0.15


def test_the_page_quotes_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "capacity.md").read_text(encoding="utf-8")
    hours, dollars = (row.predicted for row in ROWS[:2])
    assert f"{hours:.1f} h and ${dollars:.0f}" in page
