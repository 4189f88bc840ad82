"""Distant run: a run on one host of a shaped network, and its workers on others.

The job is the main one without Prefect; the workers are `antiphon worker` as on other machines: with
certificates and tokens of their own, and without a sight of the run's home, so that nothing is linked.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from antiphon.api.manifest import full_payload
from antiphon.benchmarks.parts.measure import PROJECT, journal_events, tail
from antiphon.benchmarks.parts.network.namespaces import Host
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
