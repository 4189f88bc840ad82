"""One living process for each name, and no worker of a class without the device that it promises."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.requests import WorkerHeartbeat
from antiphon.core.status import OrderState, WorkerOrder
from tests.support.light_parties import hello, served
from tests.support.loop_model import make_config


def beat(worker_id: str) -> WorkerHeartbeat:
    return WorkerHeartbeat(worker_id, None, None, (), 0, 0.0, 0.0)


def test_a_second_process_of_a_name_waits_until_the_first_is_gone(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(make_config(), tmp_path) as site:
            first, second = site.client(), site.client()
            one, other = replace(hello("w"), instance="a"), replace(hello("w"), instance="b")
            welcome = await first.register(one)
            await first.heartbeat(beat(welcome.worker_id))
            with pytest.raises(UnavailableError, match="takes part already, as another process"):
                await second.register(other)
            again = await first.register(one)  # as after a restart of the coordinator
            assert again.worker_id == "w-2"
            await first.heartbeat(beat(again.worker_id))
            with pytest.raises(UnavailableError, match="takes part already"):
                await second.register(other)
            await first.close()  # as the system does when a process is killed
            async with asyncio.timeout(10.0):
                while True:
                    try:
                        welcome = await second.register(other)
                        break
                    except UnavailableError:
                        await asyncio.sleep(0.01)
            assert welcome.worker_id == "w-3" and (await second.heartbeat(beat("w-3"))).known

    asyncio.run(run())


def promising() -> RunConfig:
    pool = [{"name": "a100", "usd_per_hour": 1.0, "count": 2, "device": "gpu"}]
    plain = yaml.safe_load(dump_config(make_config()))
    return build_config({**plain, "provisioning": {"pool": pool}})


def test_a_worker_without_the_device_of_its_class_is_turned_away_and_its_order_ends(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(promising(), tmp_path) as site:
            client = site.client()
            await client.note_orders([WorkerOrder("a100-0", OrderState.UP, "job 7")])
            with pytest.raises(ContractError, match="a100 promises a GPU, and a100-0 found none"):
                await client.register(hello("a100-0"))
            (order,) = (await client.status()).orders
            assert order.state is OrderState.STOPPING and "found none" in order.reason
            await client.register(replace(hello("a100-1"), device="gpu"))
            await client.register(hello("another"))
            with pytest.raises(ContractError, match="is no worker"):
                await client.note_orders([WorkerOrder("another", OrderState.UP)])

    asyncio.run(run())
