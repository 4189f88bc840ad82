"""Commands: what a person asks of a pool's engines without a flow: is all there, what runs, stop it."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from antiphon.core.capacity.order_book import Instance
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.core.config import RunConfig, dump_config, load_config
from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError
from antiphon.core.requests import HeartbeatReply, WorkerHeartbeat, WorkerHello, WorkerWelcome
from antiphon.core.status import OrderState, WorkerOrder
from antiphon.net.rpc.serving import Security, start_server, stop_server
from antiphon.net.security.access_tokens import load_claims
from antiphon.net.security.credentials import find_credentials, read_token
from antiphon.net.security.guard import Guard
from antiphon.runs.attach import attached
from antiphon.runs.fleet.engines import make_launcher
from antiphon.runs.fleet.launcher import Launcher, LaunchSite, elsewhere, launch_site
from antiphon.services.coordinator.server import register_coordinator
from antiphon.system.clock import wall_clock

LIST_S = 60.0
"""Longest wait for an engine's list, or for what it lacks."""
AFTER_GRACE_S = 60.0
"""What an engine has beyond the grace time to end an instance."""
LOOK_S = 1.0
"""Pause between two lists while something is waited for."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One worker of the pool: what the journal knows of it, and what its engine says."""

    worker: str
    noted: OrderState | None
    """None for one that nobody ordered."""
    instance: Instance | None
    """None where the engine lists none."""
    reason: str = ""


class _Greeting:
    """Of a coordinator what lets workers in and out again; it remembers them."""

    def __init__(self, config: RunConfig) -> None:
        self.greeted: dict[str, WorkerHello] = {}
        self.news = asyncio.Event()
        self._config = config

    async def register(self, hello: WorkerHello) -> WorkerWelcome:
        self.greeted[hello.worker_name] = hello
        self.news.set()
        return WorkerWelcome(f"{hello.worker_name}-1", hello.run_id, dump_config(self._config), 2.0)

    async def heartbeat(self, heartbeat: WorkerHeartbeat) -> HeartbeatReply:
        return HeartbeatReply(True, (), None, True)


async def check_fleet(config: RunConfig, folder: Path, limit_s: float) -> list[tuple[str, list[str], str]]:
    """Have each class's engine start one worker that registers with this process and leaves.

    Args:
        config: of a run that is not under way: this process listens where its coordinator would.
        folder: an empty one, for what launchers keep.
        limit_s: longest wait for the worker of a class.

    Returns:
        Of each class that is started elsewhere its name, what is missing in sentences, and what was seen.

    Raises:
        ConfigError: when the services themselves cannot be reached by workers elsewhere.
    """
    classes = elsewhere(config)
    credentials = find_credentials(config.services.credentials)
    address = f"{config.services.reached_at}:{config.services.coordinator_port}"
    site = launch_site(config, "check", folder, address)
    if not classes:
        return []
    first = site.order(classes[0].workers[0])  # tells what credentials lack before anything listens
    claims = load_claims(read_token(first.bundle / "token"), None)
    run_id = "check" if claims.run_id == "*" else claims.run_id
    site = replace(site, run_id=run_id)
    if credentials is None or credentials.token_key is None:
        raise ConfigError(
            "services.credentials is no bundle of services; `antiphon invite` makes keys/services"
        )
    guard = Guard(credentials.token_key, run_id, wall_clock, asyncio.get_running_loop().time)
    greeting = _Greeting(config)
    server, _ = await start_server(
        config.services.host,
        config.services.coordinator_port,
        lambda serving: register_coordinator(serving, cast(Any, greeting)),
        ["antiphon.Coordinator"],
        Security(credentials, guard),
    )
    try:
        return [(one.name, *await _check_class(one, site, greeting, limit_s)) for one in classes]
    finally:
        await stop_server(server, 0.5)


async def _check_class(
    one: PoolClass, site: LaunchSite, greeting: _Greeting, limit_s: float
) -> tuple[list[str], str]:
    worker, began_s = one.workers[0], time.monotonic()
    try:
        launcher = make_launcher(one, site)
        if missing := await _bounded(launcher.missing(), LIST_S, one.name):
            return missing, ""
        site.order(worker)
        order = site.draft(worker, "--check")
    except AntiphonError as error:
        return [str(error)], ""
    try:
        started = await _bounded(launcher.start(order), limit_s, one.name)
        while worker not in greeting.greeted and time.monotonic() - began_s < limit_s:
            greeting.news.clear()
            try:
                await asyncio.wait_for(greeting.news.wait(), LOOK_S)
            except TimeoutError:
                listed = await _bounded(launcher.running(), LIST_S, one.name)
                started = next((found for found in listed if found.worker == worker), started)
    except AntiphonError as error:
        return [str(error)], ""
    finally:
        left = await _stop([worker], launcher, one.name, 1.0)
    hello, seconds = greeting.greeted.get(worker), time.monotonic() - began_s
    missing = [f"{name} does not end; end it by the engine's own command" for name in left]
    if hello is None:
        why = f": {started.reason}" if started.reason else ""
        missing.append(
            f"{worker} was started ({started.name}, {started.state}{why}) and did not reach {site.address} "
            f"within {limit_s:g} s; look whether the machine can dial it, and at the worker's log there"
        )
        return missing, ""
    if one.device == "gpu" and hello.device != "gpu":
        missing.append(f"{one.name} promises a GPU (device: gpu), and {worker} found none")
    return missing, f"{worker} reached {site.address} after {seconds:.1f} s, on a {hello.device.upper()}"


async def list_fleet(run_dir: Path) -> list[FleetRow]:
    """Return the workers elsewhere that a run's journal or an engine knows, by name.

    Raises:
        UnavailableError: when an engine does not answer.
    """
    async with attached(run_dir) as (coordinator, _):
        orders = (await coordinator.status()).orders
    noted: dict[str, WorkerOrder] = {}
    found: dict[str, Instance] = {}
    for one, launcher in _launchers(run_dir):
        noted |= {order.worker: order for order in orders if order.worker in one.workers}
        found |= {x.worker: x for x in await _bounded(launcher.running(), LIST_S, one.name)}
    return [
        FleetRow(
            worker,
            noted[worker].state if worker in noted else None,
            found.get(worker),
            found[worker].reason if worker in found and found[worker].reason else noted[worker].reason,
        )
        if worker in noted
        else FleetRow(worker, None, found[worker], "nobody ordered it")
        for worker in sorted({*noted, *found})
    ]


async def stop_fleet(run_dir: Path, grace_s: float) -> tuple[list[str], list[str]]:
    """Stop every instance of a run that is not under way; return those that ended and those that did not.

    Raises:
        ConfigError: when the run is under way: it would order workers again.
        UnavailableError: when an engine does not answer.
    """
    ended, left = [], []
    async with attached(run_dir) as (coordinator, running):
        if running:
            raise ConfigError(
                f"{run_dir.name} is running and would order its workers again; stop it first (Ctrl-C), which "
                "stops them too"
            )
        for one, launcher in _launchers(run_dir):
            there = [x.worker for x in await _bounded(launcher.running(), LIST_S, one.name)]
            still = await _stop(there, launcher, one.name, grace_s)
            ended += [worker for worker in there if worker not in still]
            left += still
        noted = (await coordinator.status()).orders
        gone = [o.worker for o in noted if o.state is not OrderState.GONE and o.worker not in left]
        if gone:
            await coordinator.note_orders([WorkerOrder(w, OrderState.GONE, "", "fleet stop") for w in gone])
    return ended, left


async def _stop(workers: Sequence[str], launcher: Launcher, of_class: str, grace_s: float) -> list[str]:
    """Stop workers of a class, and return those still listed after the grace time and `AFTER_GRACE_S`."""
    until_s, left = time.monotonic() + grace_s + AFTER_GRACE_S, list(workers)
    stopping = [_bounded(launcher.stop(w, grace_s), grace_s + AFTER_GRACE_S, of_class) for w in workers]
    await asyncio.gather(*stopping)
    while left:
        listed = {x.worker for x in await _bounded(launcher.running(), LIST_S, of_class)}
        left = [worker for worker in left if worker in listed]
        if not left or time.monotonic() >= until_s:
            break
        await asyncio.sleep(LOOK_S)
    return left


def _launchers(run_dir: Path) -> list[tuple[PoolClass, Launcher]]:
    config = load_config(run_dir / "config.yaml")
    address = f"{config.services.reached_at}:{config.services.coordinator_port}"
    site = launch_site(config, run_dir.name, run_dir, address)
    return [(one, make_launcher(one, site)) for one in elsewhere(config)]


async def _bounded(answer: Coroutine[object, object, _T], limit_s: float, of_class: str) -> _T:
    try:
        return await asyncio.wait_for(answer, limit_s)
    except TimeoutError:
        raise UnavailableError(f"the engine of {of_class} did not answer within {limit_s:g} s") from None
