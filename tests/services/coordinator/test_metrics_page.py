"""The page for Prometheus says what the coordinator says, and a taken port is named."""

import asyncio
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.core.errors import ConfigError
from antiphon.core.reporting.alarms import ALARMS
from antiphon.services.coordinator.metrics_page import metrics_page
from tests.support.light_parties import run_parties, served
from tests.support.loop_model import make_config

CONFIG = make_config(steps=4, max_staleness=1, filter_="none")

GROWING = {"antiphon_worker_seconds_since_heartbeat", "antiphon_work_seconds"}
"""What passes between two looks."""


def listening(port):
    services = CONFIG.services.model_copy(update={"metrics_port": port})
    return CONFIG.model_copy(update={"services": services})


def read(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
        text = reply.read().decode()
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_says_what_the_coordinator_says(tmp_path):
    async def act():
        async with served(CONFIG, tmp_path) as site:
            client = site.client()
            await run_parties(client, CONFIG, seed=1)
            status = await client.status()
            async with metrics_page(client, listening(0)) as port:
                found = await asyncio.to_thread(read, port)
                # A scrape is a look: a second one says the same.
                again = await asyncio.to_thread(read, port)
        assert {k: v for k, v in found.items() if k[0] not in GROWING} == {
            k: v for k, v in again.items() if k[0] not in GROWING
        }
        assert found["antiphon_up",] == 1.0
        assert found["antiphon_steps_total",] == status.committed_steps == 4
        assert found["antiphon_groups_filtered_total",] == status.groups_filtered
        trained = {k[1]: v for k, v in found.items() if k[0] == "antiphon_trajectories_trained"}
        assert trained == {str(k): v for k, v in status.staleness_histogram.items()}
        work = {k[1]: v for k, v in found.items() if k[0] == "antiphon_work_tokens"}
        assert work == {use: float(tokens) for use, tokens in status.tokens_by_use.items()}
        assert work["useful"] > 0 and found["antiphon_work_seconds", "useful"] > 0
        workers = {k[1] for k in found if k[0] == "antiphon_worker_tokens_generated"}
        assert workers == {worker.worker_id for worker in status.workers}
        alarms = {k[1]: v for k, v in found.items() if k[0] == "antiphon_alarm"}
        assert alarms == {kind.name: 0.0 for kind in ALARMS}

    asyncio.run(act())


def test_without_a_port_there_is_no_page_and_a_taken_one_is_named():
    async def act():
        async with metrics_page(None, CONFIG) as port:
            assert port is None
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            with pytest.raises(ConfigError, match=f"services.metrics_port={taken} cannot be used"):
                async with metrics_page(None, listening(taken)):
                    raise AssertionError("two servers on one port")

    asyncio.run(act())


def test_a_coordinator_that_does_not_answer_is_down_on_its_page(monkeypatch):
    class Silent:
        async def status(self):
            await asyncio.sleep(60.0)

    monkeypatch.setattr("antiphon.services.coordinator.metrics_page.ANSWER_S", 0.05)

    async def act():
        async with metrics_page(Silent(), listening(0)) as port:
            assert await asyncio.to_thread(read, port) == {("antiphon_up",): 0.0}

    asyncio.run(act())
