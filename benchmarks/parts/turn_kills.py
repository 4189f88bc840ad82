"""Turn kills: processes of a whole run with turns are killed while it runs, and what it left is audited.

A process is killed (`kill -9`) once it was there while some turns were answered, so that it had trajectories
in hand. Everything that is counted comes from the run's journal and from its batch files.
"""

import json
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from antiphon.benchmarks.parts.measure import PROJECT, read_rows, run_job, scratch_home
from antiphon.core.errors import ContractError
from antiphon.core.loop import events as e
from antiphon.core.loop.turns import check_answered
from antiphon.core.records import BatchRow
from antiphon.core.spans import beginning_of
from antiphon.lineage.rollout_table import decode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.runs.supervisor import WORKED_S
from antiphon.services.rollout.work import piece_of

CONFIG = PROJECT / "examples" / "game.yaml"
SMALL_HOST = PROJECT / "benchmarks" / "parts" / "small_host.py"
VICTIMS = {
    "worker": ("antiphon.cli.app", "worker"),
    "environment": ("antiphon.environments.scoring.child",),
    "host": (str(SMALL_HOST),),
}
"""Kinds of processes that are killed, by words that follow one another in their command lines."""
LIVED_TURNS = 12
"""Turns that are answered between two kills of a kind, and after its start before a process is killed."""
PAUSE_S = 1.0
"""Shortest time between two kills of a kind: what was killed starts again meanwhile."""
LOOK_S = 0.25
RUN_S = 1500.0
"""Longest run."""
GROUP = 8
OWN = ("reward.sandbox=always",)
HOSTED = (
    "environment.name=host",
    f"environment.host_command=[{sys.executable}, {SMALL_HOST}]",
    "gateway.host_timeout_s=3",
)
"""Whose environment it is."""
OVERRIDES = (
    f"loop.group_size={GROUP}",
    "loop.prompts_per_step=8",  # a step is done between a few kills
    "loop.filter=none",
    "loop.max_staleness=6",
    "rollout.workers=2",
    "coordinator.heartbeat_s=0.5",
    "coordinator.speculation=0",
    "services.restart_limit=1000",
    "evaluation.interval=0",
    "evaluation.prompts=1",
    "record.dvc=false",
    "record.mlflow=false",
)
"""What differs from `examples/game.yaml`: all groups train, and none is sampled twice on purpose."""


@dataclass(frozen=True, slots=True)
class TurnAudit:
    """What a run came to; everything after `trajectories` should be 0."""

    trajectories: int
    lost: int
    """Trajectories of groups that were opened and neither trained nor were dropped as too old."""
    twice: int
    """Trajectories that trained more than once."""
    wrong: int
    """Those that observed something else than their environment answered."""
    failed: int
    """Those whose environment is said to have failed."""
    sampled_again: int
    """Tokens of answered turns that their group's next lease did not begin with, and answered turns that are
    in no trained trajectory."""


FAULTS = ("lost", "twice", "wrong", "failed", "sampled_again")
"""Counts that must be 0."""


def audit(events: Sequence[e.JournalEvent], rows: Sequence[BatchRow], group_size: int) -> TurnAudit:
    """Count what must not be, in the journal of a finished run and the rows that it trained on."""
    answers: dict[str, dict[str, e.TurnAnswered]] = {}
    for event in events:
        if isinstance(event, e.TurnAnswered):
            answers.setdefault(event.group_id, {})[f"{event.sample_index}/{event.row_digest}"] = event
    ends: dict[tuple[str, str], int] = {}  # (group, answer) -> tokens of the row that it answered
    wrong = 0
    for row in rows:
        own, piece = answers.get(row.group_id, {}), piece_of(row, row.sample_index)
        try:
            for stop in (*(start for start, _ in row.observed), row.stop):
                digest = check_answered(beginning_of(piece, stop), row.sample_index, own, "a trained row")
                ends[row.group_id, f"{row.sample_index}/{digest}"] = stop
        except ContractError:
            wrong += 1
    trained = Counter((row.group_id, row.sample_index) for row in rows)
    used = {group_id for group_id, _ in trained}
    again, known = 0, dict[str, dict[int, int]]()
    for event in events:
        if isinstance(event, e.TurnAnswered) and event.group_id in used:
            answered = ends.get((event.group_id, f"{event.sample_index}/{event.row_digest}"))
            reached = known.setdefault(event.group_id, {})
            reached[event.sample_index] = max(reached.get(event.sample_index, 0), answered or 0)
            again += answered is None
        elif isinstance(event, e.LeaseGranted):
            again += max(0, sum(known.get(event.group_id, {}).values()) - event.continued)
    opened = {event.group_id for event in events if isinstance(event, e.GroupOpened)}
    opened -= {event.group_id for event in events if isinstance(event, e.GroupDropped)}
    return TurnAudit(
        trajectories=len(rows),
        lost=sum(not trained[group_id, index] for group_id in opened for index in range(group_size)),
        twice=sum(count - 1 for count in trained.values()),
        wrong=wrong,
        failed=sum(bool(row.failure) for row in rows),
        sampled_again=again,
    )


def read_run(home: Path) -> tuple[list[e.JournalEvent], list[BatchRow]]:
    """Return the journal of the only run of a home, and the rows that its steps trained on, in order."""
    (journal,) = home.glob("runs/*/journal.db")
    found = read_rows(journal, "SELECT kind, body FROM events ORDER BY seq")
    events, store = [e.load_event(kind, body) for kind, body in found], ArtifactStore(home / "store")
    commits = [event for event in events if isinstance(event, e.StepCommitted)]
    return events, [row for commit in commits for row in decode_batch(store.get(commit.batch_digest))]


class Killer:
    """Kills processes of the run that this process has started in a home."""

    def __init__(self, home: Path, most: Mapping[str, int], random: np.random.Generator) -> None:
        """Kill up to `most` processes of each kind in `VICTIMS`; `random` says which."""
        self.killed = dict.fromkeys(most, 0)
        self._home, self._most, self._random = home, most, random
        self._born: dict[psutil.Process, tuple[float, int]] = {}
        """When a process was first seen, and how many turns had been answered then."""
        self._last = dict.fromkeys(most, (0.0, 0))
        self._of_service: Counter[str] = Counter()

    def live(self, over: threading.Event) -> None:
        """Kill until all are killed or it is over."""
        while not over.wait(LOOK_S) and self.killed != self._most:
            now, turns, services = time.monotonic(), self._turns(), self._services()
            family = _command_lines(psutil.Process())
            for kind in self._most:
                found = [one for one, line in family.items() if _has(line, VICTIMS[kind])]
                living = {one: services.get(one.pid, "") for one in found}
                if kind == "worker":  # one that is still starting has nothing in hand
                    living = {one: name for one, name in living.items() if name}
                elif kind == "host":
                    living = dict.fromkeys(living, kind)
                ready = [one for one, name in living.items() if self._ready(one, name, turns)]
                killed_s, answered = self._last[kind]
                if (
                    ready
                    and self.killed[kind] < self._most[kind]
                    and now - killed_s >= PAUSE_S
                    and turns - answered >= LIVED_TURNS
                ):
                    chosen = ready[int(self._random.integers(len(ready)))]
                    with suppress(psutil.NoSuchProcess):
                        chosen.kill()
                        self.killed[kind] += 1
                        self._last[kind] = now, turns
                        self._of_service[living[chosen]] += 1

    def _ready(self, process: psutil.Process, service: str, turns: int) -> bool:
        born_s, before = self._born.setdefault(process, (time.monotonic(), turns))
        # The supervisor waits longer and longer for one that ends again and again before it worked a while.
        worked_s = WORKED_S + 1.0 if service and self._of_service[service] % 2 else 0.0
        return turns - before >= LIVED_TURNS and time.monotonic() - born_s >= worked_s

    def _turns(self) -> int:
        """Return how many turns were answered so far."""
        for journal in self._home.glob("runs/*/journal.db"):
            with suppress(sqlite3.OperationalError):  # the tables are being made
                ((count,),) = read_rows(journal, "SELECT count(*) FROM events WHERE kind = 'turn.answered'")
                return int(count)
        return 0

    def _services(self) -> dict[int, str]:
        """Return the services that are ready, by their process's number."""
        found = {}
        for path in self._home.glob("runs/*/services/*.json"):
            with suppress(FileNotFoundError, json.JSONDecodeError):
                found[int(json.loads(path.read_text())["pid"])] = path.stem
        return found


def kill_turns(
    kills: int, steps: int, kinds: Sequence[str], overrides: Sequence[str], seed: int
) -> Counter[str]:
    """Kill `kills` processes of each kind in runs of `steps` steps and return all counts, summed up.

    Raises:
        SystemExit: when a run fails, or ends before any process was killed in it.
    """
    random, killed, found = np.random.default_rng(seed), Counter[str](), Counter[str]()
    number = 0
    while left := {kind: kills - killed[kind] for kind in kinds if kills > killed[kind]}:
        with scratch_home() as home, ThreadPoolExecutor(1) as beside:
            killer, over = Killer(home, left, random), threading.Event()
            killing = beside.submit(killer.live, over)
            try:
                given = [f"run.steps={steps}", f"run.seed={seed + number}", *OVERRIDES, *overrides]
                run_job(home, CONFIG, given, f"killed-{number}", RUN_S, untaught=True)
            finally:
                over.set()
            killing.result()
            audited = asdict(audit(*read_run(home), GROUP))
        if not any(killer.killed.values()):
            raise SystemExit(f"a run of {steps} steps ended before anything was killed; give it more")
        killed.update(killer.killed)
        found.update(audited)
        number += 1
        print(f"killed {dict(killer.killed)}: {audited}", flush=True)
    found.update({f"{kind}_kills": killed[kind] for kind in kinds})
    return found


def _command_lines(root: psutil.Process) -> dict[psutil.Process, list[str]]:
    """Return all that a process has started, with the words of their command lines."""
    found = {}
    for process in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found[process] = process.cmdline()
    return found


def _has(line: Sequence[str], words: Sequence[str]) -> bool:
    return any(tuple(line[at : at + len(words)]) == words for at in range(len(line)))
