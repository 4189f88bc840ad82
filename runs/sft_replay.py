"""Replay of a supervised training: its steps once more, from its folder and the rows, to the same bits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.sft_config import SftConfig
from antiphon.runs.directory import lock
from antiphon.runs.finding import RECORD
from antiphon.runs.sft import learning, plan_sft, read_lines


def replay_sft(folder: Path, home: Path, first: int, say: Callable[[str], None]) -> None:
    """Train again, in memory, and compare figures and, after the last step, the weights; nothing is scored.

    Args:
        folder: of the training.
        home: as for the training.
        first: the first step to repeat, from 1; the newest kept checkpoint before it, or the base, begins.
        say: hears what is done.

    Raises:
        ConfigError: when nothing is recorded from there on, or another process trains it.
        IntegrityError: when rows or model have changed since, or naming the first difference.
    """
    record, lines = json.loads((folder / RECORD).read_bytes()), read_lines(folder)
    if not 1 <= first <= len(lines):
        raise ConfigError(f"--from {first} is none of the {len(lines)} steps that {folder.name} has recorded")
    config = SftConfig.model_validate(record["config"])
    plan = plan_sft(config.model_copy(update={"environment": None}), home)
    for field, rows in (("train", plan.rows), ("heldout", plan.heldout)):
        if (found := rows.digest()) != (known := record["rows"][field]):
            raise IntegrityError(
                f"data.{field} holds other rows than {folder.name} learned from ({known[:12]} then, "
                f"{found[:12]} now); put the files back as they were"
            )
    if plan.folder.name != folder.name:
        raise IntegrityError(
            f"model.path={config.model.path} is another model than {folder.name} began with; put it back"
        )
    with lock(folder), learning(replace(plan, folder=folder), first - 1) as (_, held, step_of):
        begun = held.version
        say(f"{folder.name}: steps {begun + 1} to {len(lines)}, from {f'v{begun}' if begun else 'the base'}")
        for step in range(begun, len(lines)):
            held, line = step_of(step)
            for name in line.keys() & lines[step].keys():
                if line[name] != lines[step][name]:
                    raise IntegrityError(
                        f"step {step + 1}: {name} was {lines[step][name]!r} and is {line[name]!r}"
                    )
        if record["weights"] and (found := held.weights.digest()) != record["weights"]:
            raise IntegrityError(f"the weights were {record['weights'][:12]} and are {found[:12]}")
    whole = f", and the weights {record['weights'][:12]}" if record["weights"] else ""
    say(f"{len(lines) - begun} steps repeated: every figure has the same bits{whole}")
