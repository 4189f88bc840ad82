"""Simulated runs say nothing: their logs would be most of what a failed test shows."""

import pytest

from antiphon.simulator.campaign import mute_logs


@pytest.fixture(autouse=True)
def quiet(logs_as_they_were: None) -> None:
    mute_logs()
