"""One finished run of the main job for all tests that only look at it, and what many runs share."""

from collections.abc import Iterator

import pytest

from tests.support.main_job import MAIN_STALENESS, MAIN_STEPS, SMALL, Job, make_home
from tests.support.standing import Standing


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A finished run; the one that wants to change anything takes a copy."""
    home = make_home(tmp_path_factory.mktemp("main"))
    job = Job(home, [f"run.steps={MAIN_STEPS}", f"loop.max_staleness={MAIN_STALENESS}", *SMALL])
    try:
        assert job.wait() == 0, job.everything()
        yield job
    finally:
        job.close()


@pytest.fixture(scope="session")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """A worker and a Prefect server for runs that ask nothing of them that their start has a part in."""
    found = Standing(tmp_path_factory.mktemp("standing"))
    try:
        yield found
    finally:
        found.close()
