"""Whatever fails meanwhile: kept completions are what was sampled, and each file is written once."""

import pytest

from antiphon.core.loop.events import BatchSealed, EvaluationFinished, GroupDropped, GroupRewarded, load_event
from antiphon.core.records import FinishReason
from antiphon.lineage.rollout_table import decode_batch
from antiphon.simulator.scenario import drawn_scenario
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.world import World

SEEDS = [*range(8), 54]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_kept_is_what_was_sampled_for_nothing(seed: int) -> None:
    scenario = drawn_scenario(seed)
    world = World(scenario, seed)
    assert not world.run().violations
    events = [load_event(row.kind, row.body) for row in world.shared.journal.written()]
    rewards = {e.group_id: e.rewards for e in events if isinstance(e, GroupRewarded)}
    filtered = {e.group_id for e in events if isinstance(e, GroupDropped) and e.reason == "filtered"}
    filtered |= {group_id for e in events if isinstance(e, BatchSealed) for group_id in e.filtered_ids}
    files = [(e, e.samples_digest) for e in events if isinstance(e, BatchSealed | EvaluationFinished)]
    for event, digest in files:
        rows = decode_batch(world.shared.store.get(digest)) if digest else []
        places = [(row.group_id, row.sample_index) for row in rows]
        assert len(places) == len(set(places))
        groups = {row.group_id for row in rows}
        assert len(rows) == sum(len(rewards[group_id]) for group_id in groups), "each is whole"
        for row in rows:
            assert row.reward == rewards[row.group_id][row.sample_index]
            unfinished = row.finish_reason in (FinishReason.TURNS, FinishReason.TOKENS)
            if unfinished:  # a limit of the run ended it
                assert row.reward == 0.0
            elif not row.failure:
                assert row.reward == arithmetic.reward(row.prompt_key, row.token_ids, scenario.reward_rarity)
            if isinstance(event, BatchSealed):
                assert row.group_id in filtered
            else:
                assert row.group_id.startswith(f"v{event.version:06d}-e")
        if isinstance(event, BatchSealed):
            assert len(groups) == event.groups_filtered, "all of them are kept"
    finished = [event.version for event, _ in files if isinstance(event, EvaluationFinished)]
    assert len(finished) == len(set(finished))
    # What was at hand on the way is forgotten.
    kept = {name for name in world.shared.journal.payloads if name in filtered or "-e" in name}
    retained = {g for ids in world.shared.state_machines[-1].state.sealed_groups.values() for g in ids}
    assert kept <= retained
