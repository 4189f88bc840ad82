"""Recorded run: what a run left, as tables and objects, for programs and notebooks.

Everything is read when it is asked for, so that the object of a run that goes on gives what is there by
then. Nothing is changed.
"""

import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import ConfigError
from antiphon.core.reporting.figures import RunFigures
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.lineage.run_log import read_evaluations, read_steps
from antiphon.lineage.run_overview import read_figures, read_totals
from antiphon.lineage.samples import Sample
from antiphon.lineage.store.artifact_store import open_store
from antiphon.runs.finding import find_artifacts

if TYPE_CHECKING:
    from antiphon.lineage.export import Export

COSTS = ("wall_s", "tokens_sampled", "tokens_trained", "dollars")
"""What a version had cost when it was made, as `core.reporting.figures` adds it up."""


@dataclass(frozen=True)
class RecordedRun:
    """One run, as far as it was recorded."""

    folder: Path
    """The run's own folder."""
    home: Path
    store: Path
    """Root of the artifact store that has its batches."""

    @property
    def id(self) -> str:
        """The run's id."""
        return self.folder.name

    @cached_property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return load_config(self.folder / "config.yaml")

    @property
    def finished(self) -> bool:
        """Whether the run reached its last step."""
        return (self.folder / "outcome.json").exists()

    @property
    def figures(self) -> RunFigures:
        """What every view says of the run, see docs/concepts/figures.md."""
        return read_figures(self.folder)

    @property
    def metrics(self) -> pd.DataFrame:
        """One row a step, indexed by `step`.

        Columns: `version` that the step made, `weights_digest`, `batch_digest`; what that version had cost:
        `wall_s` (seconds), `tokens_sampled`, `tokens_trained`, `dollars`; every metric of docs/catalogue.md
        under its name, and the seconds of the step's parts.
        """
        spent = {totals.version: totals for totals in read_totals(self.folder)}
        rows = []
        for line in read_steps(self.folder):
            row = {name: line[name] for name in ("step", "version", "weights_digest", "batch_digest")}
            row |= {name: value for name, value in line["timings"].items() if isinstance(value, int | float)}
            row |= {name: getattr(spent[int(line["version"])], name) for name in COSTS}
            rows.append(row | line["metrics"])
        return pd.DataFrame(rows, columns=None if rows else ["step", "version"]).set_index("step")

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row an evaluated version, indexed by `version`.

        Columns: `reward_mean`, `prompts`, `completion_tokens_mean`, and what the version had cost:
        `wall_s` (seconds), `tokens_sampled`, `tokens_trained`, `dollars`.
        """
        names = ["version", "reward_mean", "prompts", "completion_tokens_mean"]
        spent = {totals.version: totals for totals in read_totals(self.folder)}
        rows = [
            [line[name] for name in names]
            + [getattr(spent.get(int(line["version"])), name, None) for name in COSTS]
            for line in read_evaluations(self.folder)
        ]
        return pd.DataFrame(rows, columns=[*names, *COSTS]).set_index("version")

    @property
    def versions(self) -> pd.DataFrame:
        """A row for each version with weights, by `version`: `weights_digest` and the file `weights`."""
        copy = self.artifacts
        rows = [(found, copy.weights_digest(found), copy.weights(found)) for found in copy.published()]
        return pd.DataFrame(rows, columns=["version", "weights_digest", "weights"]).set_index("version")

    def batch(self, step: int, *, texts: bool = False) -> pd.DataFrame:
        """Return what a step was trained on: one row a trajectory; filtered groups are not among them.

        Columns are those of `BATCH_SCHEMA`: ids, `reward`, `advantage`, arrays of token ids and logprobs;
        with `texts` also `prompt` and `answer`, by the run's tokenizer.

        Raises:
            ConfigError: when the step was not recorded.
            IntegrityError: when the file is not the one that the step used.
        """
        digests = {line["step"]: line["batch_digest"] for line in read_steps(self.folder)}
        if step not in digests:
            raise ConfigError(f"run {self.id} recorded no step {step}; it has {len(digests)}, from 0 on")
        body = open_store(self.store, self.config.record).get(digests[step])
        table = pd.read_parquet(io.BytesIO(body))
        if texts:
            from antiphon.models.codec import decoder

            text = decoder(self.config.model.path)
            for name, tokens in (("prompt", "prompt_token_ids"), ("answer", "token_ids")):
                table[name] = [text(ids) for ids in table[tokens]]
        return table

    def rollouts(self, step: int) -> pd.DataFrame:
        """Return all that was sampled for a step, one row a completion, also what it did not train on.

        Columns: those of `batch`, `split` (train, or heldout for answers of the version the step began with)
        and `trained`.

        Raises:
            ConfigError: when the step was not recorded.
            IntegrityError: when a file was altered.
        """
        from antiphon.lineage.names import batch_entry, evaluation_entry
        from antiphon.lineage.samples import SampleFiles
        from antiphon.runs.samples import ledger_folder

        store = open_store(self.store, self.config.record)
        files = SampleFiles(self.folder, store, ledger_folder(self.folder, self.home))
        if step not in files.steps:
            raise ConfigError(f"run {self.id} recorded no step {step}; it has {len(files.steps)}, from 0 on")
        parts = (
            (batch_entry(step, "parquet"), "train", True),
            (batch_entry(step, "samples.parquet"), "train", False),
            (evaluation_entry(step, "samples.parquet"), "heldout", False),
        )
        tables = [
            pd.read_parquet(io.BytesIO(body)).assign(split=split, trained=trained)
            for name, split, trained in parts
            if (body := files.body(name)) is not None
        ]
        return pd.concat(tables, ignore_index=True)

    def scores(self, version: int | str = "best") -> pd.DataFrame:
        """Return the held-out rewards of a version, one row a prompt, indexed by its number in the split.

        Column: `reward`, the mean over the prompt's samples. Runs with the same environment section have the
        same prompts under the same numbers, so that two of them make a paired test.

        Raises:
            ConfigError: when the version was not evaluated, or the run goes on.
        """
        from antiphon.core.loop.group_state import heldout_group_id
        from antiphon.runs.samples import version_of
        from antiphon.services.coordinator.journal.journal import journal_place
        from antiphon.services.coordinator.journal.reading import event_bodies

        chosen = version_of(self.folder, version)
        known = {
            heldout_group_id(chosen or 0, index): index for index in range(self.config.evaluation.prompts)
        }
        found: dict[int, float] = {}
        low, _ = self.figures.reward_range
        for body in event_bodies(journal_place(self.config, self.folder), self.id):
            event = json.loads(body)
            if "rewards" in event and event.get("group_id") in known:
                failed = dict(event.get("failures", ()))
                rewards = [low if i in failed else r for i, r in enumerate(event["rewards"])]
                found[known[event["group_id"]]] = sum(rewards) / len(rewards)
        if not found:
            raise ConfigError(
                f"run {self.id} did not evaluate version {chosen}; `evaluations` lists those it did"
            )
        return pd.DataFrame({"reward": pd.Series(found)}).sort_index().rename_axis("prompt")

    def samples(
        self, version: int | str | None = None, split: str | None = None, count: int = 2
    ) -> pd.DataFrame:
        """Return completions as `antiphon evaluate --samples` shows them: the best, the worst, random ones.

        Columns: `version`, `step`, `split`, `key`, `prompt`, `answer`, `reward`, `reason`, `kept_as`,
        `trained`.

        Args:
            version: policy version, as a number, "v12" or "best"; by default the newest with completions.
            split: train or heldout; by default both.
            count: of each kind and split.

        Raises:
            ConfigError: when nothing of that version is kept.
            IntegrityError: when a file was altered.
        """
        from antiphon.runs.samples import samples_of, version_of

        chosen = version_of(self.folder, version)
        found = samples_of(self.folder, self.home, version=chosen, split=split, count=count)
        return pd.DataFrame([asdict(sample) for sample in found], columns=[f.name for f in fields(Sample)])

    @property
    def artifacts(self) -> ReplayCopy:
        """The run's ledger: documents, batches, weights, each with its digest; without one its best weights.

        Raises:
            ConfigError: when the ledger is not here.
        """
        return find_artifacts(self.home, self.id, None)[0]

    def export(
        self, folder: Path | str, version: str = "best", say: Callable[[str], None] = print
    ) -> "Export":
        """Write a version as a Hugging Face folder, as `antiphon export` does.

        One that is recorded by its digest alone is made again first; `say` hears how far that is.

        Raises:
            ConfigError: when there is no such version, or the folder is not empty.
            IntegrityError: when the weights are not the recorded ones.
        """
        from antiphon.lineage.export import check_place, choose_version, export_version

        copy, place = self.artifacts, Path(folder)
        chosen = choose_version(copy, version)
        check_place(place)
        if copy.weights(chosen) is not None:
            return export_version(copy, chosen, place)
        from antiphon.services.learner.replay.steps import weights_of

        with weights_of(copy, chosen, self.folder / "checkpoints", say) as weights:
            return export_version(copy, chosen, place, weights=weights)
