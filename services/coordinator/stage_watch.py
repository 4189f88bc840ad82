"""Stage watch: the flow's long poll; it ends when a stage is over, else it names whom the stage waits for."""

import dataclasses

from antiphon.core.errors import ContractError
from antiphon.core.loop.assembly import step_progress
from antiphon.core.loop.group_state import GroupPhase
from antiphon.core.requests import StageReply
from antiphon.services.coordinator.overview import Overview, evaluation_record
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.system.wakeup import wait_any


class StageWatch:
    """Waits for the ends of stages."""

    def __init__(self, state_machine: RunStateMachine, overview: Overview) -> None:
        self._state_machine = state_machine
        self._stages = {
            "collect": (self._collect, overview.batch_waits_for, state_machine.submitted),
            "reward": (self._reward, overview.batch_waits_for, state_machine.sealed),
            "broadcast": (self._broadcast, self._broadcast_waits_for, state_machine.work),
            "evaluate": (self._evaluate, lambda version: overview.waiting(), state_machine.rewarded),
        }

    async def wait(self, stage: str, number: int, wait_s: float) -> StageReply:
        """Return once a stage is over, nothing moves any more, or `wait_s` seconds have passed.

        Raises:
            ContractError: for a stage that is not the coordinator's.
            BlockedError: when nothing can be recorded now, so that nothing can move.
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
            if reply.done or not (woken or halted):
                state_machine.check_open()
            if reply.done:
                await state_machine.record()  # what it stands for must be on the disk
                return reply
            if halted or not woken:
                fleet = state_machine.fleet
                absence = "" if halted or not self._needs_workers(stage, number) else fleet.absence()
                return dataclasses.replace(
                    reply,
                    waiting_for=absence or waits_for(number),
                    halted=halted,
                    counter=fleet.work_done,
                    no_workers=bool(absence),
                )
            # A seal may end any stage early, and a pause wakes who waits for one.
            woken = await wait_any(deadline - state_machine.clock(), wakeup, state_machine.sealed)

    def _collect(self, step: int) -> StageReply:
        machine = self._state_machine
        handed_in = (GroupPhase.SUBMITTED, GroupPhase.REWARDED)
        share = step_progress(machine.state, machine.config, step, *handed_in)
        return StageReply(share == 1.0, progress=share)

    def _reward(self, step: int) -> StageReply:
        machine = self._state_machine
        if machine.state.is_sealed(step):
            return StageReply(True, batch=machine.state.sealed[step])
        share = step_progress(machine.state, machine.config, step, GroupPhase.REWARDED)
        return StageReply(False, progress=share)

    def _broadcast(self, version: int) -> StageReply:
        # Joiners and stragglers gate nothing: what they do not hold, they fetch while others sample.
        fleet, announced = self._state_machine.fleet, version in self._state_machine.state.snapshots
        share = fleet.share_holding(version)
        enough = fleet.holders(version) > 0 and share >= self._state_machine.config.broadcast.quorum
        return StageReply(announced and enough, progress=share)

    def _broadcast_waits_for(self, version: int) -> str:
        machine = self._state_machine
        if version not in machine.state.snapshots:
            return f"version {version} to be announced"
        behind = [m for m in machine.fleet.active() if m.held_version is None or m.held_version < version]
        said = f"any of {', '.join(m.worker_id for m in behind[:4])} to load version {version}"
        if not (quorum := machine.config.broadcast.quorum):
            return said
        share = machine.fleet.share_holding(version)
        return f"{said}: {share:.0%} of the tokens/s have it, {quorum:.0%} must"

    def _needs_workers(self, stage: str, number: int) -> bool:
        """Return whether something is left to do for workers: sampling, or loading what was announced."""
        machine, state = self._state_machine, self._state_machine.state
        sampled = (GroupPhase.SUBMITTED, GroupPhase.REWARDED)
        if stage == "broadcast":
            return number in state.snapshots
        if stage == "evaluate":
            found = (group for group in state.groups.values() if group.evaluation == number)
            return any(group.phase not in sampled for group in found)
        # A batch waits for those before it, whose groups may have been lost.
        steps = [step for step in state.unsealed_steps() if step <= number]
        return any(step_progress(state, machine.config, step, *sampled) < 1.0 for step in steps)

    def _evaluate(self, version: int) -> StageReply:
        state = self._state_machine.state
        evaluation = state.evaluations.get(version)
        if evaluation is None or not evaluation.finished:
            return StageReply(False, progress=evaluation.rewarded / evaluation.prompts if evaluation else 0.0)
        return StageReply(True, evaluation=evaluation_record(version, evaluation))

    def _halted(self) -> str:
        state = self._state_machine.state
        if state.finished:
            return f"run {state.run_id} is finished"
        return f"the run is paused: {state.paused_reason}" if state.paused_reason else ""
