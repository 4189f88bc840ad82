"""Launcher of Slurm: each worker is the member of a job array, whose index is the worker's ordinal.

Jobs are known by their name, the run's label and the class. A member that is preempted is queued again by
Slurm itself. Slurm asks the batch shell to stop, which passes that on to the worker and waits for it. The
bundle lies on the file system that all nodes see, for its owner alone.
"""

import asyncio
import json
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from antiphon.core.capacity.launcher_config import SlurmLauncherSection
from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.net.security.keys import make_private_folder
from antiphon.runs.fleet.command import run_command
from antiphon.runs.fleet.launcher import LaunchSite, Order
from antiphon.system.clock import wall_clock

CALL_S = 60.0
"""Longest time of one of Slurm's commands."""
LOOK_S = 0.5
"""Pause between two looks at a job that was asked to end."""
_UP = ("RUNNING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT")
_WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDS = ("COMPLETING",)

_SCRIPT = """\
#!/bin/bash
{options}
umask 077
cd "$HOME"
{setup}
({line}) &
worker=$!
trap 'kill -s TERM $worker' TERM
wait $worker; status=$?
while kill -0 $worker 2>/dev/null; do wait $worker; status=$?; done
exit $status
"""


class SlurmLauncher:
    """Workers of one class."""

    def __init__(self, one: PoolClass, section: SlurmLauncherSection, site: LaunchSite) -> None:
        """Prepare to call; nothing is submitted yet."""
        self._class, self._section, self._site = one, section, site
        self._job = f"{site.label}.{one.name}"
        self._root = Path(section.work_dir) / site.label

    async def start(self, order: Order) -> Instance:
        while (there := await self._find(order.worker)) is not None:
            if there.state is not InstanceState.STOPPING:
                return there
            await asyncio.sleep(LOOK_S)  # who calls has a deadline
        await asyncio.to_thread(self._copy_bundle, order)
        await run_command(["sbatch", "--parsable"], CALL_S, self._text(order).encode())
        found = await self._jobs(order.worker)
        if not found:
            raise UnavailableError(f"sbatch: the job of {order.worker} was submitted and is not in the queue")
        eldest, *others = sorted(found, key=lambda job: _number(job["job_id"]) or 0)
        for job in others:  # another process of the run submitted it at the same moment
            await run_command(["scancel", self._name_of(job)], CALL_S)
        return self._instance(eldest)

    async def running(self) -> tuple[Instance, ...]:
        return tuple(self._instance(job) for job in await self._jobs())

    async def stop(self, worker: str, grace_s: float) -> None:
        until_s, asked = time.monotonic() + grace_s, False
        while (there := await self._find(worker)) is not None:
            waits, late = there.state is InstanceState.PENDING, time.monotonic() >= until_s
            how = [] if waits else ["--full", "--signal=KILL"] if late else ["--batch", "--signal=TERM"]
            try:
                if waits or late or not asked:
                    await run_command(["scancel", *how, there.name], CALL_S)
            except UnavailableError:
                if await self._find(worker) is not None:  # else it ended in between
                    raise
            if waits or late:
                break
            asked = True
            await asyncio.sleep(LOOK_S)
        await asyncio.to_thread(shutil.rmtree, Path.home() / self._root / worker / "bundle", True)

    async def missing(self) -> list[str]:
        said = await run_command(["sinfo", "--noheader", "--format=%P %a %G"], CALL_S)
        rows = [line.split() for line in said.splitlines() if line.strip()]
        wanted = self._section.partition
        mine = [row for row in rows if row[0].rstrip("*") == wanted or (not wanted and row[0].endswith("*"))]
        if not mine:
            names = ", ".join(row[0].rstrip("*") for row in rows) or "none"
            return [f"launcher.partition={wanted or 'the default'} is no partition here; there are {names}"]
        found = []
        if not any(row[1] == "up" for row in mine):
            found.append(f"partition {mine[0][0].rstrip('*')} is {mine[0][1]}; ask who runs the cluster")
        if self._section.gpus and not any("gpu" in row[2] for row in mine):
            found.append(f"partition {mine[0][0].rstrip('*')} has no GPU; launcher.gpus={self._section.gpus}")
        return found

    def render(self, order: Order) -> dict[str, str]:
        return {f"{order.worker}.sbatch": self._text(order)}

    def _text(self, order: Order) -> str:
        section, folder = self._section, self._root / order.worker
        grace_s = round(self._site.config.rollout.grace_s) + 5
        options = {
            "job-name": self._job,
            "array": str(order.ordinal),
            "ntasks": "1",
            "cpus-per-task": str(section.cpus),
            "gpus-per-task": str(section.gpus) if section.gpus else "",
            "mem": f"{section.memory_mib}M" if section.memory_mib else "",
            "partition": section.partition,
            "account": section.account,
            "time": section.time,
            "signal": f"B:TERM@{grace_s}",
            "output": f"{Path.home() / self._root}/{order.worker}.log",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
        lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
        lines += [f"#SBATCH {option}" for option in section.options]
        bundle, work = shlex.quote(str(folder / "bundle")), shlex.quote(str(folder / "work"))
        line = order.line(section.command, bundle, work)
        return _SCRIPT.format(options="\n".join(lines), setup=section.setup, line=line)

    def _copy_bundle(self, order: Order) -> None:
        folder = Path.home() / self._root / order.worker / "bundle"
        try:
            make_private_folder(folder)
            for path in order.bundle.iterdir():
                copy = folder / path.name
                copy.unlink(missing_ok=True)
                copy.touch(mode=0o600)
                copy.write_bytes(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"launcher.work_dir: {folder} cannot be written: {error.strerror}") from error

    async def _find(self, worker: str) -> Instance | None:
        """Return the instance of a worker that is not on its way out, else one that is."""
        found = [self._instance(job) for job in await self._jobs(worker)]
        return min(found, key=lambda x: x.state is InstanceState.STOPPING, default=None)

    async def _jobs(self, worker: str = "") -> list[dict[str, Any]]:
        """Return what the queue has of the class, or of one worker."""
        said = await run_command(["squeue", "--json", f"--name={self._job}"], CALL_S)
        try:
            jobs = json.loads(said)["jobs"]
        except (ValueError, KeyError) as error:
            raise UnavailableError(f"squeue --json answered what cannot be read: {error}") from error
        known = [job for job in jobs if job["name"] == self._job and _state(job) in (*_UP, *_WAITS, *_ENDS)]
        return [job for job in known if worker in ("", self._worker_of(job))]

    def _worker_of(self, job: dict[str, Any]) -> str:
        index = _number(job.get("array_task_id"))
        return f"{self._class.name}-{job.get('array_task_string') if index is None else index}"

    def _name_of(self, job: dict[str, Any]) -> str:
        first = _number(job.get("array_job_id")) or _number(job["job_id"])
        return f"{first}_{self._worker_of(job).rpartition('-')[2]}"

    def _instance(self, job: dict[str, Any]) -> Instance:
        state = _state(job)
        reason = str(job.get("state_reason") or "")
        reason = "" if reason == "None" else reason
        up_s = 0.0
        if state in _UP and (began := _number(job.get("start_time"))):
            up_s = max(0.0, wall_clock() - began)
        if state in _WAITS:
            found = InstanceState.PENDING
        else:
            found = InstanceState.STOPPING if state in _ENDS else InstanceState.UP
        return Instance(self._worker_of(job), self._name_of(job), found, reason, up_s)


def _state(job: dict[str, Any]) -> str:
    """Return a job's state, which is a list in newer versions."""
    state = job["job_state"]
    return str(state[0] if isinstance(state, list) else state)


def _number(value: Any) -> int | None:
    """Return a number, which is an object in newer versions, with `set` and `number`."""
    if isinstance(value, dict):
        return int(value["number"]) if value.get("set") else None
    return None if value is None else int(value)
