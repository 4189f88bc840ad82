"""Cancelled from its page: a run stops, unless only the end of its end is left."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from prefect.client.schemas.objects import StateType

from antiphon.flows import post_train
from antiphon.runs.live_run import LiveRun


class Server:
    """A Prefect server on which every flow run is being cancelled."""

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing."""

    def read_flow_run(self, _: UUID) -> Any:
        return SimpleNamespace(state=SimpleNamespace(type=StateType.CANCELLING))


@pytest.mark.parametrize("complete", [False, True])
def test_a_run_that_has_its_outcome_is_not_stopped_any_more(
    complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post_train, "get_client", lambda sync_client: Server())
    if complete:
        (tmp_path / "outcome.json").write_text("{}")
    reasons: list[str] = []
    run = SimpleNamespace(run_dir=tmp_path, wait_stopped=lambda _: bool(reasons), stop=reasons.append)
    post_train.watch_cancellation(cast("LiveRun", run), UUID(int=1))
    assert reasons == ([] if complete else [post_train.CANCEL_REASON])
