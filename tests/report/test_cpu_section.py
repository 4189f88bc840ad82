"""CPU section: what is kept at the end of a run is what its report says."""

from pathlib import Path

from antiphon.report.cpu_section import cpu_rows, outside_share, write_cpu_seconds


def test_the_largest_comes_first_and_the_rest_is_summed(tmp_path: Path) -> None:
    assert cpu_rows(tmp_path) == []
    write_cpu_seconds(tmp_path, {"flow": 1.0, "workers": 6.0, "learner": 2.0, "prefect": 1.0})
    rows = cpu_rows(tmp_path)
    assert [row[0] for row in rows[:2]] == ["workers", "learner"]
    assert rows[0][1] == "6.0" and rows[-1][:2] == ("outside of workers and learner", "2.0")


def test_nothing_counted_has_no_share() -> None:
    assert outside_share({}) == 0.0 == outside_share({"workers": 3.0})
