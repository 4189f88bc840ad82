"""The synchronous loop: its figures are true, and the same in every view."""

from pathlib import Path

import pytest

from tests.support.figure_views import check_against_the_journal, check_views
from tests.support.main_job import SMALL, Job, make_home

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(600)]
STEPS = 3


def test_a_synchronous_run_has_the_same_figures_in_every_view(tmp_path: Path) -> None:
    overrides = [f"run.steps={STEPS}", "loop.max_staleness=0", "record.dvc=false", *SMALL]
    job = Job(make_home(tmp_path), overrides)
    try:
        assert job.wait() == 0, job.everything()
        figures = check_views(job, tmp_path)
    finally:
        job.close()
    check_against_the_journal(job, figures)
    assert figures.steps == STEPS
    assert (
        figures.staleness_max == 0
        and figures.staleness_mean == 0.0
        and set(figures.staleness_histogram) == {0}
    )
