"""Run logs of runs that a test made up as events."""

from collections.abc import Iterable
from pathlib import Path

from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import committed_step, sealed_batch
from antiphon.core.records import BatchRef
from antiphon.core.run_clock import RunClock
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.run_log import RunLog


def write_run_log(run_dir: Path, events: Iterable[e.JournalEvent]) -> None:
    """Write the lines that the recorder of a run with these events would have written."""
    log, clock = RunLog(run_dir), RunClock()
    batches: dict[int, BatchRef] = {}
    prompts: dict[int, int] = {}
    for event in events:
        clock.apply(event)
        match event:
            case e.BatchSealed():
                batches[event.step] = sealed_batch(event, (), ())
            case e.StepCommitted():
                log.add_step(committed_step(event, clock.times()), batches.get(event.step))
            case e.EvaluationOpened():
                prompts[event.version] = event.prompts
            case e.EvaluationFinished():
                count, means = prompts[event.version], (event.reward_mean, event.completion_tokens_mean)
                log.add_evaluation(EvaluationRecord(event.version, count, count, *means))
