"""Journals: the events of a long run, written at once by the journal itself.

No worker samples and nothing is stored beside the events; what a coordinator reads of them, and what a
report draws, is as after a real run: each step has its groups, its batch and a commit with as many
figures as the learner's, and every tenth version an evaluation.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop import events as e
from antiphon.core.loop.run_state import new_state
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal, TrainedRow
from antiphon.services.coordinator.journal.pinned import pinned_values
from antiphon.services.coordinator.journal.state_snapshots import StateSnapshots

GROUP_SIZE = 8
WORKERS = 8
METRICS = 45
HELD_OUT = 64
EVALUATED_EVERY = 10
STEPS_TOGETHER = 20
"""Steps in one transaction."""
DIGEST = "0" * 64


def long_config(prompts_per_step: int) -> RunConfig:
    """Return the configuration of a run that is far from its end."""
    return build_config(
        {
            "run": {"steps": 1_000_000, "seed": 1},
            "environment": {"train_size": 4096, "heldout_size": HELD_OUT},
            "evaluation": {"prompts": HELD_OUT, "interval": 0},
            "loop": {"mode": "elastic", "prompts_per_step": prompts_per_step, "group_size": GROUP_SIZE},
            "drafting": {"enabled": False},
        }
    )


def write_journal(folder: Path, run_id: str, config: RunConfig, events: int) -> int:
    """Write a journal of at least so many events into a folder and return how many steps it has."""
    journal, state = Journal(folder / JOURNAL_NAME, run_id), new_state(config)
    snapshots = StateSnapshots(journal, state)

    async def write() -> int:
        step = 0
        for found, trained in _steps(run_id, config):
            for event in found:
                state.apply(event)
            written = journal.enqueue(found, trained=trained, dump=snapshots.due(len(found)))
            step += trained is not None
            if step % STEPS_TOGETHER == 0:
                await written
            if journal.last_seq >= events:
                break
        await journal.close()
        return step

    return asyncio.run(write())


def _steps(run_id: str, config: RunConfig) -> Iterator[tuple[list[e.JournalEvent], TrainedRow | None]]:
    """Yield the events of the beginning, and then of one step after another, without end."""
    opening: list[e.JournalEvent] = [e.RunOpened(run_id, pinned_values(config))]
    opening += [e.WorkerRegistered(f"w{worker}-1", f"w{worker}", 16, 0.0) for worker in range(WORKERS)]
    yield [*opening, e.SnapshotAnnounced(0, DIGEST, "127.0.0.1:1")], None
    places, step = config.loop.prompts_per_step, 0
    while True:
        now, numbers = 10.0 * step, range(step * places, (step + 1) * places)
        ids = tuple(f"g{number:07d}" for number in numbers)
        found: list[e.JournalEvent] = [e.StepOpened(step)]
        for number, group_id in zip(numbers, ids, strict=True):
            found.append(e.GroupOpened(group_id, number, number % 4096, number // 4096, None, None, False))
            found += _sampled(group_id, number, step, GROUP_SIZE, now + number % 8)
        tokens, histogram = 800 * places, ((0, GROUP_SIZE * places),)
        found.append(
            e.BatchSealed(
                step, ids, (), DIGEST, DIGEST, GROUP_SIZE * places, 0, 0, tokens, 0.5, 100.0, histogram
            )
        )
        metrics = {f"train/figure_number_{index}": index * 1.2345678 + step for index in range(METRICS)}
        metrics |= {"train/loss": 0.1, "train/train_s": 5.0}
        found.append(e.StepCommitted(step, step + 1, DIGEST, DIGEST, metrics, True))
        found.append(e.SnapshotAnnounced(step + 1, DIGEST, "127.0.0.1:1"))
        if step % EVALUATED_EVERY == 0:
            found.append(e.EvaluationOpened(step + 1, HELD_OUT))
            for index in range(HELD_OUT):
                found += _sampled(f"v{step + 1:06d}-e{index:04d}", index, step + 1, 1, now + 5.0)
            found.append(e.EvaluationFinished(step + 1, 1.0, 100.0))
        yield found, TrainedRow(step, step + 1, DIGEST, DIGEST, ids)
        step += 1


def _sampled(group_id: str, number: int, version: int, samples: int, now: float) -> list[e.JournalEvent]:
    lease_id, worker_id = f"lease-of-{group_id}", f"w{number % WORKERS}-1"
    return [
        e.LeaseGranted(group_id, lease_id, worker_id, 1, version, now),
        e.GroupSubmitted(group_id, lease_id, worker_id, 1, DIGEST, version, (100,) * samples, 1.0, now + 2.0),
        e.GroupRewarded(group_id, tuple(float(index % 2) for index in range(samples)), "r", now + 2.5),
    ]
