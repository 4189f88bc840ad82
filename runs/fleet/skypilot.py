"""Launcher of SkyPilot: each worker is a managed job, which the `sky` command starts, lists and cancels.

SkyPilot is called and never imported. Its server finds the cheapest of the resources that would do, starts
them again after a preemption, and takes them down. The bundle travels as a secret of the job, from a file,
and lies on the machine for its user alone.
"""

import asyncio
import base64
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from antiphon.core.capacity.launcher_config import SkyPilotLauncherSection
from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.core.errors import UnavailableError
from antiphon.runs.fleet.command import run_command
from antiphon.runs.fleet.launcher import LaunchSite, Order, packed_bundle
from antiphon.system.clock import wall_clock

CALL_S = 300.0
"""Longest time of a call: the first one starts SkyPilot's own server."""
SECRET = "ANTIPHON_BUNDLE"
"""Name of the job's secret: an archive of the bundle in base64."""
_NO_JOBS = "No in-progress managed jobs"
_WAITS = ("PENDING", "SUBMITTED", "STARTING", "RECOVERING")
_UP = ("RUNNING", "WINDING_DOWN")

_RUN = """\
set -eu
umask 077
folder="$HOME/{folder}"
mkdir -p "$folder/bundle"
printf %s "${secret}" | base64 -d | tar -x -C "$folder/bundle"
unset {secret}
{line}
"""


class SkyPilotLauncher:
    """Workers of one class."""

    def __init__(self, one: PoolClass, section: SkyPilotLauncherSection, site: LaunchSite) -> None:
        """Prepare to call; nothing is launched yet."""
        self._class, self._section, self._site = one, section, site

    async def start(self, order: Order) -> Instance:
        if (there := await self._find(order.worker)) is not None:
            return there
        with tempfile.TemporaryDirectory(prefix="antiphon-sky-") as folder:
            task, secret = Path(folder) / "task.yaml", Path(folder) / "secret.env"
            task.write_text(self._task(order))
            bundle = await asyncio.to_thread(packed_bundle, order.bundle)
            with open(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(f"{SECRET}={base64.b64encode(bundle).decode()}\n")
            words = ["launch", "--yes", "--detach-run", "--secret-file", str(secret), str(task)]
            await self._sky("jobs", *words)
        if (started := await self._find(order.worker)) is None:
            raise UnavailableError(f"sky: the job of {order.worker} was launched and is not in the queue")
        return started

    async def running(self) -> tuple[Instance, ...]:
        try:
            said = await self._sky("jobs", "queue", "--skip-finished", "--all", "--output", "json")
        except UnavailableError as error:
            if _NO_JOBS in str(error):  # its jobs controller is not there, which the first job brings
                return ()
            raise
        try:
            jobs = json.loads(said[said.index("[") :])
        except ValueError as error:
            raise UnavailableError(f"sky jobs queue answered what cannot be read: {error}") from error
        workers = {self._job_of(worker): worker for worker in self._class.workers}
        return tuple(_instance(workers[job["job_name"]], job) for job in jobs if job["job_name"] in workers)

    async def stop(self, worker: str, grace_s: float) -> None:
        if await self._find(worker) is not None:
            await self._sky("jobs", "cancel", "--yes", "--name", self._job_of(worker))

    async def missing(self) -> list[str]:
        said = await self._sky("check")
        if "Enabled infra" in said and "No infra to check/enabled" not in said:
            return []
        return [f"no cloud is enabled; `{self._section.sky} check` says what each lacks"]

    def render(self, order: Order) -> dict[str, str]:
        return {f"{order.worker}.sky.yaml": self._task(order)}

    def _task(self, order: Order) -> str:
        folder = f".antiphon/fleet/{self._site.label}/{order.worker}"
        line = order.line(self._section.command, '"$folder/bundle"', '"$folder/work"')
        task = {
            "name": self._job_of(order.worker),
            "resources": {
                "any_of": [dict(one) for one in self._section.resources],
                "job_recovery": {"strategy": "EAGER_NEXT_REGION"},
                "autostop": {"idle_minutes": 5, "down": True},
            },
            "num_nodes": 1,
            "secrets": {SECRET: None},
            "run": _RUN.format(folder=folder, secret=SECRET, line=line),
        }
        if self._section.setup:
            task["setup"] = self._section.setup
        return yaml.safe_dump(task, sort_keys=False)

    def _job_of(self, worker: str) -> str:
        return f"{self._site.label}.{worker}"

    async def _find(self, worker: str) -> Instance | None:
        return next((one for one in await self.running() if one.worker == worker), None)

    async def _sky(self, *words: str) -> str:
        return await run_command([self._section.sky, *words], CALL_S)


def _instance(worker: str, job: dict[str, Any]) -> Instance:
    status = str(job.get("status"))
    state = InstanceState.PENDING if status in _WAITS else InstanceState.STOPPING
    up_s = 0.0
    if status in _UP:
        state = InstanceState.UP
        since = job.get("last_recovered_at") or job.get("start_at")
        up_s = max(0.0, wall_clock() - float(since)) if since and float(since) > 0 else 0.0
    reason = str(job.get("failure_reason") or job.get("details") or "")
    return Instance(worker, f"managed job {job.get('job_id')}", state, reason, up_s)
