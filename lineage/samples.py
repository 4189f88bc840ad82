"""Samples: a few completions of a version as people read them, the best, the worst and some at random.

What trained stands in the batch files; what did not, filtered groups and held-out answers, stands beside them
in tables of the same form (`record.samples`). Both are found by the run log and the store, or in the run's
ledger, so a run that was pulled shows the same. Which ones are shown follows from the run's seed alone.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from antiphon.core.client_records import CLIENT
from antiphon.core.config import RunConfig, build_config, load_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.records import BatchRow, RowTiming
from antiphon.core.seeds import derive_seed
from antiphon.core.spans import branches
from antiphon.lineage.client_steps import is_client_step, rows_of
from antiphon.lineage.documents.graph import read_document
from antiphon.lineage.layout import ledger_files
from antiphon.lineage.names import MODEL_FOLDER, RUN, RUN_FOLDER, batch_entry, evaluation_entry, kind_of
from antiphon.lineage.rollout_table import decode_batch, decode_timings
from antiphon.lineage.run_log import read_evaluations, read_steps
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.models.codec import TextCodec, resolve_model_path
from antiphon.system.files import unusable

Explain = Callable[[str, str, float], str]
"""Prompt key, answer and reward -> why the reward is what it is; empty where that is not known."""

AFRESH = "\n[the context begins afresh]\n"
"""Stands between the branches of a completion."""
_FILES = re.compile(r"(batches/t|evaluations/v)(\d{6,})(\.samples)?\.parquet")
_ENDS = {"batch_digest": "parquet", "timings_digest": "timings.parquet", "samples_digest": "samples.parquet"}
"""Field of a document in a ledger -> the end of the file that it names."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion as people read it."""

    name: str
    """As `lineage.rollout_index` names it: t7.12 is row 12 of what step 7 trained on."""
    version: int
    """Policy version that sampled it; of several the oldest one. Of a held-out answer, the one evaluated."""
    step: int | None
    """Learner step it was sampled for; None for a held-out answer."""
    split: str
    """train or heldout."""
    key: str
    """Prompt key."""
    prompt: str
    """What the model saw, special tokens left out."""
    answer: str
    reward: float
    reason: str
    """Why the reward is what it is; empty where no one knows."""
    kept_as: str
    """best, worst or random, of those of its split."""
    trained: bool
    """Whether a step trained on it: not on held-out answers, nor on groups whose rewards were all equal."""


class SampleFiles:
    """The files of one run that hold completions, wherever they lie."""

    def __init__(self, run_dir: Path, store: ArtifactStore, ledgers: Path | None = None) -> None:
        """Look for the files of the run whose folder is, or would be, `run_dir`; `ledgers` holds ledgers.

        Raises:
            ConfigError: when there is no such run.
            IntegrityError: when a document of its ledger was altered.
        """
        self.run_id, self.store = run_dir.name, store
        self._pinned = {} if ledgers is None else ledger_files(ledgers, self.run_id)
        self._digests = dict(_documented(self._pinned)) | dict(_logged(run_dir))
        pinned = self._pinned.get(f"{RUN_FOLDER}/config.yaml")
        self.log = run_dir if (run_dir / "config.yaml").is_file() else pinned and pinned.parent
        """Folder with the run's log; None where it is not here."""
        names = [match for match in map(_FILES.fullmatch, (*self._digests, *self._pinned)) if match]
        self.steps = sorted({int(match[2]) for match in names if match[1] == "batches/t"})
        self.evaluated = sorted({int(match[2]) for match in names if match[1] == "evaluations/v"})
        self.config = self._configuration(run_dir)

    def versions(self) -> list[int]:
        """Return the versions that may have completions: those evaluated, and those a step was sampled by."""
        bound = self.config.loop.max_staleness
        trained = {max(0, step - age) for step in self.steps for age in range(bound + 1)}
        return sorted(trained | set(self.evaluated))

    def rows(self, name: str) -> list[BatchRow]:
        """Return the rows of a file by its place in the ledger, with what was said; none where it is gone.

        Raises:
            IntegrityError: when the file was altered.
        """
        body = self.body(name)
        if body is not None and is_client_step(body):
            step = _FILES.fullmatch(name)
            return rows_of(body, int(step[2]) if step else 0)
        rows = [] if body is None else decode_batch(body)
        timings = self.timings(name) if rows else []
        for place, timing in enumerate(timings):
            if timing.said:
                rows[place] = replace(rows[place], said=timing.said)
        return rows

    def timings(self, name: str) -> list[RowTiming]:
        """Return the timings of the rows of a file; none where there are none.

        Raises:
            IntegrityError: when the file was altered.
        """
        if self.config.environment.name == CLIENT:  # they are of what was sampled, not of the data
            return []
        body = self.body(name.replace(".parquet", ".timings.parquet"))
        return [] if body is None else decode_timings(body)

    def body(self, name: str) -> bytes | None:
        """Return a file by its place in the ledger; None where it is not kept.

        Raises:
            IntegrityError: when the file was altered.
            UnavailableError: when it cannot be read.
        """
        digest, path = self._digests.get(name), self._pinned.get(name)
        if digest is not None and self.store.has(digest):
            return self.store.get(digest)
        if path is None or not path.is_file():
            return None
        try:
            body = path.read_bytes()
        except OSError as error:
            raise unusable(error, path.parent) from error
        if digest not in (None, digest_bytes(body)):
            raise IntegrityError(
                f"{path} is not the file that run {self.run_id} recorded; remove it, then `dvc checkout` or "
                "`dvc pull` brings it back"
            )
        return body

    @cached_property
    def codec(self) -> TextCodec:
        """What turns the run's tokens into text: the base model's tokenizer, or the ledger's copy.

        Raises:
            ConfigError: when neither is there.
        """
        pinned = self._pinned.get(f"{MODEL_FOLDER}/tokenizer.json")
        try:
            return TextCodec.load(resolve_model_path(self.config.model.path))
        except ConfigError:
            if pinned is None:
                raise
            return TextCodec.load(str(pinned.parent))

    def _configuration(self, run_dir: Path) -> RunConfig:
        if (run_dir / "config.yaml").is_file():
            return load_config(run_dir / "config.yaml")
        manifest = self._pinned.get(RUN)
        if manifest is None:
            raise ConfigError(
                f"there is no run {self.run_id} in {run_dir.parent} or in a ledger here; "
                "`antiphon status` names the runs, `dvc pull` brings those of others"
            )
        return build_config(dict(read_document(manifest.read_bytes())["config"]))


def read_samples(
    files: SampleFiles,
    versions: Iterable[int],
    split: str | None = None,
    count: int = 2,
    explain: Explain | None = None,
) -> list[Sample]:
    """Return completions of the first of some versions that has any: the best, the worst and random ones.

    Args:
        files: of the run.
        versions: in the order in which they are looked at; see `SampleFiles.versions`.
        split: train or heldout; by default both, held-out answers first.
        count: most of each kind and split.
        explain: gives reasons; without it only what the engine or the scorer said is named.

    Raises:
        ConfigError: when the run's tokenizer is not here.
        IntegrityError: when a file was altered.
    """
    splits = ("heldout", "train") if split is None else (split,)
    for version in versions:
        if found := [x for part in splits for x in _samples(files, version, part, count, explain)]:
            return found
    return []


def _samples(
    files: SampleFiles, version: int, split: str, count: int, explain: Explain | None
) -> Iterator[Sample]:
    rows = list(_rows_of(files, version, split))
    # The same prompts are drawn at every version.
    seeds = ("kept-sample", files.config.run.seed)
    drawn = [(row.reward, derive_seed(*seeds, row.prompt_key, row.sample_index)) for _, row, _ in rows]
    for kind, place in choose(drawn, count):
        name, row, step = rows[place]
        prompt, answer = texts_of(row, files.codec.decode)
        yield Sample(
            name=name,
            version=version,
            step=step,
            split=split,
            key=row.prompt_key,
            prompt=prompt,
            answer=answer,
            reward=row.reward,
            reason=reason_of(row, answer, explain),
            kept_as=kind,
            trained=name[0] == "t",
        )


def texts_of(row: BatchRow, decode: Callable[[Iterable[int]], str]) -> tuple[str, str]:
    """Return what a policy saw first and what came then, of a row that may have several contexts."""
    first = branches(row.prompt_token_ids, row)[0]
    cuts = pairwise((first.start, *row.breaks, row.stop))
    return decode(first.context), AFRESH.join(decode(row.token_ids[start:stop]) for start, stop in cuts)


_ORDERS: Mapping[str, Callable[[float, int], tuple[float, float]]] = {
    "best": lambda reward, bits: (-reward, bits >> 32),
    "worst": lambda reward, bits: (reward, -(bits >> 32)),
    "random": lambda reward, bits: (bits % 2**32, 0.0),
}
"""As what a completion is shown -> what comes first; the upper half of its bits orders equal rewards."""


def choose(completions: Sequence[tuple[float, int]], count: int) -> list[tuple[str, int]]:
    """Return which of many completions are worth reading, and as what: the best, the worst, some at random.

    Args:
        completions: reward and 64 random bits of each; of equal rewards the bits decide.
        count: most of each kind; each kind has what those before it have not.

    >>> choose([(0.0, 7 << 32), (1.0, 5 << 32), (0.5, 6 << 32)], 1)
    [('best', 1), ('worst', 0), ('random', 2)]
    """
    left, chosen = [*range(len(completions))], list[tuple[str, int]]()
    for kind, order in _ORDERS.items():
        left = sorted(left, key=lambda i: order(*completions[i]))
        chosen += [(kind, place) for place in left[:count]]
        left = left[count:]
    return chosen


def _rows_of(files: SampleFiles, version: int, split: str) -> Iterator[tuple[str, BatchRow, int | None]]:
    """Yield each completion of a version with its name and its step."""
    if split == "heldout":
        rows = files.rows(evaluation_entry(version, "samples.parquet"))
        yield from ((f"v{version}.{place}", row, None) for place, row in enumerate(rows))
        return
    for step in range(version, version + files.config.loop.max_staleness + 1):
        for letter, kind in (("t", "parquet"), ("f", "samples.parquet")):
            for place, row in enumerate(files.rows(batch_entry(step, kind))):
                if row.spans and row.oldest_version == version:
                    yield f"{letter}{step}.{place}", row, step


def reason_of(row: BatchRow, answer: str, explain: Explain | None) -> str:
    """Return why a completion got its reward, as every view says it; empty where no one knows."""
    if row.failure:
        return f"could not be scored: {row.failure}"
    said = [f"cut at {row.token_ids.size} tokens"] if row.finish_reason.cut_off else []
    said.append(row.said)
    said += [explain(row.prompt_key, answer, row.reward)] if explain is not None else []
    return "; ".join(part for part in said if part)


def _documented(pinned: Mapping[str, Path]) -> Iterable[tuple[str, str]]:
    """Yield the place and the digest of each file with completions that documents of a ledger name."""
    for rel, path in pinned.items():
        if (kind_of(rel) or ("",))[0] in ("batch", "evaluation"):
            try:
                facts = read_document(path.read_bytes())
            except IntegrityError as error:
                raise IntegrityError(f"{path}: {error}; restore it from a copy") from error
            for field in _ENDS.keys() & facts.keys():
                yield rel.removesuffix("json") + _ENDS[field], facts[field]


def _logged(run_dir: Path) -> Iterable[tuple[str, str]]:
    """Yield the place and the digest of each file with completions that the run log names."""
    for line in read_steps(run_dir):
        batch: Mapping[str, str] = line["batch"] or {}
        yield batch_entry(int(line["step"]), "parquet"), line["batch_digest"]
        if "timings_digest" in line["timings"]:
            yield batch_entry(int(line["step"]), "timings.parquet"), line["timings"]["timings_digest"]
        if "samples_digest" in batch:
            yield batch_entry(int(line["step"]), "samples.parquet"), batch["samples_digest"]
    for line in read_evaluations(run_dir):
        if "samples_digest" in line:
            yield evaluation_entry(int(line["version"]), "samples.parquet"), line["samples_digest"]
