"""Slurm: a cluster of this machine alone, with munge, controller and node daemon of its own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from getpass import getuser
from pathlib import Path

from antiphon.system.ports import free_ports

START_S = 60.0
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"

CONFIGURATION = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/pgid
ReturnToService=2
SlurmctldPort={controller}
SlurmdPort={node}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SwitchType=switch/none
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
NodeName=here NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=spot Nodes=here Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=high Nodes=here State=UP PriorityTier=10 PreemptMode=OFF
"""


@contextmanager
def slurm_cluster(folder: Path, cores: int = 2) -> Iterator[Mapping[str, str]]:
    """Run a cluster, and yield the variables with which its commands find it.

    Its partition `spot` is preempted by `high`: its jobs get five seconds, and are queued again.
    """
    for name in ("spool", "state"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            user=getuser(),
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            **dict(zip(("controller", "node"), free_ports(2), strict=True)),
            cores=cores,
        )
    )
    environment = {"SLURM_CONF": str(configuration), "PATH": SEARCHED}
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, *words: str) -> None:
        found = shutil.which(program, path=SEARCHED)
        assert found is not None, f"{program} is not installed"
        log = (folder / f"{program}.out").open("wb")
        known = os.environ | environment
        started.append(subprocess.Popen([found, *words], stdout=log, stderr=log, env=known))

    try:
        start(
            *("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"),
            *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"),
            f"--log-file={folder}/munged.log",
        )
        _wait(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", "-D", "-f", str(configuration))
        start("slurmd", "-D", "-N", "here", "-f", str(configuration))
        words = ["sinfo", "--noheader", "--format=%T"]

        def idle() -> bool:
            said = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment)
            return "idle" in said.stdout

        _wait(idle, folder)
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(ready, folder: Path) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > deadline:
            logs = "".join(path.read_text(errors="replace")[-600:] for path in sorted(folder.glob("*.log")))
            raise SystemExit(f"Slurm does not start: {logs}")
        time.sleep(0.1)
