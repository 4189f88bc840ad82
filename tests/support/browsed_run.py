"""A recorded run with all that a page of rollouts shows: turns, several versions, drafts, odd words."""

from dataclasses import replace

import numpy as np

from antiphon.core.records import BatchRef, BatchRow, FinishReason
from antiphon.lineage.rollout_table import encode_batch, encode_timings
from tests.support.artifacts import RecordedRun, tiny_row, tiny_timing
from tests.support.branched_rows import Turn, row_of

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
GROUP = 4


def browsed_row(step: int, sample: int) -> BatchRow:
    """Return a trajectory of step `step`; the one with number 1 has turns."""
    row = replace(tiny_row(step, sample, 6 + sample), prompt_key=f"train-0-{step % 2}", reward=sample / 2)
    if sample == 1:
        turns = [
            Turn(False, [], [6, 9], step),
            Turn(False, [9, 9, 9], [7], step),
            Turn(True, [8], [7, 1], step),
        ]
        made = row_of(([10, 11], turns))
        row = replace(made, group_id=row.group_id, prompt_key=row.prompt_key, sample_index=1, reward=0.5)
    if sample == 2:
        row = replace(
            row,
            finish_reason=FinishReason.LENGTH,
            token_ids=np.array([0, 1, 2, 3, 60, 61, step, 9], np.int32),
        )
    return row


class BrowsedRun(RecordedRun):
    """Four trajectories a step, of which each second step has the same prompt."""

    def batch(self, step: int) -> BatchRef:
        rows = [browsed_row(step, sample) for sample in range(GROUP)]
        timings = [
            replace(tiny_timing(step, i), passes=9, drafted=34, covered=33, accepted=30) for i in range(GROUP)
        ]
        timings[2] = replace(timings[2], said=f"lost {MARKUP}")
        ages = [step - row.oldest_version for row in rows]
        return BatchRef(
            *(
                step,
                self.store.put(encode_batch(rows)),
                self.store.put(encode_timings(timings)),
                GROUP,
                1,
                0,
                0,
            ),
            *(sum(row.token_ids.size for row in rows), 0.5, {age: ages.count(age) for age in ages}, 7.0),
            samples_digest=self.samples("train", step),
        )
