"""Stage watch: the flow's long poll; it ends when a stage is over, else it names whom the stage waits for."""

import dataclasses

from antiphon.core.errors import ContractError
from antiphon.core.loop.assembly import step_progress
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.records import WorkerState
from antiphon.services.coordinator.api import StageReply
from antiphon.services.coordinator.overview import Overview, evaluation_records
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.system.wakeup import wait_any


class StageWatch:
    """Waits for the ends of stages."""

    def __init__(self, state_machine: RunStateMachine, overview: Overview) -> None:
        self._state_machine = state_machine
        self._stages = {
            "collect": (self._collect, overview.batch_waits_for, state_machine.submitted),
            "reward": (self._reward, overview.batch_waits_for, state_machine.sealed),
            "broadcast": (self._broadcast, self._names_behind, state_machine.work),
            "evaluate": (self._evaluate, lambda version: overview.waiting(), state_machine.rewarded),
        }

    async def wait(self, stage: str, number: int, wait_s: float) -> StageReply:
        """Return once a stage is over, nothing moves any more, or `wait_s` seconds have passed.

        Raises:
            ContractError: for a stage that is not the coordinator's.
        """
        if stage not in self._stages:
            raise ContractError(f"stage {stage[:40]!r} is unknown; known: {', '.join(self._stages)}")
        look, waits_for, wakeup = self._stages[stage]
        state_machine = self._state_machine
        deadline = state_machine.clock() + wait_s
        woken = True
        while True:
            state_machine.check()
            reply, halted = look(number), self._halted()
            if reply.done:
                await state_machine.record()  # what it stands for must be on the disk
                return reply
            if halted or not woken:
                return dataclasses.replace(reply, waiting_for=waits_for(number), halted=halted)
            # A seal may end any stage early, and a pause wakes who waits for one.
            woken = await wait_any(deadline - state_machine.clock(), wakeup, state_machine.sealed)

    def _collect(self, step: int) -> StageReply:
        machine = self._state_machine
        handed_in = (GroupPhase.SUBMITTED, GroupPhase.REWARDED)
        share = step_progress(machine.state, machine.config, step, *handed_in)
        return StageReply(share == 1.0, progress=share)

    def _reward(self, step: int) -> StageReply:
        machine = self._state_machine
        if 0 <= step < machine.state.next_seal:
            return StageReply(True, batch=machine.state.sealed[step])
        share = step_progress(machine.state, machine.config, step, GroupPhase.REWARDED)
        return StageReply(False, progress=share)

    def _broadcast(self, version: int) -> StageReply:
        active = any(m.state is WorkerState.ACTIVE for m in self._state_machine.fleet.living())
        return StageReply(active and not self._behind(version), progress=0.0)

    def _behind(self, version: int) -> list[str]:
        living = self._state_machine.fleet.living()
        active = [member for member in living if member.state is WorkerState.ACTIVE]
        return [m.worker_id for m in active if m.held_version is None or m.held_version < version]

    def _names_behind(self, version: int) -> str:
        return ", ".join(self._behind(version)) or "any worker at all"

    def _evaluate(self, version: int) -> StageReply:
        state = self._state_machine.state
        evaluation = state.evaluations.get(version)
        if evaluation is None or evaluation.rewarded < evaluation.prompts:
            return StageReply(False, progress=evaluation.rewarded / evaluation.prompts if evaluation else 0.0)
        return StageReply(True, evaluation=next(x for x in evaluation_records(state) if x.version == version))

    def _halted(self) -> str:
        state = self._state_machine.state
        if state.finished:
            return f"run {state.run_id} is finished"
        return f"the run is paused: {state.paused_reason}" if state.paused_reason else ""
