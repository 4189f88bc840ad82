"""Exactness: the same weights whatever the calls' number and order, after kills, and in a replay."""

import json
from collections import Counter
from time import monotonic
from typing import Any

import numpy as np
import psutil

from antiphon.benchmarks.parts.door.between import between
from antiphon.benchmarks.parts.door.environments import COOKBOOKS, EXAMPLES, client_python
from antiphon.benchmarks.parts.door.served import Door, beside, run_client, served
from antiphon.benchmarks.parts.measure import PROJECT, antiphon

FIXED = PROJECT / "benchmarks" / "parts" / "door" / "fixed_client.py"
CHUNKS = 7
MODEL = PROJECT / "examples" / "models" / "chain-sum"
VICTIMS = ("door", "coordinator", "learner", "worker")
PAUSE_S = 2.0
"""Mean of what passes from the start of a process that is killed, or of all after a door's, to the kill."""
PATIENT_S = 60.0
"""Longest wait for the victim that was drawn to be there; then another one is drawn."""
RESTARTS = "services.restart_limit=1000"


def chunks() -> dict[str, Any]:
    """Train the same rows in one call, in several in any order, and with all requests sent twice."""
    python, found = client_python(COOKBOOKS[0]), {}
    sides = {
        "one": ([], {}),
        "chunks": (["--calls", str(CHUNKS)], {"late": True}),
        "twice": (["--calls", str(CHUNKS)], {"twice": True}),
    }
    for name, (words, how) in sides.items():
        with served() as door, between(door.url, **how) as url:
            run_client(python, FIXED, words, door, url if how else "")
            found[name] = door.weights()
        print(f"{name}: {found[name]}", flush=True)
    return {
        "chunks_equal": found["one"] == found["chunks"] and len(found["one"]) > 0,
        "twice_equal": found["one"] == found["twice"] and len(found["one"]) > 0,
    }


def resumed() -> dict[str, Any]:
    """Take four steps at once; then two, and two more in a program that loads what the first one saved."""
    python = client_python(COOKBOOKS[0])
    with served("door.models=2") as door:
        run_client(python, FIXED, ["--steps", "4"], door)
        whole = door.weights()
        saved = run_client(python, FIXED, ["--steps", "2", "--save", "halfway"], door)[-1]["saved"]
        run_client(python, FIXED, ["--steps", "2", "--first", "2", "--load", saved], door)
        parts = door.weights()  # of the run that loaded, whose first step that was
    print(f"resumed: {whole} {parts}", flush=True)
    return {"resume_equal": len(whole) == 4 and whole[-2:] == parts[-2:]}


class Killer:
    """Kills door and services of a home at random times, and starts the door again."""

    def __init__(self, door: Door, most: int, random: np.random.Generator) -> None:
        """Kill up to `most` times; `random` says whom and when."""
        self.killed = Counter[str]()
        self._door, self._most, self._random = door, most, random

    def live(self, over: Any) -> None:
        """Kill until it is over; the door is up again then."""
        while self.killed.total() < self._most:
            kind = VICTIMS[int(self._random.integers(len(VICTIMS)))]
            pid = self._found(kind, over)
            if over.wait(float(self._random.exponential(PAUSE_S))):
                return
            if kind == "door":
                self._door.kill()
                self.killed[kind] += 1
                self._door.start()
            elif pid is not None and psutil.pid_exists(pid):
                psutil.Process(pid).kill()
                self.killed[kind] += 1

    def _found(self, kind: str, over: Any) -> int | None:
        """Wait until a victim is there and return its number; None for the door's, or when none comes."""
        deadline = monotonic() + PATIENT_S
        while kind != "door" and monotonic() < deadline and not over.wait(0.1):
            for name, pid in self._door.services().items():
                if name.startswith(kind):
                    return pid
        return None


def loop_words(steps: int) -> list[str]:
    """Return the arguments of the loop that is killed and replayed, all of whose tokens have seeds."""
    return [str(MODEL), "--steps", str(steps), "--prompts", "8", "--group", "4", "--max-tokens", "96"]


def unbroken(steps: int) -> tuple[list[str], dict[str, Any]]:
    """Run the loop undisturbed and replay it; return its digests and what the replay said."""
    python = client_python(COOKBOOKS[0])
    with served() as door:
        rows = run_client(python, EXAMPLES / "rl_loop.py", loop_words(steps), door)
        digests, run = door.weights(), door.runs()[-1].name
        door.stop()
        results = door.home / "replay.json"
        last = str(len(digests) - 1)  # a client's run is never finished: it may go on
        antiphon(door.home, "replay", run, "--to", last, "--results", str(results), leaves=results)
        found = json.loads(results.read_text())
    trained = sum(row["rows"] > 0 for row in rows)
    if len(digests) != trained or not trained:
        raise SystemExit(f"{len(digests)} steps are recorded, the client took {trained}")
    apart = [abs(row["kl_sample_train"]) for row in rows if "kl_sample_train" in row]
    replayed = round(found["steps_equal_share"] * len(digests))
    return digests, {
        "replay_exact": found["steps_equal_share"],
        "replayed": replayed,
        "replay_steps": len(digests),
        "kl_sample_train_loop": max(apart),
    }


def kills(count: int, steps: int, expected: list[str], seed: int) -> dict[str, Any]:
    """Run the loop again and again until `count` processes were killed in it, and compare all digests."""
    python, random = client_python(COOKBOOKS[0]), np.random.default_rng(seed)
    killed, loops, equal = Counter[str](), 0, 0
    print(f"kills: seed {seed}", flush=True)
    while killed.total() < count:
        with served(RESTARTS) as door:
            killer = Killer(door, count - killed.total(), random)
            with beside(killer.live):
                run_client(python, EXAMPLES / "rl_loop.py", loop_words(steps), door)
            found = door.weights()
        if not killer.killed:
            raise SystemExit(f"a loop of {steps} steps ended before anything was killed; give it more")
        loops, equal = loops + 1, equal + (found == expected)
        killed.update(killer.killed)
        print(f"killed {dict(killer.killed)}: {'equal' if found == expected else found}", flush=True)
    return {"kills": killed.total(), "kills_by": dict(killed), "kills_loops": loops, "kills_equal": equal}
