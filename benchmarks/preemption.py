"""Preemption: what a fleet of reclaimed workers loses against one that nobody disturbs.

Eight real worker processes sample for the production coordinator over gRPC; a paced stand-in takes the
engine's place and time is scaled. Workers are killed without notice, each with a given probability
per scaled hour, and replaced a while later. The disturbed fleet has some headroom: its workers are
faster than the learner needs by that share; the undisturbed one has none. The learner takes a batch
whenever there is one and trains as long as the undisturbed fleet needs for the next.

The last line is one JSON object. `lost_throughput` compares learner steps per scaled hour. Wasted
shares are of the worker seconds that were spent on leases, as the coordinator's ledger books them:
`wasted_share` with hand-over of unfinished groups, `wasted_share_without_handover` in a third run, the
same reclaims without it. Shares of wasted tokens are of all that was sampled: what nobody handed in, less
what is unfinished when the undisturbed fleet is stopped. Afterwards every token of every batch is
compared with what one engine would have sampled.

    .venv/bin/python benchmarks/preemption.py
    .venv/bin/python benchmarks/preemption.py --mode moment
    .venv/bin/python benchmarks/preemption.py --mode trace --trace traces/p3-trace.csv
    .venv/bin/python benchmarks/preemption.py --real
"""

import argparse
import asyncio
import json
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.benchmarks.parts.measure import end_on_sigterm, print_result
from antiphon.benchmarks.parts.preemption.fleet import (
    MODEL,
    TOKEN_S,
    LengthReward,
    NumberedPrompts,
    Site,
    WorkerOrder,
    manifest_of,
    spawn,
    tokens_of,
)
from antiphon.benchmarks.parts.preemption.schedule import (
    Stay,
    at_one_moment,
    by_chance,
    by_trace,
    traces,
    undisturbed,
)
from antiphon.core.records import StepCommit
from antiphon.lineage.store.artifact_store import open_store
from antiphon.models.codec import TextCodec
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.services.coordinator.server import JOURNAL_NAME, start_coordinator
from antiphon.services.coordinator.service import CoordinatorService
from antiphon.services.reward.service import RewardService
from antiphon.services.rpc.serving import stop_server
from antiphon.system.processes import configure_logs

RUN_ID = "preemption"
JOIN_S = 60.0
"""Real seconds that the first workers may take to be there."""
WARM_UP_STEPS = 3
"""Steps left out at the beginning: the pipeline fills."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One fleet over one span of time."""

    steps_per_hour: float
    """Learner steps per scaled hour."""
    reclaimed: int
    worker_hours: float
    """Scaled hours that workers were there, until reclaimed or until the end."""
    wasted_share: float
    generated: int
    """Tokens that workers sampled, as far as they lived to tell."""
    handed_in: int
    """Tokens of the groups that were handed in."""
    continued: int
    """Leases that went on from another worker's tokens."""
    tokens_checked: int
    wrong_tokens: int
    staleness_max: int

    def missing_share(self) -> float:
        """Return the share of the sampled tokens that nobody handed in: wasted, or unfinished at the end."""
        return 1.0 - self.handed_in / self.generated if self.generated else 0.0

    def reclaimed_share(self) -> float:
        """Return the probability of being reclaimed within an hour that this comes to."""
        return 1.0 - float(np.exp(-self.reclaimed / self.worker_hours)) if self.worker_hours else 0.0


class Fleet:
    """Starts and kills worker processes as a schedule says."""

    def __init__(
        self, site: Site, stays: Sequence[Stay], headroom: float, address: str, folder: Path
    ) -> None:
        self._site, self._stays, self._address, self._folder = site, stays, address, folder
        self._token_s = TOKEN_S / site.scale / (1.0 + headroom)
        self._running: dict[Stay, subprocess.Popen[bytes]] = {}
        self.reclaimed = 0
        self.seconds = 0.0

    def start_first(self) -> int:
        """Start those that are there from the beginning and return how many they are."""
        first = [stay for stay in self._stays if stay.start_s <= 0.0]
        for stay in first:
            self._spawn(stay, 0.0)
        return len(first)

    async def follow(self, begun: float, span_s: float) -> None:
        """Keep to the schedule until the span is over; `begun` is its beginning on the loop's clock."""
        clock, scale = asyncio.get_running_loop().time, self._site.scale
        comings = [(stay.start_s, 0, stay) for stay in self._stays if 0.0 < stay.start_s < span_s]
        goings = [(stay.stop_s, 1, stay) for stay in self._stays if stay.stop_s < span_s]
        for stay in self._stays:
            self.seconds += max(0.0, min(stay.stop_s, span_s) - max(0.0, stay.start_s))
        # A replacement is started early, for its imports take real time, and joins when it is due.
        lead_s = 4.0 * scale
        plan = [(max(0.0, at - lead_s), 0, stay) for at, _, stay in comings] + goings
        for at, leaves, stay in sorted(plan, key=lambda entry: entry[:2]):
            await asyncio.sleep(max(0.0, begun + at / scale - clock()))
            if leaves:
                self.reclaimed += 1
                process = self._running.pop(stay)
                process.kill()
                await asyncio.to_thread(process.wait, 10)
            else:
                self._spawn(stay, begun + stay.start_s / scale)
        await asyncio.sleep(max(0.0, begun + span_s / scale - clock()))

    def _spawn(self, stay: Stay, start_at: float) -> None:
        order = WorkerOrder(
            self._address,
            f"w{stay.slot}-{int(stay.start_s)}",
            self._token_s,
            self._site.group_s,
            start_at,
        )
        self._running[stay] = spawn(order, self._folder / "workers.log")

    def close(self) -> None:
        """Kill whoever is left."""
        for process in self._running.values():
            process.send_signal(signal.SIGKILL)
            process.wait(10)


async def learn(client: CoordinatorClient, site: Site, ends: list[float]) -> None:
    """Be the flow and the learner, for ever; `ends` gets the time of each commit."""
    clock = asyncio.get_running_loop().time
    step = 0
    while True:
        await client.open_step(step + site.max_staleness)
        reply = await client.await_stage("reward", step, 5.0)
        if reply.batch is None:
            continue
        trained = clock() + site.train_s / site.scale
        await asyncio.sleep(trained - clock())
        manifest = manifest_of(RUN_ID, step + 1)
        await client.commit_step(StepCommit(step, step + 1, manifest.weights_digest, reply.batch.digest))
        await client.announce_snapshot(manifest)
        ends.append(clock())
        step += 1


async def run_fleet(
    site: Site, stays: Sequence[Stay], headroom: float, span_s: float, seed: int, folder: Path
) -> Outcome:
    """Serve one run for `span_s` scaled seconds and count."""
    config, clock = site.config(seed), asyncio.get_running_loop().time
    folder.mkdir()
    store = open_store(folder / "store", config.record)
    state_machine = RunStateMachine(
        config, RUN_ID, Journal(folder / JOURNAL_NAME, RUN_ID), store, NumberedPrompts(), clock
    )
    await state_machine.start()
    server, port = await start_coordinator(CoordinatorService(state_machine), "127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    client, rewarding = CoordinatorClient(address), CoordinatorClient(address)
    judge = RewardService(rewarding, LengthReward(), TextCodec.load(str(MODEL)), RUN_ID, "judge", 60.0)
    fleet = Fleet(site, stays, headroom, address, folder)
    ends: list[float] = []
    await client.announce_snapshot(manifest_of(RUN_ID, 0))
    tasks = [asyncio.ensure_future(judge.run(lambda: None))]
    try:
        expected = fleet.start_first()
        async with asyncio.timeout(JOIN_S):
            while sum(member.held_version == 0 for member in state_machine.fleet.living()) < expected:
                await asyncio.sleep(0.05)
        tasks.append(asyncio.ensure_future(learn(client, site, ends)))
        following = asyncio.ensure_future(fleet.follow(clock(), span_s))
        await asyncio.wait([following, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # says what went wrong
        await following
        account = state_machine.state.ledger.account(clock())
        events = await state_machine.journal.read(0, 10**9)
        generated = sum(
            worker.tokens_generated for worker in state_machine.fleet.records(state_machine.leases, clock())
        )
        checked, wrong = await check_tokens(state_machine, site)
    finally:
        fleet.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=10)
        for party in (client, rewarding):
            await party.close()
        await stop_server(server)
        await state_machine.close()
    return Outcome(
        steps_per_hour=steps_per_hour(ends[WARM_UP_STEPS:], site.scale),
        reclaimed=fleet.reclaimed,
        worker_hours=fleet.seconds / 3600.0,
        wasted_share=account.wasted_share(),
        generated=generated,
        handed_in=sum(
            sum(json.loads(row.body)["token_counts"]) for row in events if row.kind == "group.submitted"
        ),
        continued=sum(row.kind == "lease.granted" and '"continued":0' not in row.body for row in events),
        tokens_checked=checked,
        wrong_tokens=wrong,
        staleness_max=max(state_machine.state.staleness_histogram, default=0),
    )


def steps_per_hour(ends: Sequence[float], scale: float) -> float:
    """Return steps per scaled hour from the ends of steps in real seconds; 0 from fewer than two."""
    if len(ends) < 2:
        return 0.0
    return (len(ends) - 1) / ((ends[-1] - ends[0]) * scale / 3600.0)


async def check_tokens(state_machine: RunStateMachine, site: Site) -> tuple[int, int]:
    """Return how many tokens were handed in for sealed batches, and how many are not what they must be."""
    checked = wrong = 0
    for groups in list(state_machine.state.sealed_groups.values()):  # the run goes on meanwhile
        for group_id in groups:
            for trajectory in (await state_machine.submission(group_id)).trajectories:
                expected = tokens_of(trajectory.seed, site.group_s)
                checked += len(expected)
                if not np.array_equal(trajectory.token_ids, expected):
                    wrong += len(expected)
    return checked, wrong


def plan(arguments: argparse.Namespace, span_s: float) -> list[Stay]:
    """Return the disturbed fleet's schedule."""
    replacement_s = np.inf if arguments.no_replacement else arguments.replacement
    if arguments.mode == "moment":
        return at_one_moment(arguments.workers, span_s, arguments.share, replacement_s)
    if arguments.mode == "trace":
        return by_trace(traces()[arguments.trace], arguments.workers, span_s)
    return by_chance(arguments.workers, span_s, arguments.share, replacement_s, arguments.seed)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the fleets one after the other and compare them."""
    site = Site(workers=arguments.workers, scale=arguments.scale)
    span_s = 3600.0 * arguments.hours
    stays = plan(arguments, span_s)
    fleets = {
        "undisturbed": (site, undisturbed(arguments.workers), 0.0),
        "disturbed": (site, stays, arguments.headroom),
        "without handover": (replace(site, handover=False), stays, arguments.headroom),
    }
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="antiphon-preemption-") as folder:
        for number, (name, (fleet_site, schedule, headroom)) in enumerate(fleets.items()):
            work = run_fleet(
                fleet_site, schedule, headroom, span_s, arguments.seed, Path(folder) / str(number)
            )
            found[name] = asyncio.run(work)
            print(f"{name}: {found[name]}", flush=True)
    calm, storm = found["undisturbed"], found["disturbed"]
    if not calm.steps_per_hour:
        raise SystemExit(f"--hours {arguments.hours:g} is too short for the learner's steps; give more")
    return {
        "mode": arguments.mode,
        "seed": arguments.seed,
        "lost_throughput": round(1.0 - storm.steps_per_hour / calm.steps_per_hour, 4),
        "reclaimed_share": round(storm.reclaimed_share(), 3),
        "reclaimed": storm.reclaimed,
        "replacement_s": None if arguments.no_replacement else arguments.replacement,
        "groups_per_hour": round(storm.steps_per_hour * site.prompts_per_step, 1),
        "groups_per_hour_undisturbed": round(calm.steps_per_hour * site.prompts_per_step, 1),
        "wasted_share": round(storm.wasted_share, 4),
        "wasted_share_without_handover": round(found["without handover"].wasted_share, 4),
        "wasted_tokens_share": round(storm.missing_share() - calm.missing_share(), 4),
        "wasted_tokens_share_without_handover": round(
            found["without handover"].missing_share() - calm.missing_share(), 4
        ),
        "continued_leases": storm.continued,
        "tokens_checked": sum(outcome.tokens_checked for outcome in found.values()),
        "wrong_tokens": sum(outcome.wrong_tokens for outcome in found.values()),
        "beyond_bound": sum(outcome.staleness_max > site.max_staleness for outcome in found.values()),
        "hours": arguments.hours,
        "headroom": arguments.headroom,
    }


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mode",
        choices=["chance", "moment", "trace"],
        default="chance",
        help="chance: each worker by itself; moment: --share of the fleet at once; trace: as recorded",
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--hours", type=float, default=2.0, help="scaled hours of each fleet (default 2)")
    parser.add_argument(
        "--share", type=float, default=0.4, help="reclaimed per hour, or at once (default 0.4)"
    )
    parser.add_argument("--replacement", type=float, default=600.0, help="scaled seconds (default 600)")
    parser.add_argument("--no-replacement", action="store_true", help="a reclaimed worker is never replaced")
    parser.add_argument("--headroom", type=float, default=0.1, help="of the disturbed fleet (default 0.1)")
    parser.add_argument("--scale", type=float, default=60.0, help="scaled seconds per second (default 60)")
    parser.add_argument("--trace", default="traces/p3-trace.csv", help="id of a recorded trace")
    parser.add_argument("--seed", type=int, default=0, help="of the reclaims; first of --real (default 0)")
    parser.add_argument("--real", action="store_true", help="reward curves of real runs instead; hours")
    parser.add_argument("--pairs", type=int, default=5, help="seeds of --real (default 5)")
    parser.add_argument("--steps", type=int, default=40, help="learner steps of --real (default 40)")
    parser.add_argument(
        "--every", type=float, default=20.0, help="seconds between kills of --real (default 20)"
    )
    arguments = parser.parse_args()
    end_on_sigterm()
    if arguments.mode == "trace" and arguments.trace not in (known := traces()):
        print("skipped: " + (f"known traces: {', '.join(known)}" if known else "no recorded traces here"))
        print_result({"mode": "trace", "skipped": f"there is no trace {arguments.trace!r} here"})
        return
    configure_logs("error")
    if arguments.real:
        from antiphon.benchmarks.parts.preemption.curves import compare_curves

        seeds = range(arguments.seed, arguments.seed + arguments.pairs)
        print_result(compare_curves(seeds, arguments.steps, arguments.every))
        return
    print_result(measure(arguments))


if __name__ == "__main__":
    main()
