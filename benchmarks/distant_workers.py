"""Distant workers: whole runs whose two workers sit behind links of 20 Mbit/s with 40 ms one way.

Each run is the main job (without Prefect and records) with certificates and tokens on a host of its own, and
two real workers that join it as from other machines: `antiphon worker --relay-address`, in network namespaces
with shaped uplinks, which do not see the run's files. The model is the demo's with wider MLPs, published in
bfloat16 (5 MB) and trained at a learning rate of 1e-6; S=1.

- `star_full`: `broadcast.relay=off broadcast.patches=off`; both fetch whole snapshots from the learner.
- `chain_full`: `broadcast.relay=auto`; one hands them on.
- `chain_patch`: also `broadcast.patches=on`.

For each: `seconds_per_step`, the median after the first steps; `idle_share`, the learner's, waiting for a
batch; `mb_per_version`, what a worker fetched for a version; `delivery_s`, the median until it was there;
`relayed_share` of all bytes. `sampling_during_download` is the rate of the engine of `far-1` while snapshots
arrive over the rate otherwise, in steps with as many requests, over the runs with whole snapshots. This
worker has a core for itself, all others share the rest, and what other processes took of that core is left
out; where that is more than a fifth (`core_share_of_others`), the figure is null.

Fails when a worker holds other weights than were announced, sent or received something wrong, when nothing
was relayed, or when sampling during a download falls below 0.9 of undisturbed. Needs root, iproute2,
/dev/net/tun and two cores, and is skipped with a reason otherwise. The last line is JSON.

    .venv/bin/python benchmarks/distant_workers.py [--steps 12]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from antiphon.api.manifest import full_payload
from antiphon.benchmarks.overlap import WARM_UP_STEPS, idle_share, step_seconds
from antiphon.benchmarks.parts.measure import PROJECT, end_on_sigterm, journal_events, scratch_home, tail
from antiphon.benchmarks.parts.network.namespaces import Host, missing, network_of
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.errors import AntiphonError
from antiphon.services.rollout.engine.environment import child_environment
from antiphon.weights.payload_store import PAYLOADS, PayloadStore

CONFIG = PROJECT / "examples" / "quickstart.yaml"
COORDINATOR_PORT, ORIGIN_PORT, RELAY_PORT = 7700, 7701, 7800
MLP_SIZE = 2048
"""Of the model: 2.6 million parameters."""
START_S = 300.0
RUN_S = 900.0
END_S = 60.0
"""Longest time that a worker takes to leave after the run."""
_HIDDEN = 'mount -t tmpfs none "$1" && shift && exec "$@"'
"""A namespace of `ip netns exec` has mounts of its own."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run left."""

    timings: dict[str, Any]
    deliveries: list[DeliveryRecord]
    notes: dict[str, dict[str, Any]]
    """Worker -> steps of its engine, loads and transfers."""
    problems: list[str]


def write_model(folder: Path, mlp_size: int, seed: int = 0) -> None:
    """Write the demo's model with wider MLPs, whose new units hardly change what it says.

    Args:
        folder: of the new model.
        mlp_size: units of each MLP.
        seed: of the new units' weights, normal with a deviation of 0.02.
    """
    shutil.copytree(PROJECT / "examples" / "models" / "chain-sum", folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(weights)
    for name in sorted(tensors):
        axis = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.get(name.split(".")[-2])
        if axis is not None:
            old = tensors[name]
            shape = [mlp_size - size if at == axis else size for at, size in enumerate(old.shape)]
            tensors[name] = torch.cat([old, 0.02 * torch.randn(shape, generator=random)], axis).contiguous()
    save_file(tensors, weights, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": mlp_size}, indent=2))


def run_far(
    folder: Path,
    hosts: Sequence[Host],
    overrides: Sequence[str],
    cores: Sequence[Sequence[int]],
) -> Finished:
    """Run the job on the first host and a worker on each other one, to the end.

    Args:
        folder: empty, for all they write.
        hosts: of a network that forwards already.
        overrides: of the configuration.
        cores: that each host has, as on the machine; empty: all.

    Raises:
        SystemExit: when the job or a worker fails; the end of its log is shown.
    """
    train, host = folder / "train", hosts[0]
    write_model(train / "model", MLP_SIZE)
    workers = {f"far-{number}": host for number, host in enumerate(hosts) if number}
    _make_bundles(train, host, workers)
    fixed = [
        f"model.path={train / 'model'}",
        "rollout.workers=0",
        "services.host=0.0.0.0",
        f"services.address={host.address}",
        f"services.coordinator_port={COORDINATOR_PORT}",
        f"services.credentials={train / 'keys' / 'services'}",
        f"broadcast.origin_port={ORIGIN_PORT}",
        "record.mlflow=false",
        "record.dvc=false",
    ]
    with ExitStack() as stack:
        words = ["antiphon.benchmarks.parts.plain_job", str(CONFIG), *fixed, *overrides]
        words += ["--results", str(folder / "results")]
        job = _Process(stack, folder, "train", host, cores[0], words)
        job.wait_for(lambda: any(train.glob("runs/*/payloads/origin.json")), START_S)
        others = []
        for (name, place), theirs in zip(workers.items(), cores[1:], strict=True):
            shutil.copytree(train / "keys" / "workers" / name, folder / name / "bundle")
            words = ["antiphon.benchmarks.parts.network.watched_worker", str(folder / f"{name}.json")]
            words += ["worker", "--coordinator", f"{host.address}:{COORDINATOR_PORT}", "--name", name]
            words += ["--credentials", str(folder / name / "bundle")]
            words += ["--relay-address", f"{place.address}:{RELAY_PORT}"]
            others.append(_Process(stack, folder, name, place, theirs, words, hidden=train))
        job.wait_for(lambda: job.ended or any(other.ended for other in others), RUN_S)
        for process in (*others, job):  # one that ended before the job failed, and says why
            process.end_well(END_S)
    events = journal_events(next(train.glob("runs/*/journal.db")))
    deliveries = [DeliveryRecord(**body) for kind, body in events if kind == "snapshot.delivered"]
    digests = {b["version"]: b["weights_digest"] for kind, b in events if kind == "snapshot.announced"}
    return Finished(
        json.loads((folder / "results" / "timings.json").read_text()),
        deliveries,
        {name: json.loads((folder / f"{name}.json").read_text()) for name in workers},
        [problem for name in workers for problem in _altered(folder / name, name, digests)],
    )


def _altered(home: Path, name: str, digests: dict[int, str]) -> list[str]:
    """Return what a worker keeps that is not what the run announced."""
    store = PayloadStore(home / "workers" / name / PAYLOADS)
    versions = store.versions()
    found = [] if versions else [f"{name} kept no version"]
    for version in versions:
        manifest = store.manifest(version)
        if manifest.weights_digest != digests.get(version):
            found.append(f"{name} has another version {version} than was announced")
        if store.has(full_payload(manifest).digest):
            try:
                store.checked(manifest)
            except AntiphonError as error:
                found.append(f"{name}: {error}")
    return found


def _make_bundles(home: Path, host: Host, workers: dict[str, Host]) -> None:
    for name, place in workers.items():
        words = ["invite", name, "--host", host.address, "--relay-host", place.address]
        words += ["--run", "*", "--hours", "1"]
        command = [sys.executable, "-P", "-m", "antiphon.cli.app", *words]
        environment = {**os.environ, "ANTIPHON_HOME": str(home)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"antiphon {' '.join(words)}: {done.stderr.strip()}")


class _Process:
    """A process on a host, ended with the stack that it is put on."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        name: str,
        host: Host,
        cores: Sequence[int],
        words: Sequence[str],
        hidden: Path | None = None,
    ) -> None:
        self._name, self._log = name, folder / f"{name}.log"
        (folder / name).mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", *words]
        if hidden is not None:
            command = ["sh", "-c", _HIDDEN, "sh", str(hidden), *command]
        environment = child_environment(1) | {"ANTIPHON_HOME": str(folder / name)}
        output = stack.enter_context(self._log.open("wb"))
        self._process = subprocess.Popen(
            host.command(*command), env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        stack.callback(self._stop)
        if cores:
            os.sched_setaffinity(self._process.pid, cores)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait_for(self, there: Callable[[], bool], seconds: float) -> None:
        """Wait until `there` says so."""
        deadline = time.monotonic() + seconds
        while not there():
            if self.ended or time.monotonic() > deadline:
                said = "ended" if self.ended else f"took longer than {seconds:g} s"
                raise SystemExit(f"{self._name} {said}\n{tail(self._log)}")
            time.sleep(0.2)

    def end_well(self, seconds: float) -> None:
        """Wait for its end.

        Raises:
            SystemExit: when it fails or does not end.
        """
        try:
            status: int | None = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            raise SystemExit(f"{self._name} ended with status {status}\n{tail(self._log)}")

    def _stop(self) -> None:
        if not self.ended:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


UPLINK, DELAY_S, WORKERS = 20e6 / 8, 0.040, 2
"""Bytes per second; seconds one way."""
CASES = {
    "star_full": ("broadcast.relay=off", "broadcast.patches=off"),
    "chain_full": ("broadcast.relay=auto", "broadcast.patches=off"),
    "chain_patch": ("broadcast.relay=auto", "broadcast.patches=on"),
}
COMMON = (
    "run.name=distant",
    "model.dtype=bfloat16",
    "loop.max_staleness=1",
    "loop.prompts_per_step=4",
    "loop.filter=none",
    "sampling.max_tokens=64",
    "learner.learning_rate=1e-6",
    "learner.warmup_steps=0",
    "learner.schedule=constant",
    "rollout.concurrent_groups=2",
    "drafting.enabled=false",
    "coordinator.heartbeat_s=0.5",
    "evaluation.interval=0",
    "evaluation.prompts=8",
    "broadcast.streams=4",
)
WATCHED = "far-1"
LEAST_DURING, LEAST_STEPS = 0.9, 50
"""The first in engine's steps with as many requests, of which there must be this many."""
MOST_OTHERS = 0.2
"""Share of the engine's steps in which other processes had its core. Beyond it the figure is not given: a
download costs CPU time by the second, so it costs an engine more that has less of a core."""
REQUESTS_ALIKE = 4
"""Steps are compared when their numbers of requests differ by less."""

Step = tuple[float, float, float, int]
"""As `watched_worker` notes it."""


def main() -> int:
    """Run every case and compare them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12, help="learner steps of each run")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(CASES)}")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for all runs")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 2}: the first {WARM_UP_STEPS} do not count")
    reason = missing()
    if reason is None and len(os.sched_getaffinity(0)) < 2:
        reason = "the measured worker needs a core for itself, and there is one in all"
    if reason is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        print(json.dumps({"skipped": reason}))
        return 0
    end_on_sigterm()
    wanted = arguments.only.split(",") if arguments.only else list(CASES)
    report: dict[str, Any] = {}
    whole: list[Finished] = []
    violated: list[str] = []
    at_size: list[str] = []
    for name in wanted:
        done = _run(arguments, CASES[name])
        report[name] = row = _row(done)
        print(f"{name}: {row}", flush=True)
        violated += [f"{name}: {problem}" for problem in _problems(name, done, row)]
        if name.endswith("full"):
            whole.append(done)
    if whole:
        notes = [done.notes[WATCHED] for done in whole]
        during, steps = sampling_during_download(notes)
        others = taken_by_others(notes)
        report |= {"engine_steps_during_download": steps, "core_share_of_others": others}
        report["sampling_during_download"] = during if others <= MOST_OTHERS else None
        if others > MOST_OTHERS:
            print(f"the core of {WATCHED} was taken by others for {others:.0%} of its steps: not judged")
        elif during is None:
            at_size.append(f"{steps} steps of the engine during downloads can be compared; give more --steps")
        elif during < LEAST_DURING:
            at_size.append(f"sampling during a download is {during} of undisturbed; at least {LEAST_DURING}")
    return finish(report, record=arguments.record, violated=violated, at_size=at_size)


def sampling_during_download(notes: Iterable[Mapping[str, Any]]) -> tuple[float | None, int]:
    """Return the engine's rate while snapshots arrive over its rate otherwise, and the steps compared.

    Args:
        notes: of one worker in several runs, as `watched_worker` writes them. Steps next to a swap are left
            out: requests are computed again there.
    """
    alike: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for note in notes:
        transfers = [(begin, end) for begin, end, size in note["transfers"] if size]
        for begin, end, seconds, requests in _apart_from(note["loads"], note["steps"]):
            during = any(start <= begin and end <= stop for start, stop in transfers)
            if during or not any(start < end and begin < stop for start, stop in transfers):
                alike[requests // REQUESTS_ALIKE, during].append(seconds)
    took_s = undisturbed_s = 0.0
    compared = 0
    for (requests, during), found in alike.items():
        others = alike.get((requests, False), [])
        if during and len(others) >= REQUESTS_ALIKE:
            took_s, compared = took_s + sum(found), compared + len(found)
            undisturbed_s += len(found) * fmean(others)
    return (round(undisturbed_s / took_s, 4) if compared >= LEAST_STEPS else None), compared


def taken_by_others(notes: Iterable[Mapping[str, Any]]) -> float:
    """Return the share of the engine's steps in which processes of others had its core."""
    steps = [step for note in notes for step in note["steps"]]
    whole_s = sum(end - begin for begin, end, _, _ in steps)
    return round(1 - sum(seconds for _, _, seconds, _ in steps) / whole_s, 4) if whole_s else 0.0


def _apart_from(loads: Sequence[tuple[float, float]], steps: Sequence[Step]) -> list[Step]:
    """Return the steps during which no swap waited, without the first one after each."""
    left = []
    before = float("-inf")
    for step in steps:
        begin, end, *_ = step
        if not any(start < end and before < stop for start, stop in loads):
            left.append(step)
        before = begin
    return left


def _run(arguments: argparse.Namespace, changed: Sequence[str]) -> Finished:
    *shared, own = sorted(os.sched_getaffinity(0))
    cores = [shared, [own], shared]
    overrides = [*COMMON, f"run.steps={arguments.steps}", *changed, *arguments.overrides]
    with network_of([UPLINK] * (1 + WORKERS), DELAY_S) as network, scratch_home() as home:
        return run_far(home, network.hosts, overrides, cores)


def _row(done: Finished) -> dict[str, Any]:
    fetched = [delivery for delivery in done.deliveries if delivery.version > 0 and delivery.bytes]
    total = sum(delivery.bytes for delivery in fetched)
    from_origin = sum(delivery.bytes_from.get("", 0) for delivery in fetched)
    return {
        "seconds_per_step": round(step_seconds(done.timings), 3),
        "idle_share": round(idle_share(done.timings), 4),
        "mb_per_version": round(total / len(fetched) / 1e6, 3) if fetched else None,
        "delivery_s": round(median(delivery.seconds for delivery in fetched), 2) if fetched else None,
        "deliveries": len(fetched),
        "relayed_share": round(1 - from_origin / total, 3) if total else 0.0,
    }


def _problems(name: str, done: Finished, row: Mapping[str, Any]) -> list[str]:
    found = list(done.problems)
    for delivery in done.deliveries:
        found += [
            f"{source or 'the learner'} {what} to {delivery.worker_id}"
            for source, what in delivery.culprits.items()
        ]
    if not row["deliveries"]:
        found.append("no version came over the network")
    if name == "chain_full" and not row["relayed_share"]:  # a patch is so small that a star may be faster
        found.append("no worker handed anything on")
    return found


if __name__ == "__main__":
    sys.exit(main())
