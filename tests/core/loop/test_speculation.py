"""Duplicates: only for the last groups of an awaited batch, only when slow, only where nothing changes."""

import pytest

from antiphon.core.config import RunConfig
from antiphon.core.loop import admission
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.loop.run_state import RunState, fold
from antiphon.core.loop.speculation import LEASES_NEEDED, LeaseTimes, group_to_duplicate
from tests.support.loop_model import make_config

P = 4


def rewarded(group_id: str) -> list[e.JournalEvent]:
    return [
        e.GroupSubmitted(group_id, f"l-{group_id}", "w1", 1, "d", 0, (1, 1), 0.1, 2.0),
        e.GroupRewarded(group_id, (0.0, 1.0), "j", 3.0),
    ]


def make_state(config: RunConfig, done: int) -> RunState:
    """Return step 0 with all groups leased to w1 and the first `done` of them rewarded."""
    state = RunState(group_size=2, payload_retention_steps=2)
    opened = admission.open_step(state, config, 0)
    if config.loop.mode == "elastic":
        opened += [e.GroupOpened(f"g{n}", n, n, 0, None, None, False) for n in range(P)]
    fold(state, [e.RunOpened("run-1", {}), *opened])
    for group_id in list(state.groups):
        state.apply(e.LeaseGranted(group_id, f"l-{group_id}", "w1", 1, 0, 1.0))
    for group_id in list(state.groups)[:done]:
        fold(state, rewarded(group_id))
    return state


def ask(state: RunState, config: RunConfig, age: float = 50.0, **changes: object) -> str | None:
    ages = {group.lease_id: age + group.number for group in state.groups.values()}
    asked = {
        "worker_id": "w2",
        "held_version": 0,
        "holders": {"w1": 0, "w2": 0},
        "numerics": {"w1": "a", "w2": "a", "w3": "a"},
        "ages_s": ages,
        "slow_s": 30.0,
        **changes,
    }
    return group_to_duplicate(state, config, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["fixed", "elastic"])
def test_the_last_group_of_an_awaited_batch_is_duplicated_when_slow(mode: str) -> None:
    config = make_config(mode=mode, prompts_per_step=P, filter_="none")
    state = make_state(config, done=P - 1)
    last = list(state.groups)[-1]
    assert ask(state, config) == last
    assert ask(state, config, age=20.0) is None  # not slow
    assert ask(state, config, slow_s=None) is None  # nobody knows what slow is
    assert ask(state, config, slow_s=None, sooner=lambda group: group.group_id == last) == last
    assert ask(state, config, worker_id="w1", sooner=lambda _: True) is None  # its own
    assert ask(state, config, held_version=1) is None  # another version: other tokens
    assert ask(state, config, holders={"w1": 1, "w2": 0}) is None  # its holder has moved on
    assert ask(state, config, held_version=None) is None
    assert ask(state, config, numerics={"w1": "a", "w2": "b"}) is None  # their engines may differ
    assert ask(state, config, numerics={"w1": "a"}) is None
    assert ask(state, config, numerics={"w1": "", "w2": ""}) is None  # bits depend on the batch
    assert ask(make_state(config, done=P - 2), config) is None  # two are missing: ceil(0.05 * 4) = 1
    assert ask(make_state(config, done=P), config) is None  # nothing is missing
    open_group = make_state(config, done=P - 1)
    open_group.apply(e.LeaseExpired(last, f"l-{last}", "w1", "lost"))
    assert ask(open_group, config) is None  # it can be leased as it is
    paused = make_state(config, done=P - 1)
    paused.apply(e.RunPaused("space"))
    assert ask(paused, config) is None


def test_the_oldest_of_several_is_duplicated_first_and_none_twice() -> None:
    config = make_config(mode="fixed", prompts_per_step=P, filter_="none")
    config = config.model_copy(
        update={"coordinator": config.coordinator.model_copy(update={"speculation": 0.5})}
    )
    state = make_state(config, done=P - 2)
    older, newer = list(state.groups)[-1], list(state.groups)[-2]  # ages grow with the number here
    assert ask(state, config) == older
    state.apply(e.LeaseDuplicated(older, "twin", "w2", 2, 5.0))
    assert ask(state, config, worker_id="w3") == newer


@pytest.mark.parametrize("change", [{"coordinator": "speculation"}, {"sampling": "sampler"}])
def test_it_can_be_switched_off_and_needs_keyed_sampling(change: dict[str, str]) -> None:
    config = make_config(prompts_per_step=P, filter_="none")
    section, name = next(iter(change.items()))
    value = 0.0 if name == "speculation" else "native"
    changed = getattr(config, section).model_copy(update={name: value})
    config = config.model_copy(update={section: changed})
    assert ask(make_state(config, done=P - 1), config) is None


def test_either_holder_may_be_lost_and_the_other_goes_on() -> None:
    config = make_config(mode="fixed", prompts_per_step=P, filter_="none")
    for lost, left in (("first", "twin"), ("twin", "first")):
        state = make_state(config, done=P - 1)
        group = list(state.groups.values())[-1]
        name = {"first": group.lease_id, "twin": "twin"}
        state.apply(e.LeaseDuplicated(group.group_id, "twin", "w2", 2, 5.0))
        state.apply(e.LeaseExpired(group.group_id, name[lost], "?", "lost"))
        assert group.phase is GroupPhase.LEASED and group.lease_id == name[left]
        assert not group.twin_lease_id and state.groups_requeued == 0
        state.apply(e.LeaseExpired(group.group_id, name[left], "?", "lost"))
        assert group.phase is GroupPhase.OPEN and state.groups_requeued == 1


def test_slow_is_what_one_lease_in_twenty_is() -> None:
    times = LeaseTimes()
    for second in range(1, LEASES_NEEDED):
        times.add(float(second))
    assert times.slow_s is None
    times.add(20.0)
    assert times.slow_s == 19.0
