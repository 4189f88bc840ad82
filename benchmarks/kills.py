"""Kills: real processes die at fail-points and by outside signals; afterwards everything is audited.

Coordinator, learner, reward, flow and workers are processes of their own and talk over real gRPC. The
coordinator with its journal, the clients, the workers' loop, the learner's service and the artifact
store are those of production; flow, environment, prompts, trainer, engines and the source of weights
are light stand-ins whose every number can be recomputed, so restart times are not those of a run; the flow
walks production's stages. Besides the workers that do well there is one that joins and never loads a version,
one with a slow link and one whose engine hangs again and again.
A kill is `kill -9`, at a fail-point or from outside, or from there SIGTERM or SIGHUP, also in a first start.
Who dies is started again with the same command. Runs of elastic and of
fixed mode take turns; a fixed run must end with the weights of one that nothing disturbs, in virtual time.
Meanwhile the disk of journal, store and the coordinator's log is full again and again, for a few seconds, and
logs hold warnings alone, so that the first line needs a new block. That takes a small file system in memory,
which only root may mount; without it `full_disks` is null.
`--learner N` does it to the real DeepSpeed learner in a fixed run instead,
and compares the weights of every step.

The exit status is 1 when an acknowledged group was lost or trained twice, a token was older than the
bound, a number is not what the records make of it, or a process ended unasked.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from antiphon.benchmarks.parts.kills.audit import Audit, audit
from antiphon.benchmarks.parts.kills.standins import HANG_VARIABLE, LINK_VARIABLE
from antiphon.benchmarks.parts.measure import DEFAULT_SIGNALS, PROJECT, tail
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.config import RunConfig, build_config, dump_config
from antiphon.services.rollout.engine.watchdog import HUNG_EXIT
from antiphon.simulator.campaign import mute_logs
from antiphon.simulator.scenario import Scenario
from antiphon.simulator.world import World
from antiphon.system import failpoints
from antiphon.system.ports import free_ports
from antiphon.system.processes import PARENT_VARIABLE

WORKERS = 3
HANGING = "worker-hanging"
TROUBLED: Mapping[str, Mapping[str, str]] = {
    "worker-joining": {LINK_VARIABLE: "inf"},
    "worker-slow": {LINK_VARIABLE: "1.0"},
    HANGING: {HANG_VARIABLE: "12"},
}
"""Workers that do badly, and what the environment of each has for it."""


def make_config(mode: str, steps: int, model: str = "", name: str = "killed") -> RunConfig:
    """Return a run of many small steps, two of them ahead; `model` is a real learner's."""
    return build_config(
        {
            "run": {"name": name, "steps": steps, "seed": 5},
            "environment": {"train_size": 40, "heldout_size": 4},
            "evaluation": {"prompts": 4, "interval": 0},
            "loop": {"mode": mode, "max_staleness": 2, "prompts_per_step": 6, "group_size": 4},
            "sampling": {"max_tokens": 24},
            "rollout": {"concurrent_groups": 4},
            "learner": {"checkpoint_interval": 3},
            "coordinator": {"lease_s": 3.0, "heartbeat_s": 0.4, "payload_retention_steps": 2},
            "broadcast": {"snapshots_kept": 16},
            "services": {"stall_timeout_s": 120.0},
            "drafting": {"enabled": False},
            **({"model": {"path": model}} if model else {}),
        }
    )


def roles(troubled: bool = False) -> list[str]:
    """Return the processes of a run, in the order in which they start."""
    names = [f"worker-{i}" for i in range(WORKERS)]
    workers = [*names[:-1], *TROUBLED] if troubled else names  # each process takes time to start
    return ["coordinator", "learner", "reward", *workers, "flow"]


def undisturbed(config: RunConfig) -> tuple[str, ...]:
    """Return the digests of the weights after each step of a fixed run in virtual time, where nobody dies."""
    mute_logs()
    outcome = World(Scenario(run=config.model_dump(mode="json"), workers=WORKERS), 0).run()
    if outcome.violations:
        raise SystemExit(f"the undisturbed run broke a promise: {'; '.join(outcome.violations)}")
    return outcome.weights


ROLES = "antiphon.benchmarks.parts.kills.roles"
POLL_S = 0.01
LEARNER_STEPS = 20
READY_S = 240.0
"""Longest start of a process; a machine may be busy."""
STALL_S = 300.0
MOST_STALLED = 2
"""Longest time in which nothing is acknowledged and no process is killed."""
OWN_SHARE = 0.6
"""Share of starts with an armed fail-point; the other kills come from outside."""
STARTING_SHARE = 0.1
PAUSE_S = 0.3
MOST_PAUSE_S = 20.0
"""Between two outside kills the run gets on, or this passes."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""How processes are killed from outside."""
DISK_MIB = 256
"""Size of a run's disk, which nothing but the filler fills."""
FULL_EVERY_S = 20.0
FULL_S = 3.0
"""Seconds that the disk stays full each time."""
AFTER_FULL_S = 10.0
"""So long after that a process may end because there was no space; it is started again."""
BUSY = {"worker.generate", *(name for name in failpoints.NAMES if name.startswith("coordinator."))}
"""Places that are visited often, so that the first visits are no fair sample."""


@dataclass(slots=True)
class KilledProcess:
    """One process that is kept alive."""

    role: str
    process: "subprocess.Popen[bytes]"
    started_s: float
    again: bool
    """Whether it died in this run before."""
    ready: bool = False
    asked: signal.Signals | None = None
    """By which it was killed from outside."""


@dataclass(slots=True)
class Tally:
    """What happened so far, over all runs."""

    kills: Counter[str] = field(default_factory=Counter)
    """By role."""
    at_failpoints: int = 0
    signals: Counter[str] = field(default_factory=Counter)
    """By signal, of those from outside, and `first_starts` among them."""
    full_disks: int | None = None
    """Times that a disk was full; None where none could be made."""
    full_disk_exits: int = 0
    """Processes that ended by themselves while there was no space."""
    restarts_s: list[float] = field(default_factory=list)
    """From the start of a process that died in the same run to being ready again."""
    coordinator_restarts_s: list[float] = field(default_factory=list)
    hung_exits: int = 0
    """Workers whose engine hung and that ended by themselves, as they should."""
    other_exits: list[str] = field(default_factory=list)
    """Ends that were no kill."""


class Stalled(SystemExit):
    """A run that makes no progress any more."""


class SmallDisk:
    """A file system in memory that is full now and then."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        """Mount it at `folder`.

        Raises:
            OSError: when this user may not.
        """
        folder.mkdir(parents=True)
        self._filler, self._folder, self._tally = folder / "filler", folder, tally
        self._next_s = time.monotonic() + FULL_EVERY_S / 2  # short runs have one, too
        self._free_s: float | None = None
        self._tight_until_s = 0.0
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
        done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise OSError(f"no file system can be mounted here: {done.stderr.strip()}")
        tally.full_disks = tally.full_disks or 0

    def look(self, now: float) -> None:
        """Fill it, or make room, when it is time."""
        if self._free_s is not None and now >= self._free_s:
            self.make_room(now)
        elif self._free_s is None and now >= self._next_s:
            with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as filler:
                for size in (1 << 20, 1 << 12, 1):  # down to the last byte
                    with contextlib.suppress(OSError):
                        while filler.write(b"x" * size):
                            pass
            self._free_s = now + FULL_S
            self._tally.full_disks = (self._tally.full_disks or 0) + 1

    def make_room(self, now: float) -> None:
        """Let it have space from now on, until it is time again."""
        self._filler.unlink(missing_ok=True)
        self._free_s, self._next_s = None, now + FULL_EVERY_S
        self._tight_until_s = now + AFTER_FULL_S

    def tight(self, now: float) -> bool:
        """Return whether it is full, or was just now."""
        return self._free_s is not None or now < self._tight_until_s

    def close(self) -> None:
        """Make room and unmount it; what is on it is lost."""
        subprocess.run(["umount", "--lazy", str(self._folder)], timeout=30, check=False)


class KilledRun:
    """One run in a folder of its own, kept going and killed."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        rng: np.random.Generator,
        tally: Tally,
        deepspeed: bool = False,
        troubled: bool = False,
        disk: SmallDisk | None = None,
        surroundings: Callable[[str], Mapping[str, str]] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the folder; nothing is started.

        Args:
            folder: empty; everything of the run goes there.
            config: the run's.
            rng: who dies, when and where.
            tally: takes what happens.
            deepspeed: train with the real learner, and kill no other process.
            troubled: have workers that do badly besides.
            disk: of the folder `disk` in `folder`, where journal, store and the coordinator's log go then.
            surroundings: what a role's environment has besides.
            meanwhile: called whenever the run has got on.
        """
        self._surroundings, self._meanwhile = surroundings, meanwhile
        self._folder, self._rng, self._tally = folder, rng, tally
        self._disk = disk
        folder.mkdir(parents=True, exist_ok=disk is not None)
        (folder / "config.yaml").write_text(dump_config(config))
        ports = dict(zip(("coordinator", "learner"), free_ports(2), strict=True))
        (folder / "ports.json").write_text(json.dumps(ports | {"deepspeed": int(deepspeed)}))
        self._roles = roles(troubled)
        self._victims = ["learner"] if deepspeed else self._roles
        self._processes: dict[str, KilledProcess] = {}

    def live(self, kills: int) -> int:
        """Run to the end with up to `kills` kills and return how many there were.

        Raises:
            Stalled: when the run stops making progress, with the logs' last lines.
        """
        done = 0
        next_kill_s = patient_until_s = moved_s = time.monotonic()
        seen = killed_at = -1
        for role in self._roles:
            self._start(role, armed=kills > 0)
        try:
            while not self._over():
                killed = self._revive(armed=done < kills)
                done += killed
                now = time.monotonic()
                if self._disk is not None:
                    self._disk.look(now)
                # Grows while the run gets on: bytes of what workers saw acknowledged.
                size = sum(path.stat().st_size for path in self._folder.glob("*.acknowledged"))
                if size != seen or killed:
                    seen, moved_s = size, now
                    if self._meanwhile is not None:
                        self._meanwhile()
                if now - moved_s > STALL_S:
                    raise Stalled(f"no progress for {STALL_S:g} s\n{self._last_words()}")
                if done < kills and now >= next_kill_s and (size != killed_at or now > patient_until_s):
                    self._kill_one()
                    killed_at = size
                    next_kill_s = now + float(self._rng.exponential(PAUSE_S))
                    patient_until_s = now + MOST_PAUSE_S
                time.sleep(POLL_S)
            self._let_workers_leave()
        finally:
            for entry in self._processes.values():
                entry.process.kill()
                entry.process.wait(30.0)
        return done

    def _over(self) -> bool:
        flow = self._processes["flow"]
        return flow.process.poll() == 0 and flow.asked is None  # one that is asked to end says 0 too

    def _start(self, role: str, armed: bool, again: bool = False) -> None:
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        environment.pop(failpoints.VARIABLE, None)
        environment.update(TROUBLED.get(role, {}))
        if self._surroundings is not None:
            environment.update(self._surroundings(role))
        places = [name for name in failpoints.NAMES if name.partition(".")[0] == role.partition("-")[0]]
        if armed and places and role in self._victims and self._rng.random() < OWN_SHARE:
            name = places[int(self._rng.integers(len(places)))]
            visits = 1 + int(self._rng.exponential(20.0 if name in BUSY else 1.5))
            environment[failpoints.VARIABLE] = f"{name}:{visits}"
        (self._folder / f"{role}.ready").unlink(missing_ok=True)
        if self._disk is not None:
            environment["ANTIPHON_LOG"] = "warning"
        command = [*DEFAULT_SIGNALS, sys.executable, "-P", "-m", ROLES, role, str(self._folder)]
        with self._log(role).open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._processes[role] = KilledProcess(role, process, time.monotonic(), again)

    def _revive(self, armed: bool) -> int:
        """Note who became ready, start again who died, and return how many were killed."""
        killed = 0
        for role, entry in list(self._processes.items()):
            now = time.monotonic()
            if not entry.ready and (self._folder / f"{role}.ready").exists():
                entry.ready = True
                if entry.again:
                    self._tally.restarts_s.append(now - entry.started_s)
                    if role == "coordinator":
                        self._tally.coordinator_restarts_s.append(now - entry.started_s)
            status = entry.process.poll()
            if status is None and not entry.ready and now - entry.started_s > READY_S:
                raise Stalled(f"{role} was not ready after {READY_S:g} s\n{self._last_words()}")
            if status is None or (status == 0 and role != "coordinator" and entry.asked is None):
                continue
            if status == -signal.SIGKILL or entry.asked is not None:
                killed += 1
                self._tally.kills[role] += 1
                self._tally.at_failpoints += entry.asked is None
            elif self._disk is not None and self._disk.tight(now):
                self._tally.full_disk_exits += 1
            elif status == HUNG_EXIT and role == HANGING:
                self._tally.hung_exits += 1
            else:
                self._tally.other_exits.append(f"{role} ended with {status}: {tail(self._log(role), 30)}")
            self._start(role, armed, again=True)
        return killed

    def _kill_one(self) -> None:
        living = [
            entry
            for entry in self._processes.values()
            if entry.role in self._victims and entry.asked is None and entry.process.poll() is None
        ]
        # A process that is only starting is killed too, but now and then.
        living = [p for p in living if p.ready or self._rng.random() < STARTING_SHARE]
        if not living:
            return
        chosen = living[int(self._rng.integers(len(living)))]
        chosen.asked = SIGNALS[int(self._rng.integers(len(SIGNALS)))]
        self._tally.signals[chosen.asked.name] += 1
        self._tally.signals["first_starts"] += not (chosen.ready or chosen.again)
        chosen.process.send_signal(chosen.asked)

    def _let_workers_leave(self) -> None:
        deadline = time.monotonic() + 20.0
        # The process of an engine that hangs gives it a while to come back; it is killed like the services.
        staying = ("coordinator", "learner", HANGING)
        leaving = [p.process for p in self._processes.values() if p.role not in staying]
        while any(process.poll() is None for process in leaving) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _log(self, role: str) -> Path:
        on_disk = self._disk is not None and role == "coordinator"
        return self._folder / ("disk" if on_disk else "") / f"{role}.log"

    def _last_words(self) -> str:
        return "\n".join(f"== {role}\n{tail(self._log(role), 8)}" for role in self._roles)


def run_kills(kills: int, steps: int, seed: int) -> dict[str, object]:
    """Kill until `kills` have happened and return the figures.

    Args:
        kills: how many processes are killed in all.
        steps: learner steps of each run.
        seed: of who dies, when and where.
    """
    home = Path(tempfile.mkdtemp(prefix="antiphon-kills-"))
    rng, tally = np.random.default_rng(seed), Tally()
    audits: list[Audit] = []
    stalled = 0
    fixed: set[tuple[str, ...]] = set()
    try:
        fixed.add(undisturbed(make_config("fixed", steps)))
        number = 0
        while (done := sum(tally.kills.values())) < kills:
            mode = ("fixed", "elastic")[number % 2]
            folder = home / f"{number}-{mode}"
            config = make_config(mode, steps, name=folder.name)
            number += 1
            disk = _small_disk(folder / "disk", tally)
            try:
                KilledRun(folder, config, rng, tally, troubled=True, disk=disk).live(kills - done)
                if disk is not None:
                    disk.make_room(time.monotonic())
                audits.append(
                    asyncio.run(audit(folder if disk is None else folder / "disk", config, seen=folder))
                )
            except Stalled as error:
                stalled += 1
                print(f"run {number - 1} ({mode}) did not end: {error}", flush=True)
                if stalled >= MOST_STALLED:
                    break
                continue
            finally:
                if disk is not None:
                    disk.close()
            if mode == "fixed":
                fixed.add(audits[-1].digests)
            so_far = sum(tally.kills.values())
            print(f"run {number - 1} ({mode}): {so_far} kills so far; {audits[-1]}"[:160], flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    for line in tally.other_exits[:10]:
        print("unexpected:", line)
    return {
        **common_figures(tally, audits),
        "kills_by_role": dict(sorted(tally.kills.items())),
        "signals": dict(sorted(tally.signals.items())),
        "full_disks": tally.full_disks,
        "full_disk_exits": tally.full_disk_exits,
        "runs": len(audits) + stalled,
        "ended": len(audits),
        **{name: sum(getattr(one, name) for one in audits) for name in ("trained", "wrong", "hung_leases")},
        "hung_exits": tally.hung_exits,
        "coordinator_restart_median_s": middle(tally.coordinator_restarts_s),
        "learner_digests_equal": len(fixed) == 1,
        "seed": seed,
    }


def common_figures(tally: Tally, audits: Sequence[Audit]) -> dict[str, object]:
    """Return what is counted whoever is killed."""
    return {
        "kills": sum(tally.kills.values()),
        "kills_at_failpoints": tally.at_failpoints,
        **{
            name: sum(getattr(one, name) for one in audits)
            for name in ("acked", "lost", "twice", "beyond_bound")
        },
        "other_exits": len(tally.other_exits),
        "restart_median_s": middle(tally.restarts_s),
    }


def middle(seconds: Sequence[float]) -> float | None:
    """Return the median, or None of nothing."""
    return round(median(seconds), 3) if seconds else None


def _small_disk(folder: Path, tally: Tally) -> SmallDisk | None:
    try:
        return SmallDisk(folder, tally)
    except OSError as error:
        if tally.full_disks is None and not tally.kills:
            print(f"without full disks: {error}", flush=True)
        folder.rmdir()
        folder.parent.rmdir()  # the run makes it again
        return None


def kill_learner(kills: int, seed: int) -> dict[str, object]:
    """Kill the real learner in a fixed run and compare every step's weights with an undisturbed run.

    Args:
        kills: at its fail-points and from outside.
        seed: of when and where.
    """
    home = Path(tempfile.mkdtemp(prefix="antiphon-kills-"))
    rng, tally = np.random.default_rng(seed), Tally()
    try:
        config = make_config("fixed", LEARNER_STEPS, str(PROJECT / "examples" / "models" / "chain-sum"))
        KilledRun(home / "calm", config, rng, Tally(), deepspeed=True).live(0)
        calm = asyncio.run(audit(home / "calm", config, light=False))
        found: list[Audit] = []
        while (done := sum(tally.kills.values())) < kills:
            folder = home / f"killed-{len(found)}"
            KilledRun(folder, config, rng, tally, deepspeed=True).live(kills - done)
            found.append(asyncio.run(audit(folder, config, light=False)))
            print(f"run {len(found)}: {sum(tally.kills.values())} kills so far", flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {
        **common_figures(tally, found),
        "runs": len(found),
        "steps": LEARNER_STEPS,
        "learner_digests_equal": all(audited.digests == calm.digests for audited in found),
        "weights_digest": calm.digests[-1],
        "seed": seed,
    }


def violations(result: Mapping[str, object]) -> list[str]:
    """Return a sentence for everything that a run which was killed must not show, but does."""
    counted = ("lost", "twice", "beyond_bound", "wrong", "other_exits")
    found = [f"{name} is {result[name]}, not 0" for name in counted if result.get(name)]
    if result.get("ended", 0) != result.get("runs") and "ended" in result:
        found.append(f"{result['ended']} of {result['runs']} runs ended")
    if not result["learner_digests_equal"]:
        found.append("the weights are not those of a run without kills")
    return found


def main() -> int:
    """Run the benchmark that the command line asks for."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200, help="processes killed in all (default 200)")
    parser.add_argument("--steps", type=int, default=40, help="learner steps of each run (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="who dies, when and where (default 0)")
    parser.add_argument("--learner", type=int, default=0, help="kill the real learner this often instead")
    options = parser.parse_args()
    if options.learner:
        name, result = "kills_learner", kill_learner(options.learner, options.seed)
    else:
        name, result = "kills", run_kills(options.kills, options.steps, options.seed)
    return finish(result, record=options.record, violated=violations(result), name=name)


if __name__ == "__main__":
    execute(main)
