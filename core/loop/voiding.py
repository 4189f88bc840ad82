"""Voiding: whether an operator may take a sealed batch back, and what comes in its place, from state alone.

A batch that no learner can train on would stop its run for ever, because a sealed batch never changes. So
an operator may void it until its step is committed. Its groups are spent: they were counted when it was
sealed, and they never train. Its places are free again. Elastic mode cuts the missing batch off the front of
the line before that of any later step, and opens as many groups more. Fixed mode opens the next spare
prompts of the step under the step's own version, so what is sealed is a function of the configuration, the
step and how often its batch was voided.
"""

from antiphon.core.config import RunConfig
from antiphon.core.errors import ContractError
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import fixed_openings
from antiphon.core.loop.group_state import voided_batch
from antiphon.core.loop.run_state import RunState
from antiphon.core.voided_batch import VoidedBatch

LEAST_DIGEST = 8
"""Digits of a digest that name a batch."""


def void_batch(
    state: RunState, config: RunConfig, step: int, digest: str, reason: str, operator: str
) -> tuple[VoidedBatch, list[e.JournalEvent]]:
    """Return the voided batch of a step, and the events that void it; none for a repetition.

    Args:
        state: the run.
        config: its configuration.
        step: the step whose batch is meant.
        digest: its first digits or all of them; "" means the batch that the step has now if it is its
            first one or, if it has none, the one that was voided last.
        reason: why, for people.
        operator: who says so.

    Raises:
        ContractError: when there is no such batch, or it was committed.
    """
    run, steps = f"run {state.run_id}", config.run.steps
    if not 0 <= step < steps:
        raise ContractError(f"{run} has no step {step}: its steps are 0..{steps - 1}")
    if digest and len(digest) < LEAST_DIGEST:
        raise ContractError(f"{digest!r} names no batch; give {LEAST_DIGEST} digits of its digest or more")
    before = [batch for batch in state.voided if batch.step == step and batch.digest.startswith(digest)]
    # Batches without a trainable group are alike: one that waits now is meant, whatever was voided before.
    if before and not (state.is_sealed(step) and state.sealed[step].digest.startswith(digest)):
        return before[-1], []
    if step < len(state.commits):
        raise ContractError(
            f"step {step} of {run} is committed, version {step + 1} was trained on its batch; only a batch "
            "that waits for the learner can be voided"
        )
    if not state.is_sealed(step):
        raise ContractError(f"step {step} of {run} has no sealed batch yet; see `antiphon status`")
    sealed = state.sealed[step]
    if before and not digest:
        raise ContractError(
            f"batch {before[-1].digest[:12]} of step {step} of {run} was voided already, and another came in "
            f"its place; to void that too, name {sealed.digest[:12]} (--batch)"
        )
    if not sealed.digest.startswith(digest):
        raise ContractError(
            f"the batch of step {step} of {run} is {sealed.digest[:12]}, not {digest[:12]}; see "
            "`antiphon status --kind batch.sealed`"
        )
    found: list[e.JournalEvent] = [e.BatchVoided(step, sealed.digest, reason, operator)]
    if config.loop.mode == "fixed":
        spent = len(state.sealed_groups[step])
        found.extend(fixed_openings(config, step, spent + config.loop.prompts_per_step)[spent:])
    return voided_batch(sealed, reason, operator), found
