"""Recorded run: prompts, completions by epoch and weights of a finished run, read from its records.

Batches leave out groups whose rewards were all equal (`loop.filter=drop`), so they are not the
whole history that a worker is sent. Tokens of the keyed sampler depend on weights, prompt and seed
alone: `missing` names the lost groups with the seeds they had, and sampling them again under the
weights of their time restores them.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError
from antiphon.core.loop.admission import prompt_place
from antiphon.core.records import BatchRow, PastCompletion, Prompt
from antiphon.core.seeds import request_seeds
from antiphon.lineage.rollout_table import decode_batch
from antiphon.models.codec import resolve_model_path
from antiphon.runs.directory import is_finished
from antiphon.runs.finding import find_run
from antiphon.services.coordinator.prompts import load_prompts


@dataclass(frozen=True, slots=True)
class MissingGroup:
    """A group that was sampled and left out of its batch."""

    prompt: Prompt
    epoch: int
    seeds: tuple[int, ...]
    version: int
    """Policy version that sampled the recorded group next to it."""


class RecordedRun:
    """The records of one finished run under an ANTIPHON_HOME."""

    def __init__(self, home: Path, run_id: str | None = None) -> None:
        """Open the run named, or the newest one.

        Raises:
            ConfigError: when it is not finished, or kept no ledger of batches and weights.
        """
        directory = find_run(home, run_id)
        self.config = load_config(directory / "config.yaml")
        self._ledger = home / self.config.record.ledger / directory.name
        if not is_finished(directory) or not (self._ledger / "versions").is_dir():
            raise ConfigError(
                f"run {directory.name} is not finished or has no ledger at {self._ledger}; "
                "give a finished run with record.dvc=true whose home is the DVC project"
            )
        self.model_dir = Path(resolve_model_path(self.config.model.path))
        self._prompts = load_prompts(self.config)
        self.prompts = tuple(
            self._prompts.prompt("train", index) for index in range(self.config.environment.train_size)
        )
        self._groups = self._read_groups()

    @property
    def epochs(self) -> int:
        """Number of whole epochs that were trained on."""
        consumed = self.config.run.steps * self.config.loop.prompts_per_step
        return consumed // self.config.environment.train_size

    def heldout(self, count: int) -> list[Prompt]:
        """Return prompts that were never trained on."""
        size = self.config.environment.heldout_size
        return [self._prompts.prompt("heldout", index) for index in range(min(count, size))]

    def weights(self, version: int) -> dict[str, Any]:
        """Return the published tensors of a version.

        Raises:
            ConfigError: when the ledger does not hold it.
        """
        from safetensors.torch import load_file

        path = self._ledger / "versions" / f"v{version:06d}.safetensors"
        if not path.exists():
            raise ConfigError(f"there are no weights of version {version} at {path}; give another version")
        tensors: dict[str, Any] = load_file(path)
        return tensors

    def middle_version(self, epoch: int) -> int:
        """Return the version in the middle of an epoch."""
        config = self.config
        return int((epoch + 0.5) * config.environment.train_size / config.loop.prompts_per_step)

    def completions(self, epoch: int) -> dict[str, tuple[PastCompletion, ...]]:
        """Return prompt key -> recorded completions of an epoch, by sample index."""
        found = {}
        for number, rows in self._groups.items():
            if number // self.config.environment.train_size == epoch:
                found[rows[0].prompt_key] = tuple(_past(row, epoch) for row in rows)
        return found

    def missing(self, epoch: int) -> list[MissingGroup]:
        """Return the groups of an epoch that no batch holds, in their order."""
        size = self.config.environment.train_size
        lost = []
        for number in range(epoch * size, (epoch + 1) * size):
            if number in self._groups:
                continue
            index, _ = prompt_place(self.config, number)
            prompt = self.prompts[index]
            nearest = min(self._groups, key=lambda other: abs(other - number))
            version = min(row.oldest_version for row in self._groups[nearest])
            seeds = request_seeds(self.config.run.seed, prompt.key, epoch, self.config.loop.group_size)
            lost.append(MissingGroup(prompt, epoch, seeds, version))
        return lost

    def _read_groups(self) -> dict[int, list[BatchRow]]:
        """Return group number -> its rows by sample index."""
        groups: dict[int, list[BatchRow]] = defaultdict(list)
        for path in sorted((self._ledger / "batches").glob("t*.parquet")):
            if path.name.endswith(".timings.parquet"):
                continue
            for row in decode_batch(path.read_bytes()):
                groups[self._number(row.group_id)].append(row)
        if not groups:
            raise ConfigError(f"{self._ledger} holds no batches; give a run that trained on something")
        return {n: sorted(rows, key=lambda row: row.sample_index) for n, rows in groups.items()}

    def _number(self, group_id: str) -> int:
        """Return the place of a group in the order of the run; spare groups come out beyond it."""
        fixed = re.fullmatch(r"s(\d+)-g(\d+)", group_id)
        if fixed is None:
            return int(group_id.removeprefix("g"))
        places = self.config.loop.prompts_per_step
        index = int(fixed[2])
        return int(fixed[1]) * places + index if index < places else 10**9 + int(fixed[1]) * 10**4 + index


def _past(row: BatchRow, epoch: int) -> PastCompletion:
    return PastCompletion(
        token_ids=row.token_ids,
        version=row.oldest_version,
        epoch=epoch,
        sample_index=row.sample_index,
        reward=row.reward,
    )
