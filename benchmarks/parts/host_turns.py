"""Host turns: how many turns `antiphon-env-host` serves in a CPU-second, beyond its start.

Small Kuhn poker (examples/hosted/small_kuhn.py) with two seats under verifiers 0.4, for a gateway that draws
each answer at once in this process, so that all CPU seconds of the host's processes are the host's own.
"""

import os
import random
import subprocess
import tempfile
import threading
import time

import psutil

from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.benchmarks.parts.own_environment import python_with
from antiphon.benchmarks.parts.scripted_gateway import MODEL, TOKEN, ScriptedGateway

VERIFIERS = "verifiers==0.4.0"
GROUPS, EPISODES = 60, 8
WARM_GROUPS = 4
"""Groups before the clock is read first: imports, connections and the tokenizer belong to the start."""
LONGEST_S = 600.0


def host_turns_per_cpu_s(groups: int = GROUPS) -> float:
    """Play groups of eight hands and return turns per CPU-second.

    Raises:
        MissingToolError: when verifiers cannot be installed.
        RuntimeError: when the host ends or does not come to an end.
    """
    python = python_with([VERIFIERS, "-r", f"{PROJECT}/host/verifiers-0.4.txt"], beside_project=False)
    draw, lock = random.Random(0), threading.Lock()

    def say(name: str, turn: int, text: str) -> str:
        with lock:
            return str(draw.randint(0, 1))

    with ScriptedGateway(say) as served, tempfile.TemporaryFile() as log:
        for number in range(WARM_GROUPS + groups):
            served.offer(f"g{number}", episodes=EPISODES, seats=2, index=number)
        paths = f"{PROJECT}/host{os.pathsep}{PROJECT}/examples/hosted"
        given = {"PYTHONPATH": paths, "ANTIPHON_GATEWAY": served.url, "ANTIPHON_TOKEN": TOKEN}
        command = [str(python), "-m", "antiphon_env_host", "verifiers", "small_kuhn", "--concurrency", "4"]
        host = subprocess.Popen(
            [*command, "--tokenizer", str(MODEL)], env={**os.environ, **given}, stdout=log, stderr=log
        )
        try:
            began = _after(host, served, WARM_GROUPS * EPISODES)
            ended = _after(host, served, (WARM_GROUPS + groups) * EPISODES)
        finally:
            host.kill()
            host.wait()
    if wrong := [seat["error"] for one in served.reports for seat in one["seats"] if "error" in seat]:
        raise RuntimeError(f"{len(wrong)} seats failed, the first one: {wrong[0]}")
    return (ended[0] - began[0]) / (ended[1] - began[1])


def _after(host: subprocess.Popen[bytes], served: ScriptedGateway, reports: int) -> tuple[int, float]:
    """Return turns and CPU-seconds once the host has made some reports."""
    until = time.monotonic() + LONGEST_S
    while len(served.reports) < reports:
        if host.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the host made {len(served.reports)} of {reports} reports")
        time.sleep(0.005)
    one = psutil.Process(host.pid)
    used = [process.cpu_times() for process in (one, *one.children(recursive=True))]
    turns = sum(len(row.turns) for row in list(served.rows.values()))
    return turns, sum(times.user + times.system for times in used)


if __name__ == "__main__":
    print(f"host_turns_per_cpu_s: {host_turns_per_cpu_s():.1f}")
