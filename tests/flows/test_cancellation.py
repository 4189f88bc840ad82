"""Cancelled from its page: a run stops, unless only the end of its end is left."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Cancelling

from antiphon.core.reporting.run_display import RunDisplay
from antiphon.flows.run_page import CANCEL_REASON, RunPage
from antiphon.flows.told import ToldView
from antiphon.runs.live_run import LiveRun


class Server:
    """A Prefect server on which every flow run is being cancelled."""

    def read_flow_run(self, _: UUID) -> Any:
        return SimpleNamespace(state=Cancelling())


@pytest.mark.parametrize("complete", [False, True])
def test_a_run_that_has_its_outcome_is_not_stopped_any_more(complete: bool, tmp_path: Path) -> None:
    if complete:
        (tmp_path / "outcome.json").write_text("{}")
    reasons: list[str] = []
    run = cast("LiveRun", SimpleNamespace(run_dir=tmp_path, stop_reason="", stop=reasons.append))
    RunPage(run, ToldView(RunDisplay()), UUID(int=1)).heed(cast("SyncPrefectClient", Server()))
    assert reasons == ([] if complete else [CANCEL_REASON])
    assert (tmp_path / "cancelled").exists() is not complete
