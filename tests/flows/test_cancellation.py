"""Cancelled from its page: a run stops, unless only the end of its end is left."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelling

from antiphon.core.reporting.run_display import RunDisplay
from antiphon.flows.run_page import CANCEL_REASON, RunPage
from antiphon.flows.told import ToldView
from antiphon.runs.live_run import LiveRun


class Server:
    """A Prefect server on which every flow run is being cancelled."""

    def __init__(self, refused: int = 0) -> None:
        """Lines of the log are refused with this status."""
        self.refused, self.lines, self.asked = refused, list[str](), threading.Event()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update_flow_run(self, *_: object, **__: object) -> None:
        pass

    def create_logs(self, logs: list[dict[str, Any]]) -> None:
        self.asked.set()
        request = httpx.Request("POST", "http://127.0.0.1/api/logs", json=logs)
        if self.refused:
            answer = httpx.Response(self.refused, request=request)
            self.refused = 0
            raise PrefectHTTPStatusError("refused", request=request, response=answer)
        self.lines += [log["message"] for log in logs]

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


@pytest.mark.parametrize("trouble", ["disk", "drawing", "refused"])
def test_a_cancellation_is_heeded_whatever_else_fails(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a page that cannot be drawn, lines that the server refuses: the next look comes anyway."""
    stopped = threading.Event()
    folder = tmp_path / "missing" if trouble == "disk" else tmp_path
    view = SimpleNamespace(steps=[], evaluations=[])
    run = SimpleNamespace(run_id="r-1", run_dir=folder, stop_reason="", view=view, config=None)
    run.stop = lambda _: stopped.set()
    told, server = ToldView(RunDisplay()), Server(422 if trouble == "refused" else 0)
    told.say("weights are missing: /data/caf\udce9/v1")
    monkeypatch.setattr("antiphon.flows.run_page.get_client", lambda sync_client: server)
    monkeypatch.setattr("antiphon.flows.run_page.PAGE_S", 0.01)
    if trouble != "drawing":
        monkeypatch.setattr(RunPage, "_write", lambda *_: None)
    with RunPage(cast("LiveRun", run), told, UUID(int=1)):
        assert stopped.wait(30.0) and server.asked.wait(30.0)
        told.say("after that")
    assert "after that" in server.lines
