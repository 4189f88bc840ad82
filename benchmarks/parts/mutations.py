"""Mutations: production code, broken on purpose, which the simulator's witness must see."""

import asyncio
import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from pytest import MonkeyPatch

from antiphon.core.coordinator import consequences, groups, leases
from antiphon.core.coordinator import turns as coordinator_turns
from antiphon.core.coordinator.running_leases import RunningLeases
from antiphon.core.errors import IntegrityError
from antiphon.core.loop import acceptance, admission, assembly
from antiphon.core.loop import events as e
from antiphon.core.loop.advantages import group_advantages
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.leases import LeaseTable
from antiphon.core.loop.run_state import RunState
from antiphon.core.loop.staleness import StalenessBound, VersionWindow
from antiphon.core.records import Lease, SubmitVerdict
from antiphon.core.seeds import request_seeds
from antiphon.net.security import guard
from antiphon.net.security.guard import Guard, TokenBucket
from antiphon.services.coordinator import audit_queue, sealing
from antiphon.services.coordinator.journal import journal
from antiphon.services.coordinator.journal.journal import Journal
from antiphon.services.coordinator.journal.store import Written
from antiphon.services.learner.service import LearnerService
from antiphon.services.reward import turns
from antiphon.services.reward.sessions import Sessions
from antiphon.services.rollout import work
from antiphon.simulator.campaign import Campaign
from antiphon.simulator.faults import FaultMix
from antiphon.simulator.hosts import Manner
from antiphon.simulator.scenario import Scenario

MOST_SEEDS = 40
"""A broken promise must show within this many seeds."""


Patch = MonkeyPatch
"""Replaces attributes until it is undone."""


def the_gate_stands_open(patch: Patch) -> None:
    patch.setattr(VersionWindow, "admits", lambda self, version: True)
    patch.setattr(StalenessBound, "room", lambda self, held, issued, places: 1000)


def quick_groups_overtake(patch: Patch) -> None:
    patch.setattr(
        RunState,
        "training",
        lambda self: sorted(
            (group for group in self.groups.values() if group.evaluation is None),
            key=lambda group: group.phase is not GroupPhase.REWARDED,
        ),
    )


def receipts_are_forgotten(patch: Patch) -> None:
    real = acceptance.early_verdict

    def early_verdict(state: Any, submission: Any) -> SubmitVerdict | None:
        verdict = real(state, submission)
        group = state.groups.get(submission.group_id)
        return None if verdict is SubmitVerdict.ALREADY_ACCEPTED and group is not None else verdict

    patch.setattr(acceptance, "early_verdict", early_verdict)


def slower_leases_go_on(patch: Patch) -> None:
    patch.setattr(RunningLeases, "slower", lambda self, group, winner, now: [])


def answers_come_before_the_disk(patch: Patch) -> None:
    def written(self: Journal) -> Any:
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    patch.setattr(Journal, "written", written)


def leases_of_the_dead_last_for_ever(patch: Patch) -> None:
    patch.setattr(LeaseTable, "expired", lambda self, now: [])
    patch.setattr(LeaseTable, "of_worker", lambda self, worker_id: [])


def seeds_depend_on_the_attempt(patch: Patch) -> None:
    real = admission.group_seeds

    def group_seeds(config: Any, group: Any, prompt_key: str) -> tuple[int, ...]:
        return tuple(seed + group.attempt for seed in real(config, group, prompt_key))

    patch.setattr(admission, "group_seeds", group_seeds)


def sealed_groups_are_chosen_by_luck(patch: Patch) -> None:
    real = assembly._plan_fixed

    def plan(state: Any, config: Any, step: int) -> Any:
        found = real(state, config, step)
        if found is not None and len(found.used) > 1:
            used = sorted(found.used, key=lambda group: group.submitted_at_s)
            return type(found)(found.step, tuple(used), found.filtered)
        return found

    patch.setattr(assembly, "_plan_fixed", plan)


def restored_learners_believe_what_they_find(patch: Patch) -> None:
    async def restore(service: Any, commits: Any) -> None:
        service._read(service._trainer.start(len(commits)))

    patch.setattr(LearnerService, "_replay", restore)


def learners_hold_on_to_what_was_skipped(patch: Patch) -> None:
    real = LearnerService._make

    async def make(service: Any, batch: Any) -> Any:
        made = await real(service, batch)
        if made is None:
            raise IntegrityError(f"step {batch.step} was skipped, and nothing else is known")
        return made

    patch.setattr(LearnerService, "_make", make)


def skipped_steps_keep_their_batch(patch: Patch) -> None:
    real = assembly.skip_step
    patch.setattr(assembly, "skip_step", lambda *given: (real(*given)[0], []))


def groups_in_time_are_called_stale(patch: Patch) -> None:
    real = acceptance.accept_submission

    def accept(state: Any, config: Any, submission: Any, *rest: Any, **named: Any) -> Any:
        verdict, found = real(state, config, submission, *rest, **named)
        group = state.groups[submission.group_id]
        if verdict is SubmitVerdict.ACCEPTED and group.evaluation is None and group.number % 5 == 3:
            return SubmitVerdict.STALE, [*found, e.GroupDropped(group.group_id, "stale_on_arrival")]
        return verdict, found

    patch.setattr(acceptance, "accept_submission", accept)


def groups_are_answered_stale_that_train(patch: Patch) -> None:
    real = acceptance.accept_submission

    def accept(state: Any, config: Any, submission: Any, *rest: Any, **named: Any) -> Any:
        verdict, found = real(state, config, submission, *rest, **named)
        return SubmitVerdict.STALE if verdict is SubmitVerdict.ACCEPTED else verdict, found

    patch.setattr(acceptance, "accept_submission", accept)


def another_body_counts_as_the_same(patch: Patch) -> None:
    patch.setattr(acceptance, "submission_digest", lambda submission: 64 * "0")


def any_number_of_groups_is_opened(patch: Patch) -> None:
    real = admission._plan_elastic

    def plan(state: Any, config: Any, held: Any, groups: int, most: int | None, ordering: Any) -> Any:
        found = real(state, config, held, groups, most, ordering)
        first = state.next_number + len(found.openings)
        more = [
            e.GroupOpened(
                f"g{number:07d}", number, *admission.prompt_place(config, number), None, None, False
            )
            for number in range(first, first + 2)
            if held is not None
        ]
        ids = (*found.group_ids, *(opening.group_id for opening in more))
        return dataclasses.replace(found, openings=(*found.openings, *more), group_ids=ids)

    patch.setattr(admission, "_plan_elastic", plan)


def leases_last_a_moment(patch: Patch) -> None:
    real = LeaseTable.expired
    patch.setattr(LeaseTable, "expired", lambda self, now: real(self, now + 0.9 * self._duration_s))


def leases_are_anyones(patch: Patch) -> None:
    patch.setattr(RunningLeases, "foreign", lambda self, lease_ids, worker_id: {})


def seeds_ignore_the_prompt(patch: Patch) -> None:
    patch.setattr(admission, "request_seeds", lambda seed, key, *rest: request_seeds(seed, "", *rest))


def seeds_ignore_the_epoch(patch: Patch) -> None:
    patch.setattr(admission, "request_seeds", lambda seed, key, _, size: request_seeds(seed, key, 0, size))


def advantages_have_the_wrong_sign(patch: Patch) -> None:
    patch.setattr(sealing, "group_advantages", lambda *arguments: -group_advantages(*arguments))


def advantages_are_zero(patch: Patch) -> None:
    patch.setattr(sealing, "group_advantages", lambda rewards, *rest: 0.0 * rewards)


def groups_that_teach_something_are_filtered(patch: Patch) -> None:
    real = GroupState.__dict__["varied"].fget
    patch.setattr(GroupState, "varied", property(lambda self: not real(self)))


def what_failed_counts_as_wrong(patch: Patch) -> None:
    patch.setattr(GroupState, "scored", property(lambda self: tuple(range(len(self.rewards)))))
    patch.setattr(sealing, "_counts", lambda group, submission, algorithm: np.ones(group.samples, bool))


def workers_speak_for_others(patch: Patch) -> None:
    patch.setattr(guard, "_check_name", lambda claims, request, said: None)


def workers_give_orders(patch: Patch) -> None:
    patch.setattr(Guard, "_check_access", lambda self, caller, scope: None)
    patch.setattr(guard, "_check_name", lambda claims, request, said: None)


def workers_ask_without_limit(patch: Patch) -> None:
    patch.setattr(TokenBucket, "take", lambda self, units, now: 0.0)
    patch.setattr(guard, "CALLS_AT_ONCE", 1 << 30)


def who_hands_in_is_blamed(patch: Patch) -> None:
    patch.setattr(audit_queue, "by_author", lambda samples, worker_id: {worker_id: samples})


def groups_of_liars_train(patch: Patch) -> None:
    real = assembly.dropped

    def dropped(*arguments: Any) -> list[e.GroupDropped]:
        return [found for found in real(*arguments) if found.reason != "untrusted"]

    for module in (assembly, sealing):
        if hasattr(module, "dropped"):
            patch.setattr(module, "dropped", dropped)


def honest_groups_are_called_untrusted(patch: Patch) -> None:
    patch.setattr(assembly, "name_of_worker", lambda worker_id: "hostile-editor")


def beginnings_are_not_checked(patch: Patch) -> None:
    patch.setattr(consequences, "check_piece", lambda *arguments, **named: None)


def deposed_coordinators_go_on(patch: Patch) -> None:
    async def beat(self: Journal) -> bool:
        return True

    patch.setattr(Journal, "beat", beat)
    patch.setattr(journal, "Written", SimpleNamespace(DONE=Written.DONE, OVERTAKEN=None))


def scorers_have_for_ever(patch: Patch) -> None:
    real = groups.hand_out
    patch.setattr(groups, "hand_out", lambda loop, who, ids, now: real(loop, who, ids, now + 1e9))


def evaluations_go_on_with_newer_weights(patch: Patch) -> None:
    lease = leases._lease

    def unpinned(*arguments: Any) -> Lease:
        return dataclasses.replace(lease(*arguments), version=None)

    patch.setattr(leases, "_lease", unpinned)
    patch.setattr(acceptance, "check_submission", lambda *told, **limits: None)
    patch.setattr(consequences, "check_piece", lambda *told, **limits: None)


def conversations_die_with_their_process(patch: Patch) -> None:
    patch.setattr(turns, "ATTEMPTS", 1)


def lies_of_hosts_are_believed(patch: Patch) -> None:
    patch.setattr(Sessions, "_problem", lambda self, seat, session: "")


def silent_hosts_keep_their_groups(patch: Patch) -> None:
    patch.setattr(Sessions, "_lose", lambda self, group: None)


def gateways_hear_of_no_end(patch: Patch) -> None:
    patch.setattr(coordinator_turns, "_over", lambda group: ())


def branches_share_a_seed(patch: Patch) -> None:
    patch.setattr(work, "branch_seed", lambda seed, branch: seed)


MUTATIONS: dict[Callable[[Patch], None], str] = {
    lies_of_hosts_are_believed: "a lie about group .* was believed",
    silent_hosts_keep_their_groups: "not over|last fault|no progress|nothing happened",
    gateways_hear_of_no_end: "not over|last fault|no progress|nothing happened|did not say",
    branches_share_a_seed: "has tokens that its prompt, seed and versions cannot give",
    conversations_die_with_their_process: "what its environment did not say",
    workers_speak_for_others: "in the name of .* was answered",
    workers_give_orders: "order to exclude .* was answered",
    workers_ask_without_limit: "calls of one worker at once were answered",
    who_hands_in_is_blamed: "was struck for group|which is honest, was shut out",
    groups_of_liars_train: "had been shut out before",
    honest_groups_are_called_untrusted: "no worker in quarantine sampled",
    beginnings_are_not_checked: "go on after their end",
    deposed_coordinators_go_on: "not on the disk|did not leave the finished run",
    scorers_have_for_ever: "not over|last fault|no progress",
    groups_in_time_are_called_stale: "was called stale, but",
    groups_are_answered_stale_that_train: "was answered stale, which it is not",
    another_body_counts_as_the_same: "another body is on the disk",
    evaluations_go_on_with_newer_weights: "contradicts itself: v.* was sampled by versions",
    any_number_of_groups_is_opened: "was opened, but .* groups live",
    leases_are_anyones: "given up, but not by its holder",
    leases_last_a_moment: "but its holder was heard",
    seeds_ignore_the_prompt: "seed .* is that of",
    seeds_ignore_the_epoch: "seed .* is that of",
    advantages_have_the_wrong_sign: "has the advantage",
    advantages_are_zero: "has the advantage",
    groups_that_teach_something_are_filtered: "was filtered, with rewards|do not differ",
    what_failed_counts_as_wrong: "has the advantage|do not differ|was filtered",
    the_gate_stands_open: "beyond",
    quick_groups_overtake: "overtakes",
    receipts_are_forgotten: "twice|handed in while|contradicts itself",
    slower_leases_go_on: "under a lease that another one had replaced|are held of a run without groups",
    answers_come_before_the_disk: "not on the disk",
    leases_of_the_dead_last_for_ever: "not over|last fault|no progress",
    seeds_depend_on_the_attempt: "other seeds|handed in|but the lease says",
    sealed_groups_are_chosen_by_luck: "batches differ",
    learners_hold_on_to_what_was_skipped: "learner failed|flow failed|was not committed",
    skipped_steps_keep_their_batch: "not over|last fault|no progress|flow failed",
    restored_learners_believe_what_they_find: "not kept for publication|cannot train|holds version|differ",
}


WITH_A_LIAR = Scenario(
    run={
        "run": {"steps": 8},
        "loop": {"max_staleness": 2, "prompts_per_step": 6, "group_size": 2},
        "sampling": {"max_tokens": 24},
        "coordinator": {"lease_s": 8.0},
    },
    workers=2,
    editor=True,
    engine_step_s=(0.3, 0.8),
    faults=FaultMix(worker_kills=2, retirements=10, last_s=40.0),
)
WITH_BEGINNINGS = WITH_A_LIAR.model_copy(update={"editor": False, "hostile": True, "workers": 3})
WITH_DEPOSALS = Scenario(workers=2, faults=FaultMix(deposals=3, last_s=25.0, shortest_s=4.0))
WITH_DEAD_SCORERS = Scenario(run={"run": {"steps": 8}}, faults=FaultMix(reward_kills=10, last_s=30.0))
WITH_HOSTS = Scenario(
    run={"run": {"steps": 6}, "coordinator": {"lease_s": 8.0}},
    workers=2,
    turns=5,
    hosts=(Manner.HONEST, Manner.LYING, Manner.SILENT),
    faults=FaultMix(reward_kills=4, host_kills=2, last_s=60.0),
)
WITH_TWO_SEATS = WITH_HOSTS.model_copy(
    update={
        "run": {
            **WITH_HOSTS.run,
            "environment": {"seats": 2},
            "evaluation": {"samples": 2},
            "loop": {"group_size": 4, "prompts_per_step": 2},
        },
        "hosts": (Manner.HONEST, Manner.HONEST),
        "faults": FaultMix(reward_kills=8, host_kills=2, last_s=60.0),
    }
)
SCENARIO_OF: dict[Callable[[Patch], None], Scenario] = {
    who_hands_in_is_blamed: WITH_A_LIAR,
    groups_of_liars_train: WITH_A_LIAR,
    honest_groups_are_called_untrusted: WITH_A_LIAR,
    beginnings_are_not_checked: WITH_BEGINNINGS,
    deposed_coordinators_go_on: WITH_DEPOSALS,
    scorers_have_for_ever: WITH_DEAD_SCORERS,
    lies_of_hosts_are_believed: WITH_HOSTS,
    silent_hosts_keep_their_groups: WITH_HOSTS,
    gateways_hear_of_no_end: WITH_TWO_SEATS,
    branches_share_a_seed: WITH_HOSTS,
}
"""Where drawn runs seldom have what shows a mutation."""


SHOWN_BY: dict[Callable[[Patch], None], int] = {
    silent_hosts_keep_their_groups: 1,
    conversations_die_with_their_process: 2,
    workers_speak_for_others: 2,
    workers_give_orders: 2,
    workers_ask_without_limit: 11,
    who_hands_in_is_blamed: 27,
    gateways_hear_of_no_end: 4,
    beginnings_are_not_checked: 30,
    evaluations_go_on_with_newer_weights: 2,
    leases_are_anyones: 18,
    leases_last_a_moment: 2,
    seeds_ignore_the_epoch: 2,
    what_failed_counts_as_wrong: 4,
    the_gate_stands_open: 15,
    quick_groups_overtake: 2,
    receipts_are_forgotten: 6,
    slower_leases_go_on: 27,
    leases_of_the_dead_last_for_ever: 1,
    seeds_depend_on_the_attempt: 2,
    sealed_groups_are_chosen_by_luck: 3,
    learners_hold_on_to_what_was_skipped: 15,
    skipped_steps_keep_their_batch: 24,
    restored_learners_believe_what_they_find: 8,
}
"""Seeds that show those of which seed 0 shows nothing, or shows it late: tried first, they save minutes."""


def survives(mutation: Callable[[Patch], None], patch: Patch) -> list[str] | None:
    """Break production code and return None when a seed saw it, else some of what was seen instead."""
    mutation(patch)
    seen: list[str] = []
    shown_by = SHOWN_BY.get(mutation, 0)
    seeds = dict.fromkeys((shown_by, *range(MOST_SEEDS)))
    for outcome in Campaign(SCENARIO_OF.get(mutation)).seeds(seeds):
        seen += outcome.violations
        if any(re.search(MUTATIONS[mutation], sentence) for sentence in outcome.violations):
            if outcome.seed != shown_by:
                print(f"{mutation.__name__} is shown by seed {outcome.seed} and no longer by {shown_by}")
            return None
    return seen[:5]
