"""Stragglers: what a run loses by a worker that never loads, one with a slow link and one whose engine hangs.

Coordinator, learner, reward service and eight workers are those of production and talk over real gRPC; the
flow walks production's stages. Trainer and engines are light stand-ins that sleep for as long as a step
takes, so that a run does not depend on how many cores there are. Runs without and with trouble take turns.
The troubled run has three workers more:

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
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from antiphon.benchmarks.parts.measure import end_on_sigterm
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.benchmarks.parts.straggling_run import (
    HANGING,
    WARM_UP_STEPS,
    WORKERS,
    Site,
    Trouble,
    make_config,
)
from antiphon.core.errors import AntiphonError
from antiphon.core.loop.events import GroupDropped, GroupSubmitted, LeaseGranted, load_event
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal, StoredEvent
from antiphon.system.logs import configure_logs

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
        folder = Path(place)

        async def live() -> list[StoredEvent]:
            await Site(folder, config, trouble).live(troubled)
            journal = Journal(folder / JOURNAL_NAME, config.run.name)
            rows = await journal.read(0, 10**6)
            await journal.close()
            return rows

        try:
            rows = asyncio.run(live())
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
