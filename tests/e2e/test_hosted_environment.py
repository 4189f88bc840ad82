"""A run whose environment is held by a program of the standard library: real engines, seats, the record."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from antiphon.benchmarks.parts import small_host
from antiphon.lineage.hosts import read_gateway
from tests.support.main_job import SMALL, Job, check_batches, make_home, typed
from tests.support.processes import command_of
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]
STEPS, SEATS = 3, 2
HOST = Path(small_host.__file__)


def hosts_of(job: Job) -> list[int]:
    """Return the processes of the run that hold its environment."""
    children = psutil.Process(job.process.pid).children(recursive=True)
    commands = {child.pid: command_of(child) for child in children}
    return [pid for pid, words in commands.items() if str(HOST) in words and "-c" not in words]


def test_a_run_trains_on_what_a_host_says_and_loses_nothing_when_hosts_and_the_gateway_die(
    standing: Standing, tmp_path: Path
) -> None:
    words = [
        "environment.name=host",
        f"environment.host_command={json.dumps([sys.executable, str(HOST)])}",
        f"environment.seats={SEATS}",
        f"environment.max_turns={small_host.TURNS}",
        f"evaluation.samples={SEATS}",
        "gateway.host_timeout_s=8",  # hosts beat every second, or later on a busy machine
        "algorithm.objective=grpo",
        f"run.steps={STEPS}",
        "record.mlflow=false",
        *SMALL,
        "sampling.max_tokens=8",
        "loop.filter=none",
    ]
    job = standing.start(make_home(tmp_path), words)
    try:
        job.when(lambda: (job.home / "runs").exists() and any((job.home / "runs").iterdir()))
        job.when(lambda: len(job.journal.events("turn.sampled")) > 5)
        for pid in hosts_of(job):
            os.kill(pid, signal.SIGKILL)
        job.reach(1)
        job.kill_service("reward")
        assert job.wait() == 0, job.everything()
        batches = job.batches()
        check_batches(batches, 2)
        assert len(batches) == STEPS
        for row in (row for batch in batches for row in batch):
            assert row.failure == "" and row.prompt_token_ids.size == 0
            assert row.finish_reason == "environment" and row.breaks == ()
            index = int(row.prompt_key.rpartition("-")[2])
            told = [row.token_ids[start:stop].tolist() for start, stop in row.observed]
            assert told == [small_host.observed(index, turn) for turn in range(small_host.TURNS)]
            last = row.token_ids[row.observed[-1][1] :]
            assert row.reward == pytest.approx(small_host.reward(last.tolist()))
        sampled = [
            (event["group_id"], event["sample_index"], event["start"])
            for event in job.journal.events("turn.sampled")
        ]
        assert len(sampled) == len(set(sampled)), "nothing was sampled twice"
        gateway = read_gateway(job.run_dir)
        assert len(gateway.hosts) >= 2
        assert sum(one.reported for one in gateway.hosts.values()) >= STEPS * 8 * 4 // SEATS
        assert not any(one.refused or one.failed for one in gateway.hosts.values())
        again = typed(job.home, "replay", job.run_dir.name, "--step", "0")
        assert again.returncode == 0 and "bit for bit" in again.stdout, again.stderr
    finally:
        job.close()
