"""Tensor parallel: an engine of two processes against one of one, and what is left of it when it is killed.

Both play the same script with the demo's model in float32: requests in groups, of which one is aborted, one
is handed over (its tokens so far become the prefix of another request) and, without drafts, all are swapped
to other weights in the middle; with drafts, from siblings and from the history of an earlier pass.
`ranks_equal` says that both ranks had the same tokens, log-probabilities and version spans in every
completion, drafts over a swap included. `equal_share` is the share of positions at which two processes had
the token that one had, and `logprob_difference` the largest difference of a log-probability there, nats.

Kills: the engine of a run is started again and again; the follower or rank 0 is killed while it samples, or
as soon as its shared memory is there. Nothing of it may be left 10 s later, and `starts` counts the kills
after which the next engine came up. Shared memory that is left in the end is `segments_left`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.parts.tensor_parallel.program import MODEL, PATIENCE_S
from antiphon.core.config import build_config, dump_config
from antiphon.services.rollout.engine.environment import SHARED_NAME, child_environment
from antiphon.system import shared_memory
from antiphon.system.processes import POLL_S
from antiphon.system.rank_places import rank_environment

PROGRAM = "antiphon.benchmarks.parts.tensor_parallel.program"
COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", PROGRAM)
RANKS, DRAFTS = 2, 8
GONE_S = 10.0
LEAST_EQUAL, MOST_NATS = 0.999, 1e-4
KILLS = (("follower", "stepping"), ("rank 0", "starting"), ("rank 0", "stepping"), ("follower", "starting"))
"""Who is killed, and when, in turn."""

Outputs = dict[str, dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--drafts", type=int, default=DRAFTS, help="most tokens of a draft; 0 leaves them out"
    )
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"ranks": RANKS}
    with tempfile.TemporaryDirectory(prefix="antiphon-tp-") as name:
        folder = Path(name)
        found = [compare(folder, drafts) for drafts in dict.fromkeys((0, options.drafts))]
        result |= {
            "ranks_equal": all(one["ranks_equal"] for one in found),
            "equal_share": sum(one["equal"] for one in found) / sum(one["positions"] for one in found),
            "logprob_difference": max(one["logprob_difference"] for one in found),
            "positions": sum(one["positions"] for one in found),
            "accepted": sum(one["accepted"] for one in found),
        }
        result |= kill(folder, options.kills)
    violated = [] if result["ranks_equal"] else ["the ranks had different tokens"]
    if result["equal_share"] < LEAST_EQUAL:
        violated.append(f"equal_share is {result['equal_share']:.5f}, less than {LEAST_EQUAL}")
    if not result["logprob_difference"] <= MOST_NATS:
        violated.append(f"logprob_difference is {result['logprob_difference']:.3g}, more than {MOST_NATS:g}")
    if options.drafts and not result["accepted"]:
        violated.append("no draft was accepted, so none was tried")
    if result["starts"] != result["kills"]:
        violated.append(f"after {result['kills']} kills {result['starts']} engines came up")
    violated += ["processes were left after a kill"] if result["orphans"] else []
    violated += ["shared memory was left"] if result["segments_left"] else []
    return finish(result, record=options.record, violated=violated)


def compare(folder: Path, drafts: int) -> dict[str, Any]:
    """Play the script on one process and on several, and compare."""
    (one,), (lead, *others) = play(folder, 1, drafts), play(folder, RANKS, drafts)
    differences, equal, positions = [0.0], 0, 0
    assert lead.keys() == one.keys(), "the engines completed other requests"
    assert any(key.endswith("+") for key in lead), "nothing was handed over"
    assert any(len(output["spans"]) > 1 for output in lead.values()), "nothing was swapped"
    for key, ours in lead.items():
        if drafts and key.startswith("swapped"):
            continue  # which token the swap comes before depends on what drafts brought until then
        theirs = one[key]
        size = min(len(ours["tokens"]), len(theirs["tokens"]))  # of one that was handed over, what came after
        same = np.array(ours["tokens"][-size:]) == np.array(theirs["tokens"][-size:])
        positions, equal = positions + size, equal + int(same.sum())
        nats = np.abs(np.array(ours["logprobs"][-size:]) - np.array(theirs["logprobs"][-size:]))
        differences.append(float(nats[: size if same.all() else int(same.argmin())].max(initial=0.0)))
    return {
        "ranks_equal": all(other == lead for other in others),
        "equal": equal,
        "positions": positions,
        "logprob_difference": max(differences),
        "accepted": sum(one["accepted"] for one in lead.values()),
    }


def play(folder: Path, parts: int, drafts: int) -> list[Outputs]:
    """Return what each rank got."""
    command = [*COMMAND, "play", str(folder), str(parts), str(drafts)]
    environment = child_environment(1) | {SHARED_NAME: shared_memory.new_name()}
    places = [rank_environment(rank, parts, folder / f"meeting-{drafts}") for rank in range(parts)]
    processes = [subprocess.Popen(command, env=environment | place) for place in places]
    try:
        for process in processes:
            if process.wait(PATIENCE_S):
                raise RuntimeError(f"a rank ended with status {process.returncode}")
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{parts}-{drafts}-{rank}.json").read_text()) for rank in range(parts)]


def kill(folder: Path, kills: int) -> dict[str, Any]:
    """Kill engines of a run, and count those that came up after."""
    config = build_config(
        {
            "model": {"path": str(MODEL)},
            "loop": {"group_size": 4},
            "rollout": {"tensor_parallel": RANKS, "concurrent_groups": 4, "kv_cache_mib": 16},
            "drafting": {"enabled": False},
        }
    )
    (folder / "config.yaml").write_text(dump_config(config))
    starts, pending, orphans = 0, 0, 0
    for number in range(kills + 1):
        who, when = KILLS[number % len(KILLS)] if number < kills else ("rank 0", "stepping")
        with started(folder / "config.yaml") as process:
            if when == "starting":
                wait_for(lambda process=process: bool(segments_of(process.pid)), "its shared memory")
            else:
                if not any(line == "stepping\n" for line in process.stdout or ()):  # logs come before
                    raise RuntimeError(f"an engine did not come up after {number} kills")
                starts, pending = starts + pending, 0
            everyone = family(process.pid)
            os.kill(process.pid if who == "rank 0" else everyone[1].pid, signal.SIGKILL)
            pending += 1
            _, left = psutil.wait_procs(everyone, GONE_S)
            orphans += sum(one.status() != psutil.STATUS_ZOMBIE for one in left)
    list(shared_memory.remove_leftovers(named=shared_memory.ENGINES))
    left_over = [
        one for one in os.listdir(shared_memory.SHARED) if one.startswith(f"antiphon-{os.getuid()}-")
    ]
    return {"kills": kills, "starts": starts, "orphans": orphans, "segments_left": len(left_over)}


@contextlib.contextmanager
def started(config: Path) -> "Iterator[subprocess.Popen[str]]":
    """Start the engine of a configuration in a process of its own, which ends with the block."""
    command = [*COMMAND, "engine", str(config)]
    process = subprocess.Popen(
        command, env=child_environment(1), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def family(pid: int) -> list[psutil.Process]:
    """Return rank 0 and its followers."""
    process = psutil.Process(pid)
    followers = [
        one for one in process.children() if any("engine.follower" in word for word in one.cmdline())
    ]
    return [process, *followers]


def segments_of(pid: int) -> list[Path]:
    """Return the shared memory of the engine that a process is rank 0 of."""
    return list(shared_memory.SHARED.glob(f"antiphon-{os.getuid()}-*-{pid}-*"))


def wait_for(holds: Any, what: str) -> None:
    """Wait until something is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} was not there within {PATIENCE_S:g} s")
        time.sleep(POLL_S / 5)


if __name__ == "__main__":
    execute(main)
