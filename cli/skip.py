"""skip: train nothing in a step whose batch the learner cannot train on, and go on with the next one."""

import asyncio
import getpass

from antiphon.core.errors import ConfigError
from antiphon.runs.attach import attached
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_run


def skip(run: str, step: int, /, *, reason: str, operator: str | None = None) -> None:
    """Train nothing in a step whose batch the learner cannot train on.

    The run goes on with the next step. The groups of its batch are spent and never train. Works on running
    and on stopped runs.

    Args:
        run: the run's id.
        step: the step whose batch is sealed; a failed step names itself.
        reason: why; kept in the journal, the ledger and the report.
        operator: who skips it; by default the user of this account.
    """
    if not reason.strip():
        raise ConfigError("--reason is empty; say in a sentence why the step is skipped")
    return asyncio.run(_skip(run, step, reason.strip(), operator or getpass.getuser()))


async def _skip(run: str, step: int, reason: str, operator: str) -> None:
    directory = find_run(home_directory(), run)
    async with attached(directory) as (coordinator, running):
        voided = await coordinator.skip_step(step, reason, operator)
        paused = (await coordinator.status()).paused_reason
    print(f"step {step} is skipped, batch {voided.digest[:12]} of {voided.groups} groups: {voided.reason}")
    if paused or not running:
        command = f"antiphon run {directory / 'config.yaml'} --resume {directory.name}"
        print(f"run {directory.name} is {'paused' if running else 'resting'}; continue it with `{command}`")
