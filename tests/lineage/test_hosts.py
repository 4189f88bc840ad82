"""What is known of hosts stays in the run's folder, and a run that waits for one says so."""

from pathlib import Path

import pytest

from antiphon.core.status import RunStatus
from antiphon.lineage import hosts
from antiphon.lineage.hosts import GatewayRecord, HostCounts, read_gateway, waiting_for_host, write_gateway

NOW = 1000.0


def test_a_run_waits_for_a_host_where_none_was_heard_lately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "wall_clock", lambda: NOW)
    status = RunStatus("run-1", 4, 0, 1, 0, 0, 3, 0, 0, 0, 0, 0, 0, waiting="a batch")
    assert waiting_for_host(status, tmp_path, 60.0) is status and read_gateway(tmp_path) == GatewayRecord()
    for seen_at, untaken, waits in (
        (0.0, 3, True),
        (NOW - 61.0, 3, True),
        (NOW - 59.0, 3, False),
        (0.0, 0, False),
    ):
        record = GatewayRecord("http://127.0.0.1:7", {"h": HostCounts(4, 2, 1, 1, 0, seen_at)}, untaken)
        write_gateway(tmp_path, record)
        assert read_gateway(tmp_path) == record
        found = waiting_for_host(status, tmp_path, 60.0).waiting
        assert found == (
            "a host of the environment to take 3 groups: none is there at http://127.0.0.1:7"
            if waits
            else "a batch"
        )
    assert record.lines() == [
        "host h: 4 episodes taken, 2 reported, 1 failed, 1 reports refused, 0 lost by silence"
    ]
