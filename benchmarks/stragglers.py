"""Stragglers: what a run loses by a worker that never loads, one with a slow link and one whose engine hangs.

Coordinator, learner, reward service and eight workers are those of production, and workers and coordinator
talk over real gRPC; the flow walks production's stages. Trainer, engines and links are light stand-ins that
sleep for as long as a step or a snapshot takes, so that a run does not depend on how many cores there are.
Runs without and with trouble take turns. The troubled run has three workers more:

- one whose link is twenty times slower than the others', for snapshots and for finished groups;
- one that joins after a quarter of the steps and never finishes fetching its first snapshot;
- one whose engine stands still for good after half of the steps, while its heartbeats go on.

`ratio` is seconds per step with trouble over seconds per step without, the median of the pairs.
`hung_recovery_lease_periods` is the longest time from the moment at which an engine stopped until others
had handed in every group that it held, in units of coordinator.lease_s. `ended_runs` counts runs that did
not reach their last step.

    .venv/bin/python benchmarks/stragglers.py --steps 80 --pairs 4
"""

import asyncio
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from antiphon.api.engine import EngineOutput
from antiphon.benchmarks.parts.imposed_worker import ImposedEngine, WorkerOrder, make_worker
from antiphon.benchmarks.parts.kills.standins import LinkedClient
from antiphon.benchmarks.parts.measure import end_on_sigterm
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.benchmarks.parts.served_run import served_run
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import AntiphonError
from antiphon.core.loop.events import GroupDropped, GroupSubmitted, LeaseGranted, load_event
from antiphon.services.coordinator.journal.journal import StoredEvent
from antiphon.system.logs import configure_logs

WORKERS = 8
HANGING = "hanging"
TRAIN_S = 1.0
"""One learner step; rollout of a step takes about half of it."""
ENGINE_STEP_S = 0.04
LINK_S = 0.1
"""What a snapshot takes on a usual link."""
SLOW_LINK = 20.0
NEVER_S = 1e6
"""Of a snapshot that does not arrive."""
JOIN_AT, HANG_AT = 0.25, 0.5
"""Shares of the steps after which trouble begins."""
WARM_UP_STEPS = 4
RUN_FACTOR, RUN_S = 4.0, 60.0
"""A run that takes this many times the learner's own seconds, and this many seconds more, has ended."""


def make_config(steps: int, seed: int) -> RunConfig:
    """Return a run of small steps that the learner limits."""
    return build_config(
        {
            "run": {"name": "stragglers", "steps": steps, "seed": seed},
            "environment": {"train_size": 400, "heldout_size": 4},
            "evaluation": {"prompts": 4, "interval": 0},
            "loop": {"max_staleness": 2, "prompts_per_step": 8, "group_size": 4, "filter": "none"},
            "sampling": {"max_tokens": 24},
            "rollout": {"concurrent_groups": 2},
            "learner": {"checkpoint_interval": 1000},
            "coordinator": {"lease_s": 3.0, "heartbeat_s": 0.2},
            "services": {"stall_timeout_s": RUN_S},
            "drafting": {"enabled": False},
        }
    )


@dataclass
class Trouble:
    """What begins at which step; without trouble nothing does."""

    steps: int
    joins: asyncio.Event = field(default_factory=asyncio.Event)
    hangs: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    """The run is over: a thread that stands still may end."""
    hung_at: float | None = None
    """Unix second at which an engine stopped."""
    begun: list[float] = field(default_factory=list)
    """Monotonic second at which each step began to train."""

    def train(self, step: int, loop: asyncio.AbstractEventLoop) -> None:
        """A step begins to train; called in the learner's thread."""
        self.begun.append(time.monotonic())
        if step == int(JOIN_AT * self.steps):
            loop.call_soon_threadsafe(self.joins.set)
        if step == int(HANG_AT * self.steps):
            self.hangs.set()

    def seconds_per_step(self) -> float:
        """Return the mean time from one step's beginning to the next one's, without the first ones."""
        return (self.begun[-1] - self.begun[WARM_UP_STEPS]) / (len(self.begun) - 1 - WARM_UP_STEPS)


class TroubledEngine(ImposedEngine):
    """Stands still for good once the trouble says so."""

    def __init__(self, order: WorkerOrder, trouble: Trouble) -> None:
        super().__init__(order)
        self._trouble = trouble

    def step(self) -> list[EngineOutput]:
        """Advance every request by one token, or stand still."""
        if self._trouble.hangs.is_set():
            self._trouble.hung_at = self._trouble.hung_at or time.time()
            self._trouble.released.wait()
            return []
        return super().step()


async def live(folder: Path, config: RunConfig, trouble: Trouble, troubled: bool) -> list[StoredEvent]:
    """Run to the last step, all workers as tasks of this process, and return the journal.

    Raises:
        AntiphonError: when a service, a worker or the flow gave up.
        TimeoutError: when the run takes far too long.
    """
    begins = partial(trouble.train, loop=asyncio.get_running_loop())
    async with served_run(config, folder, TRAIN_S, begins=begins) as run:

        async def work(name: str, link_s: float = LINK_S, joins: asyncio.Event | None = None) -> None:
            if joins is not None:
                await joins.wait()
            order, hangs = WorkerOrder(name, ENGINE_STEP_S, broadcast_s=link_s), name == HANGING
            client = LinkedClient(run.address, link_s)
            engine = partial(TroubledEngine, order, trouble) if hangs else None
            try:
                await make_worker(order, client, engine).run(lambda: None)
            except AntiphonError:
                if not hangs:  # one that noticed by itself that its engine hangs may leave
                    raise
            finally:
                await client.close()

        workers = [work(f"worker-{number}") for number in range(WORKERS)]
        if troubled:
            workers += [work("slow-link", SLOW_LINK * LINK_S), work(HANGING)]
            workers.append(work("joiner", NEVER_S, trouble.joins))
        flow = asyncio.ensure_future(run.flow.run())
        tasks = [flow, run.rewarding, *map(asyncio.ensure_future, workers)]
        try:
            async with asyncio.timeout(RUN_FACTOR * TRAIN_S * config.run.steps + RUN_S):
                while not flow.done():
                    running = [task for task in tasks if not task.done()]
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        if task.done():
                            task.result()  # says what went wrong
            return await run.events()
        finally:
            trouble.released.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


RATIO_MOST = 1.03
RECOVERY_MOST = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run."""

    seconds_per_step: float | None
    """None when it did not reach its last step."""
    recovery_s: float | None
    """None without an engine that hung."""
    why: str = ""
    """It ended early."""


def run_once(steps: int, seed: int, troubled: bool) -> Outcome:
    """Run once, in a folder of its own."""
    config, trouble = make_config(steps, seed), Trouble(steps)
    with tempfile.TemporaryDirectory(prefix="antiphon-stragglers-") as place:
        try:
            rows = asyncio.run(live(Path(place), config, trouble, troubled))
        except (AntiphonError, TimeoutError) as error:
            return Outcome(None, None, f"{type(error).__name__} after {len(trouble.begun)} steps: {error}")
    return Outcome(trouble.seconds_per_step(), recovery_s(rows, trouble.hung_at) if troubled else None)


def recovery_s(rows: list[StoredEvent], hung_at: float | None) -> float | None:
    """Return the seconds from the moment an engine stopped until no group waited for it any more.

    A group waits until another worker hands it in, or its place was given to another group. None when the
    engine held no group; one that waits to the end counts until then.
    """
    if hung_at is None:
        return None
    waiting: set[str] = set()
    recovered_at: float | None = None
    for row in rows:
        event = load_event(row.kind, row.body)
        if isinstance(event, LeaseGranted) and event.worker_id.startswith(f"{HANGING}-"):
            waiting.add(event.group_id)
        elif isinstance(event, GroupSubmitted | GroupDropped) and event.group_id in waiting:
            waiting.discard(event.group_id)
            recovered_at = row.at
    if waiting:
        recovered_at = rows[-1].at
    return None if recovered_at is None or recovered_at < hung_at else recovered_at - hung_at


def violations(ratios: list[float], recovery: float | None) -> list[str]:
    """Return a sentence for everything that does not hold; `recovery` is in lease periods."""
    found = []
    if ratios and median(ratios) > RATIO_MOST:
        found.append(f"a step takes {median(ratios):.3f} times as long, not at most {RATIO_MOST}")
    if recovery is None:
        found.append("no engine that hung held a group")
    elif recovery > RECOVERY_MOST:
        found.append(f"groups of a hung engine took {recovery} lease periods, not at most {RECOVERY_MOST}")
    return found


def main() -> int:
    """Run pairs of runs and compare them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=80, help="learner steps of each run (default 80)")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of runs (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the first pair (default 0)")
    options = parser.parse_args()
    if options.steps < 4 * WARM_UP_STEPS:
        parser.error(f"--steps must be at least {4 * WARM_UP_STEPS}: the first {WARM_UP_STEPS} do not count")
    end_on_sigterm()
    configure_logs("error")
    samples: dict[str, list[float]] = {"ratio": [], "seconds_per_step": [], "seconds_per_step_troubled": []}
    recoveries: list[float] = []
    ended: list[str] = []
    for pair in range(options.pairs):
        found: dict[bool, Outcome] = {}
        for troubled in (False, True) if pair % 2 == 0 else (True, False):
            found[troubled] = run_once(options.steps, options.seed + pair, troubled)
            print(f"pair {pair}, {'with' if troubled else 'without'} trouble: {found[troubled]}", flush=True)
        ended += [outcome.why for outcome in found.values() if outcome.why]
        calm_s, troubled_s = found[False].seconds_per_step, found[True].seconds_per_step
        if calm_s is not None and troubled_s is not None:
            samples["ratio"].append(round(troubled_s / calm_s, 4))
            samples["seconds_per_step"].append(round(calm_s, 4))
            samples["seconds_per_step_troubled"].append(round(troubled_s, 4))
        if (seconds := found[True].recovery_s) is not None:
            recoveries.append(seconds / make_config(options.steps, 0).coordinator.lease_s)
    recovery = round(max(recoveries), 3) if recoveries else None
    result = {
        "workers": WORKERS,
        "steps": options.steps,
        "hung_recovery_lease_periods": recovery,
        "ended_runs": len(ended),
    }
    at_size, violated = violations(samples["ratio"], recovery), [f"a run ended: {why}" for why in ended]
    return finish(result, record=options.record, samples=samples, violated=violated, at_size=at_size)


if __name__ == "__main__":
    sys.exit(main())
