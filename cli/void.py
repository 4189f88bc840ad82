"""void: take back a sealed batch that the learner cannot train on; other groups make another one."""

import asyncio
import getpass

from antiphon.core.errors import ConfigError


def void(run: str, step: int, /, *, reason: str, batch: str = "", operator: str | None = None) -> int:
    """Take back the sealed batch of a step that is not committed; the run goes on with another one.

    Its groups are spent and never train. Works on running and on stopped runs.

    Args:
        run: the run's id.
        step: the step whose batch is meant; a failed step names itself.
        reason: why; kept in the journal, the ledger and the report.
        batch: digest of the batch, its first 8 digits or more. By default the first one of the step; one
            that came in place of another must be named.
        operator: who voids it; by default the user of this account.
    """
    if not reason.strip():
        raise ConfigError("--reason is empty; say in a sentence why the batch is voided")
    return asyncio.run(_void(run, step, reason.strip(), batch, operator or getpass.getuser()))


async def _void(run: str, step: int, reason: str, batch: str, operator: str) -> int:
    from antiphon.runs.attach import attached
    from antiphon.runs.directory import home_directory, store_directory
    from antiphon.runs.finding import find_run

    home = home_directory()
    directory = find_run(home, run)
    async with attached(directory, store_directory(home)) as (coordinator, running):
        voided = await coordinator.void_batch(step, batch, reason, operator)
        paused = (await coordinator.status()).paused_reason
    print(f"batch {voided.digest[:12]} of step {step}, {voided.groups} groups, is voided: {voided.reason}")
    if paused or not running:
        command = f"antiphon run {directory / 'config.yaml'} --resume {directory.name}"
        print(f"run {directory.name} is {'paused' if running else 'resting'}; continue it with `{command}`")
    return 0
