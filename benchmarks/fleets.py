"""Fleets: workers that real engines start, killed, adopted, stopped and paid for as the account says.

For each launcher the demo's model is trained by `antiphon run`, with a pool of two workers that are real vLLM
processes here:

- `first_token_extra_s`: from an order to its worker's first lease, beyond that of this machine's processes,
  both beside a worker that samples;
- `restarts`: kills of the run's own process at random moments, `second_starts`: instances that the run which
  continues started beside one that was there, `adopted_share`: instances that it took up;
- `losses`: workers killed in mid-lease, `lost` and `twice`: groups that no batch had in the end, or two;
- `handed_over_share`: of the leases of workers that their engine was asked to stop, those that were handed
  over, or handed in, within the grace time;
- `cost_error`: what the account has of the pool's seconds against those for which its processes lived;
- `orphans`: processes that are left ten seconds after the end, and after `antiphon fleet stop`;
- `spot_ssh`, `spot_ray`: six workers while machines come and go as in a spot trace: tokens lost, cost, and
  whether the activator decided as in a simulation that saw the same;
- `digests_equal`: the batches of a fixed run are those of the local one.

`lookups_late`: of looks at 40 instances of an engine that takes long and fails, those later than 1.5 periods.
`kubernetes` executes the manifests behind a stand-in of the API; `skypilot` has no engine here, and
tests/runs/fleet shows it. The last line is JSON.

    .venv/bin/python benchmarks/fleets.py [--launchers ssh slurm ray] [--restarts N] [--losses N] [--stops N]
    .venv/bin/python benchmarks/fleets.py --launchers --spot spot_bamboo.jsonl.gz
"""

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from antiphon.benchmarks.parts.fleets.kubernetes_runner import TOKEN, KubernetesRunner, kubernetes_in_thread
from antiphon.benchmarks.parts.fleets.ray_cluster import RayCluster, ray_cluster
from antiphon.benchmarks.parts.fleets.slow_engine import late_looks
from antiphon.benchmarks.parts.fleets.slurm import SEARCHED, slurm_cluster
from antiphon.benchmarks.parts.fleets.spot import (
    MACHINES,
    POOL,
    TRACE_S,
    Change,
    Seen,
    changes_of,
    differences,
    read_supply,
    simulate,
)
from antiphon.benchmarks.parts.fleets.sshd import SshHosts, find_sshd, ssh_hosts
from antiphon.benchmarks.parts.measure import DEFAULT_SIGNALS, PROJECT, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.config import load_config
from antiphon.core.status import RunStatus
from antiphon.runs.attach import attached
from antiphon.runs.fleet.engines import make_launcher
from antiphon.runs.fleet.launcher import launch_site
from antiphon.system.ports import free_port

ANTIPHON = [sys.executable, "-P", "-m", "antiphon.cli.app"]
LAUNCHERS = ("local", "ssh", "slurm", "ray", "kubernetes")
WORKERS = 2
WAIT_S = 180.0
ORPHAN_S = 10.0
LIMITS = {
    "first_token_extra_s": 5.0,
    "second_starts": 0,
    "lost": 0,
    "twice": 0,
    "orphans": 0,
    "cost_error": 0.01,
}
SPOT_LIMITS = {"tokens_lost_share": 0.05, "cost_error": 0.01, "lost": 0, "twice": 0, "orphans": 0}


class FleetRun:
    """A run in a home of its own, whose pool has one launcher."""

    def __init__(
        self,
        home: Path,
        launcher: Mapping[str, Any],
        environment: Mapping[str, str],
        workers: int = WORKERS,
        availability: float = 1.0,
        **keys: Any,
    ) -> None:
        self.workers = workers
        self.home, self.environment = home, dict(os.environ, ANTIPHON_HOME=str(home), **environment)
        self.call("invite", "--pool", POOL, "--count", str(workers), "--run", "*")
        plain = yaml.safe_load((PROJECT / "examples" / "quickstart.yaml").read_text())
        plain["run"]["steps"] = 100_000
        plain["rollout"] |= {"workers": 0, "concurrent_groups": 12}
        plain["evaluation"]["interval"] = 0
        plain["record"] = {"mlflow": False, "dvc": False, "samples": 0}
        plain["services"] = {
            "credentials": str(home / "keys" / "services"),
            "coordinator_port": free_port("127.0.0.1"),
        }
        self.address = f"127.0.0.1:{plain['services']['coordinator_port']}"
        one = {"name": POOL, "usd_per_hour": 3.6, "count": workers, "tokens_per_s": 1.0}
        one["availability"] = availability
        one["launcher"] = dict(launcher)
        plain["provisioning"] = {"add_after_s": 0, "hold_s": 86_400, "join_s": 20, "pool": [one]}
        for section, values in keys.items():
            plain[section] |= values
        self.file = home / "fleet.yaml"
        self.file.write_text(yaml.safe_dump(plain))
        self.process: subprocess.Popen[bytes] | None = None
        self.lives: dict[int, tuple[str, float, float]] = {}
        """Process of a worker -> its name, and when it was born and last seen."""
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def close(self) -> None:
        """End all of it."""
        self._over.set()
        self._watching.join()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for pid in self.alive():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    def call(self, *words: str) -> str:
        """Return what a command of the product prints."""
        done = subprocess.run(
            [*ANTIPHON, *words], env=self.environment, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise SystemExit(f"antiphon {' '.join(words)}: {done.stderr[-800:]}")
        return done.stdout

    def apply_to(self, there: object) -> None:
        """Bring the run's manifests to where its workers are pods."""
        if isinstance(there, KubernetesRunner):
            self.call("fleet", "render", str(self.file), "--out", str(self.home / "rendered"))
            there.apply(self.home / "rendered" / "kubernetes" / "base")

    def start(self) -> None:
        """Start the run, or continue it."""
        log = (self.home / "flow.log").open("ab")
        words = [*DEFAULT_SIGNALS, *ANTIPHON, "run", str(self.file)]
        self.process = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill the run's own process, and with it its services."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> int:
        """Ask the run to stop as a person does, and return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)

    @property
    def folder(self) -> Path:
        return next((self.home / "runs").iterdir())

    def events(self, *kinds: str) -> list[tuple[float, str, dict[str, Any]]]:
        """Return time (Unix), kind and fields of the journal's events of some kinds."""
        try:
            with closing(sqlite3.connect(f"file:{self.folder / 'journal.db'}?mode=ro", uri=True)) as journal:
                marks = ",".join("?" * len(kinds))
                query = f"SELECT at, kind, body FROM events WHERE kind IN ({marks}) ORDER BY seq"
                return [(at, kind, json.loads(body)) for at, kind, body in journal.execute(query, kinds)]
        except (StopIteration, sqlite3.OperationalError, FileNotFoundError):
            return []

    def wait(self, what: str, true: Callable[[], bool]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + WAIT_S
        while not true():
            ended = self.process is not None and self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                log = (self.home / "flow.log").read_text(errors="replace")[-1500:]
                raise SystemExit(f"{what}: {'the run ended' if ended else 'not in time'}\n{log}")
            time.sleep(0.1)

    def commits(self) -> int:
        return len(self.events("step.committed"))

    def wait_commits(self, more: int) -> None:
        wanted = self.commits() + more
        self.wait(f"{wanted} steps", lambda: self.commits() >= wanted)

    def instances(self) -> dict[str, str]:
        """Return the instances that are up as the journal has them."""
        found: dict[str, str] = {}
        for _, _, body in self.events("worker.ordered"):
            found.pop(body["worker_name"], None)
            if body["state"] == "up":
                found[body["worker_name"]] = body["instance"]
        return found

    def all_sample(self) -> bool:
        """Return whether each worker of the pool is up and holds a lease."""
        return len(self.instances()) == self.workers and len(self.sampling()) == self.workers

    def sampling(self) -> set[str]:
        """Return the workers that hold a lease."""
        return {name for name, _ in self.leases().values()}

    def leases(self) -> dict[str, tuple[str, str]]:
        """Return the leases that are held: id -> name of the worker, and the group."""
        held: dict[str, tuple[str, str]] = {}
        kinds = ("lease.granted", "lease.duplicated", "lease.expired", "group.submitted", "group.dropped")
        for _, kind, body in self.events(*kinds):
            if kind in ("lease.granted", "lease.duplicated"):
                held[body["lease_id"]] = body["worker_id"].rpartition("-")[0], body["group_id"]
            else:
                held.pop(body.get("lease_id", ""), None)
                if kind != "lease.expired":
                    held = {i: one for i, one in held.items() if one[1] != body["group_id"]}
        return held

    def alive(self) -> dict[int, str]:
        """Return the workers' processes that run: number -> name."""
        found = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                mine = words[:1] == [sys.executable] and "worker" in words and self.address in words
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = words[words.index("--name") + 1]
            except psutil.Error:
                continue
        return found

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            now = time.time()
            for pid, name in self.alive().items():
                with suppress(psutil.NoSuchProcess):
                    born = self.lives[pid][1] if pid in self.lives else psutil.Process(pid).create_time()
                    self.lives[pid] = name, born, now


@contextmanager
def engine(
    kind: str, folder: Path, machines: int = 0
) -> Iterator[tuple[dict[str, Any], dict[str, str], SshHosts | RayCluster | KubernetesRunner | None]]:
    """Run the engine of a launcher, and yield the launcher's keys, the variables of its commands, and itself;
    of a machine for each worker where `machines` is not 0."""
    script = folder / "antiphon"  # what a machine elsewhere calls `antiphon`
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m antiphon.cli.app "$@"\n')
    script.chmod(0o755)
    there = {"command": str(script)}
    with ExitStack() as stack:
        if kind == "ssh":
            hosts = stack.enter_context(ssh_hosts(folder, machines or WORKERS))
            found = {"hosts": hosts.hosts, "options": hosts.options, "work_dir": str(folder / "there")}
            yield {"kind": kind, **there, **found}, {}, hosts
        elif kind == "slurm":
            variables = stack.enter_context(slurm_cluster(folder / "slurm"))
            yield (
                {"kind": kind, "partition": "spot", **there, "work_dir": str(folder / "there")},
                dict(variables),
                None,
            )
        elif kind == "ray":
            cluster = stack.enter_context(ray_cluster(nodes=0))
            for _ in range(machines or 1):
                cluster.add_node(1 if machines else WORKERS)
            yield {"kind": kind, "address": cluster.address, **there}, {}, cluster
        elif kind == "kubernetes":
            runner = stack.enter_context(kubernetes_in_thread(folder / "node"))
            (folder / "token").write_text(TOKEN)
            yield (
                {"kind": kind, "server": runner.url, "token_file": str(folder / "token"), **there},
                {},
                runner,
            )
        else:
            yield {"kind": "local"}, {}, None


def missing(kind: str) -> str:
    """Return what the engine of a launcher lacks here; "" when it can be run."""
    if kind == "ssh":
        return "" if find_sshd() else "openssh-server is not installed"
    if kind == "slurm":
        there = all(shutil.which(name, path=SEARCHED) for name in ("slurmctld", "slurmd", "munged"))
        return "" if there else "slurm-wlm and munge are not installed"
    if kind == "ray":
        try:
            import ray  # noqa: F401 - whether it is there
        except ImportError:
            return "ray is not installed"
    return ""


def measure(
    kind: str, folder: Path, restarts: int, losses: int, stops: int, rng: random.Random
) -> dict[str, Any]:
    """Return what one launcher does."""
    with engine(kind, folder) as (launcher, variables, there):
        run = FleetRun(folder / "home", launcher, variables)
        try:
            run.apply_to(there)
            return _measure(run, kind, restarts, losses, stops, rng)
        finally:
            run.close()


def _measure(
    run: FleetRun, kind: str, restarts: int, losses: int, stops: int, rng: random.Random
) -> dict[str, Any]:
    run.start()
    run.wait("both workers sample", run.all_sample)
    adopted = possible = 0
    for number in range(restarts):
        time.sleep(rng.uniform(0.0, 4.0))
        before, processes = run.instances(), set(run.alive())
        run.kill()
        time.sleep(rng.uniform(0.0, 3.0))
        run.start()
        run.wait_commits(1)
        run.wait("both workers sample", run.all_sample)
        possible += len(before)
        adopted += sum(run.instances().get(name) == found for name, found in before.items())
        stayed = len(processes & set(run.alive()))
        print(f"{kind}: restart {number + 1}: {stayed} of {len(processes)} processes stay", flush=True)
    killed = []
    for number in range(losses):
        run.wait("both workers sample", run.all_sample)
        run.wait("both workers live", lambda: len(run.alive()) == WORKERS)
        pid, name = rng.choice(sorted(run.alive().items()))
        run.wait(f"{name} holds a lease", lambda name=name: name in run.sampling())  # type: ignore[misc]
        killed.append(sum(one == name for one, _ in run.leases().values()))
        psutil.Process(pid).kill()
        run.wait(f"the loss of {name} is seen", lambda pid=pid: pid not in run.alive())  # type: ignore[misc]
        run.wait_commits(1)
        print(f"{kind}: loss {number + 1} of {name} with {killed[-1]} leases")
    handed = of_leases = 0
    for number in range(stops):
        run.wait("both workers sample", run.all_sample)
        name = rng.choice([*run.instances()])
        held = {lease for lease, (one, _) in run.leases().items() if one == name}
        _stop(run, name)
        expired = [body for _, _, body in run.events("lease.expired") if body["lease_id"] in held]
        handed += len(held) - sum("handed over" not in body["reason"] for body in expired)
        of_leases += len(held)
        print(f"{kind}: stop {number + 1} of {name}: {len(held)} leases")
    run.wait_commits(1)
    code = run.interrupt()
    time.sleep(ORPHAN_S)
    orphans = len(run.alive())
    found = _counted(run, kind) | {"restarts": restarts, "losses": losses, "exit": code}
    run.start()  # and now without an orderly end
    run.wait("both workers sample", run.all_sample)
    run.kill()
    if kind != "local":
        run.call("fleet", "stop", run.folder.name)
    time.sleep(ORPHAN_S if kind == "local" else 0.0)
    orphans += len(run.alive())
    share = handed / of_leases if of_leases else 1.0
    adopted_share = adopted / possible if possible else 1.0
    return found | {"orphans": orphans, "handed_over_share": share, "adopted_share": adopted_share}


def _stop(run: FleetRun, name: str) -> None:
    """Have a worker's engine stop it, as the run itself does, and wait until it is gone."""
    config = load_config(run.file)
    if config.provisioning.pool[0].launcher.kind == "local":
        for pid, one in run.alive().items():
            if one == name:
                psutil.Process(pid).terminate()
    else:
        site = launch_site(config, run.folder.name, run.folder, "127.0.0.1:0")
        with _variables(run.environment):
            asyncio.run(
                make_launcher(config.provisioning.pool[0], site).stop(name, config.rollout.grace_s + 5.0)
            )
    run.wait(f"{name} is gone", lambda: name not in run.alive().values())


@contextmanager
def _variables(known: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(known)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


async def _status(run: FleetRun) -> RunStatus:
    async with attached(run.folder) as (coordinator, _):
        return await coordinator.status()


def _counted(run: FleetRun, kind: str) -> dict[str, Any]:
    """Count starts, groups and seconds of a run that was interrupted."""
    second, up, begun = 0, dict[str, str](), list[tuple[float, str]]()
    first_leases, breaks = dict[str, float](), list[float]()
    kinds = (
        "worker.ordered",
        "lease.granted",
        "run.resumed",
        "batch.sealed",
        "group.submitted",
        "group.dropped",
    )
    trained: list[str] = []
    submitted: dict[str, None] = {}
    ended: set[str] = set()
    for at, event, body in run.events(*kinds):
        if event == "worker.ordered":
            name, state = body["worker_name"], body["state"]
            if state == "asked":
                begun.append((at, name))
            elif state == "up":
                second += kind != "local" and up.get(name, body["instance"]) != body["instance"]
                up[name] = body["instance"]
            elif state == "gone":
                up.pop(name, None)
        elif event == "run.resumed":
            breaks.append(at)
        elif event == "lease.granted":
            first_leases.setdefault(body["worker_id"], at)
        elif event == "batch.sealed":
            trained += [*body["group_ids"], *body["filtered_ids"]]
        elif event == "group.dropped":
            ended.add(body["group_id"])
        else:
            submitted[body["group_id"]] = None
    status = asyncio.run(_status(run))
    ended |= set(trained)
    left = [group for group in submitted if group not in ended and not group.startswith("v")]
    lived = sum(end - born for _, born, end in run.lives.values())
    if kind == "local":  # whose supervisor starts a process again without an order
        begun = sorted((born, name) for name, born, _ in run.lives.values())
    starts = _starts(begun[1:], first_leases, breaks)
    booked = status.seconds_by_class.get(POOL, 0.0)
    return {
        "first_token_s": round(median(starts), 2) if starts else 0.0,
        "starts": len(starts),
        "second_starts": second,
        "lost": max(0, len(left) - status.groups_to_reward - status.groups_ready),
        "twice": len(trained) - len(set(trained)),
        "steps": status.committed_steps,
        "instance_s": round(lived, 1),
        "cost_error": round(abs(booked - lived) / max(lived, 1e-9), 4),
    }


def _starts(
    begun: list[tuple[float, str]], first_leases: Mapping[str, float], breaks: list[float]
) -> list[float]:
    """Return the seconds of each start to a first lease, of those that no kill of the run came between."""
    found = []
    for at, name in begun:
        after = [x for who, x in first_leases.items() if who.rpartition("-")[0] == name and x > at]
        if after and not any(at < one < min(after) for one in breaks):
            found.append(min(after) - at)
    return found


def fixed_digests(kind: str, folder: Path) -> list[str]:
    """Return the digests of a fixed run's batches."""
    with engine(kind, folder) as (launcher, variables, there):
        short: dict[str, Any] = {
            "run": {"steps": 5},
            "loop": {"mode": "fixed", "max_staleness": 1, "prompts_per_step": 8},
        }
        run = FleetRun(folder / "home", launcher, variables, **short)
        try:
            run.apply_to(there)
            run.start()
            assert run.process is not None
            if code := run.process.wait(WAIT_S):
                raise SystemExit(
                    f"{kind}: a fixed run ended with {code}: {(run.home / 'flow.log').read_text()[-800:]}"
                )
            return [body["digest"] for _, _, body in run.events("batch.sealed")]
        finally:
            run.close()


class SpotMachines:
    """The machines of an engine, one for each worker, as a market takes them away and gives them back."""

    def __init__(self, run: FleetRun, machines: SshHosts | RayCluster) -> None:
        self._run, self._machines = run, machines
        self._nodes: dict[int, Any] = {}
        if isinstance(machines, RayCluster):
            self._nodes = dict(enumerate(machines.nodes))

    def reclaim(self, number: int) -> str:
        """Take a machine away without notice, and return the worker that ran on it."""
        victim = next((pid for pid, name in self._run.alive().items() if self._runs_on(pid, name, number)), 0)
        name = self._run.alive().get(victim, "")
        if victim:
            with suppress(ProcessLookupError):
                os.killpg(victim, signal.SIGKILL)
        if isinstance(self._machines, SshHosts):
            self._machines.kill(number)
        else:
            self._machines.lose_node(self._nodes.pop(number))
        return name

    def restore(self, number: int) -> None:
        if isinstance(self._machines, SshHosts):
            self._machines.serve(number)
        else:
            self._nodes[number] = self._machines.add_node(1)

    def _runs_on(self, pid: int, name: str, number: int) -> bool:
        if isinstance(self._machines, SshHosts):
            return name == f"{POOL}-{number}"
        raylet = self._nodes[number].all_processes["raylet"][0].process.pid
        with suppress(psutil.NoSuchProcess):
            return raylet in (parent.pid for parent in psutil.Process(pid).parents())
        return False


def measure_spot(kind: str, folder: Path, trace: Path) -> dict[str, Any]:
    """Return what a run loses, pays and decides while its machines follow a trace."""
    with engine(kind, folder, MACHINES) as (launcher, variables, there):
        assert isinstance(there, SshHosts | RayCluster)
        # So rarely there, all that can be had are wanted at each look, whatever the need is measured as.
        run = FleetRun(folder / "home", launcher, variables, MACHINES, availability=0.01)
        machines, changes, statuses = SpotMachines(run, there), changes_of(read_supply(trace)), []
        made: list[Change] = []
        over = threading.Event()

        async def poll() -> None:
            async with attached(run.folder) as (coordinator, _):
                while not over.is_set():
                    statuses.append((time.time(), await coordinator.status()))
                    await asyncio.sleep(1.0)

        try:
            while changes and changes[0].at_s <= 0.0:  # what is not there when it begins
                one = changes.pop(0)
                machines.reclaim(one.machine)
                made.append(replace(one, at_s=time.time()))
            run.start()
            first = MACHINES - len(made)
            run.wait("the run listens", lambda: bool(run.events("run.opened")))
            polling = threading.Thread(target=lambda: asyncio.run(poll()), daemon=True)
            polling.start()
            run.wait(f"{first} workers sample", lambda: len(run.sampling()) >= first)
            began = time.time()
            for one in changes:
                time.sleep(max(0.0, began + one.at_s - time.time()))
                if one.here:
                    machines.restore(one.machine)
                    made.append(replace(one, at_s=time.time()))
                else:
                    made.append(replace(one, worker=machines.reclaim(one.machine), at_s=time.time()))
                print(
                    f"{kind}: {time.time() - began:.0f} s: {made[-1]}, {len(run.alive())} workers", flush=True
                )
            time.sleep(max(0.0, began + TRACE_S - time.time()))
            over.set()
            polling.join(WAIT_S)
            asked = [
                (at, body["worker_name"])
                for at, _, body in run.events("worker.ordered")
                if body["state"] == "asked" and at <= statuses[-1][0]
            ]
            run.interrupt()
            time.sleep(ORPHAN_S)
            config = load_config(run.file)
            seen = Seen(made, statuses, asked)
            simulated = asyncio.run(
                simulate(config.provisioning, seen, kind == "ray", config.rollout.grace_s + 5.0)
            )
            found = _counted(run, kind)
            tokens = statuses[-1][1].tokens_by_use
            lost = tokens.get("preempted", 0) / max(1, sum(tokens.values()))
            differing = differences(asked, simulated)
            for line in differing:
                print(f"{kind}: decided otherwise: {line}")
            return {
                "tokens_lost_share": round(lost, 4),
                "cost_error": found["cost_error"],
                "instance_s": found["instance_s"],
                "reclaimed": sum(not one.here for one in made),
                "decisions": len(asked),
                "decisions_equal": not differing,
                "steps": found["steps"],
                "lost": found["lost"],
                "twice": found["twice"],
                "orphans": len(run.alive()),
            }
        finally:
            over.set()
            run.close()


def main() -> int:
    """Measure the launchers that the command line names."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--launchers", nargs="*", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--restarts", type=int, default=20, help="kills of the run's process (default 20)")
    parser.add_argument("--losses", type=int, default=10, help="kills of workers (default 10)")
    parser.add_argument("--stops", type=int, default=4, help="workers that their engine is asked to stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spot", type=Path, help="file of a spot trace that ssh and ray are replayed with")
    parser.add_argument("--wheel", action="store_true", help="measure an installation of the wheel too")
    arguments = parser.parse_args()
    rng, result, violated = random.Random(arguments.seed), dict[str, Any](), list[str]()
    digests: dict[str, list[str]] = {}
    compared = {*arguments.launchers, "local"} if arguments.launchers else set()
    for kind in (one for one in LAUNCHERS if one in compared):
        if lacks := missing(kind):
            print(f"{kind} is left out: {lacks}")
            continue
        least = kind == "local"  # its workers end with the run, and it is what others are compared with
        with scratch_home() as folder:
            counts = (0 if least else arguments.restarts, arguments.losses, arguments.stops)
            result[kind] = measure(kind, folder, *counts, rng)
        with scratch_home() as folder:
            digests[kind] = fixed_digests(kind, folder)
        result[kind]["first_token_extra_s"] = round(
            result[kind]["first_token_s"] - result["local"]["first_token_s"], 2
        )
        print(json.dumps({kind: result[kind]}), flush=True)
        for name, most in LIMITS.items():
            if kind == "local" and name == "cost_error":
                continue  # a process of the run's own machine costs from its registration on
            if result[kind][name] > most:
                violated.append(f"{kind}: {name} is {result[kind][name]}, more than {most}")
        if result[kind]["handed_over_share"] < 0.95:
            violated.append(f"{kind}: {result[kind]['handed_over_share']:.2f} of the leases were handed over")
    equal = all(found == digests["local"] and found for found in digests.values()) or not digests
    late, orders_twice = asyncio.run(late_looks(arguments.seed))
    result |= {
        "digests_equal": equal,
        "lookups_late": late,
        "orders_twice": orders_twice,
        "seed": arguments.seed,
    }
    for kind in ("ssh", "ray") if arguments.spot else ():
        with scratch_home() as folder:
            spot = result[f"spot_{kind}"] = measure_spot(kind, folder, arguments.spot)
        print(json.dumps({kind: spot}), flush=True)
        for name, limit in SPOT_LIMITS.items():
            if spot[name] > limit:
                violated.append(f"spot trace, {kind}: {name} is {spot[name]}, more than {limit}")
        if not spot["decisions_equal"]:
            violated.append(f"spot trace, {kind}: the activator decided otherwise than in the simulation")
    if arguments.wheel:
        from antiphon.benchmarks.parts.fleets.wheel import measure_wheel

        result["wheel"] = measure_wheel()
    violated += [] if equal else ["the batches of fixed runs differ"]
    violated += [f"{late} looks were late"] if late else []
    violated += [f"{orders_twice} orders were given twice"] if orders_twice else []
    return finish(result, record=arguments.record, violated=violated)


if __name__ == "__main__":
    execute(main)
