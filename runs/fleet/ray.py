"""Ray launcher: workers as processes that detached actors of a Ray cluster hold, one each.

An actor's name is its worker's, within a namespace that is the run's label. Nothing of it is restarted or
tried again by Ray, which only chooses the node, or has its autoscaler bring one. No tensor goes through Ray.
"""

import asyncio
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from typing import Any

from antiphon.core.capacity.launcher_config import RayLauncherSection
from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.runs.fleet.launcher import LaunchSite, Order

CALL_S = 90.0
"""Longest wait for an answer; Ray itself takes up to a minute to find that no cluster is there."""


class RayLauncher:
    """Detached actors of one class, each of which holds an ordinary worker."""

    def __init__(self, one: PoolClass, section: RayLauncherSection, site: LaunchSite) -> None:
        """Launch by a process that is started with the first call.

        Raises:
            ConfigError: when Ray is not installed here.
        """
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                f"provisioning.pool {one.name}: launcher kind ray needs Ray, which is not installed here; "
                "install the extra: pip install 'antiphon[ray]', of the cluster's version"
            )
        self._class, self._section, self._site = one, section, site
        self._driver: _Driver | None = None

    async def start(self, order: Order) -> Instance:
        line, options = self._line(order), self._options()
        return _instance(await self._call("start", order.worker, options, line, str(order.bundle)))

    async def running(self) -> tuple[Instance, ...]:
        return tuple(map(_instance, await self._call("list", self._class.workers)))

    async def stop(self, worker: str, grace_s: float) -> None:
        await self._call("stop", worker, grace_s)

    async def missing(self) -> list[str]:
        one = self._section
        needs = {"CPU": one.cpus, "GPU": one.gpus} | one.resources
        has = await self._call("lacking", {name: number for name, number in needs.items() if number})
        if not has:
            return []
        return [f"no node of {one.address} has {needs}; theirs are {has}: bring one, or ask for less"]

    def render(self, order: Order) -> dict[str, str]:
        named = {"namespace": self._site.label, "name": order.worker, "lifetime": "detached"}
        actor = {**named, "max_restarts": 0, **self._options(), "holds": self._line(order)}
        return {f"ray/{self._class.name}.json": json.dumps(actor, indent=2) + "\n"}

    def _line(self, order: Order) -> str:
        line = order.line(self._section.command, '"$0"', '"$1"')
        return f"{self._section.setup}\n{line}".lstrip()

    def _options(self) -> dict[str, Any]:
        one = self._section
        return {"num_cpus": one.cpus, "num_gpus": one.gpus, "resources": one.resources}

    async def _call(self, call: str, *arguments: Any) -> Any:
        if self._driver is None or self._driver.ended:
            self._driver = _Driver()
            await self._ask(self._driver, "connect", self._section.address, self._site.label)
        return await self._ask(self._driver, call, *arguments)

    async def _ask(self, driver: "_Driver", call: str, *arguments: Any) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(driver.ask(call, arguments)), CALL_S)
        except (TimeoutError, UnavailableError) as error:
            if isinstance(error, TimeoutError):
                driver.end()  # the next call begins with a new one
            why = str(error) or f"no answer within {CALL_S:g} s"
            raise UnavailableError(f"Ray at {self._section.address}, asked to {call}: {why}") from error


def _instance(told: dict[str, Any]) -> Instance:
    """Return what the driver tells of an actor as an instance."""
    worker, pid = told["worker"], told["pid"]
    if pid is None:
        reason = told.get("waits", "placed, and not told yet what to hold")
        return Instance(worker, f"actor {worker}", InstanceState.PENDING, reason)
    state = InstanceState.STOPPING if told["stopping"] else InstanceState.UP
    return Instance(worker, f"actor {worker}, process {pid} on {told['node']}", state, "", told["up_s"])


class _Driver:
    """The process of `ray_driver`; it ends when this one does, whose end of its input then closes."""

    def __init__(self) -> None:
        self.ended = False
        self._waiting: dict[int, Future[Any]] = {}
        self._ids, self._lock = itertools.count(), threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - kept until the process ends
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "antiphon.runs.fleet.ray_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ
            | {"RAY_ENABLE_AUTO_CONNECT": "0"},  # else Ray starts a cluster where it finds none
            start_new_session=True,  # what interrupts this process leaves it to end in order
        )
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, call: str, arguments: tuple[Any, ...]) -> "Future[Any]":
        """Send a request; its answer comes in a thread."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # from here on who waits may go, and the answer still be set
        with self._lock:
            if self.ended or self._process.stdin is None:
                answer.set_exception(UnavailableError("the driver has ended"))
                return answer
            number = next(self._ids)
            self._waiting[number] = answer
            request = {"id": number, "call": call, "arguments": arguments}
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:  # it has just ended, which the reader tells all who wait
                pass
        return answer

    def end(self) -> None:
        """Have the process end; nothing of it counts."""
        self._process.kill()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            told = json.loads(line)
            with self._lock:
                answer = self._waiting.pop(told["id"])
            if "error" in told:
                answer.set_exception(UnavailableError(told["error"]))
            else:
                answer.set_result(told["result"])
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-500:].decode(errors="replace").strip().splitlines()
        why = f"its driver ended with status {status}: {said[-1] if said else 'it said nothing'}"
        with self._lock:
            self.ended, waiting, self._waiting = True, self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(UnavailableError(why))
