"""Samples of runs: what `lineage.samples` reads of a run of this machine, with the environment's reasons."""

from functools import cache
from pathlib import Path

from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import ConfigError
from antiphon.environments.conversation import AnyEnvironment
from antiphon.environments.environment import explain
from antiphon.environments.registry import environment_of
from antiphon.lineage.documents.replay_copy import find_copy
from antiphon.lineage.layout import find_project
from antiphon.lineage.names import RUN
from antiphon.lineage.run_overview import read_figures
from antiphon.lineage.samples import Explain, Sample, SampleFiles, read_samples
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store


def samples_of(
    run_dir: Path, home: Path, *, version: int | None = None, split: str | None = None, count: int = 2
) -> list[Sample]:
    """Return completions of a run with reasons, as `read_samples` does.

    Args:
        run_dir: the run's folder; one that was only pulled has none, and is found in the ledger by its name.
        home: holds the artifact store.
        version: policy version; by default the newest with completions.
        split: train or heldout; by default both.
        count: of each kind and split.

    Raises:
        ConfigError: when there is no such run or version, or its tokenizer is not here.
        IntegrityError: when a file was altered.
    """
    files = files_of(run_dir, home)
    known = files.versions()
    versions = known[::-1] if version is None else [version]
    found = read_samples(files, versions, split, count, explainer(files.config))
    if version is not None and not found:
        there = f"v{known[0]} to v{known[-1]}" if known else "no version yet"
        raise ConfigError(
            f"no completion of version {version} of run {run_dir.name} is kept; there are those of {there}, "
            "filtered and held-out ones only with record.samples"
        )
    return found


def files_of(place: Path, home: Path) -> SampleFiles:
    """Return the files with a run's completions.

    Args:
        place: the run's folder, in this home or another one, or where it would be of a run that was only
            pulled; or a folder that `find_copy` takes.
        home: holds runs and the store.

    Raises:
        ConfigError: when there is no such run.
        IntegrityError: when a copied ledger was altered.
    """
    own = place.parent == home / "runs"
    if own or (place / "config.yaml").is_file():
        store = ArtifactStore(place.parent.parent / "store")
        files = SampleFiles(place, store, ledger_folder(place, home))
        files.store = open_store(files.store.root, files.config.record) if own else files.store
        return files
    root = find_copy(place, None).root
    return SampleFiles(root, ArtifactStore(root), root.parent)


def version_of(run_dir: Path, wanted: int | str | None) -> int | None:
    """Return the version that a person means: 12, "12", "v12", or "best", the one with the highest score.

    Raises:
        ConfigError: when it is none of these, or none was evaluated.
    """
    if wanted is None or isinstance(wanted, int):
        return wanted
    if wanted == "best":
        best = read_figures(run_dir).best_version
        if best is None:
            raise ConfigError(f"no version of run {run_dir.name} was evaluated; name one, such as v12")
        return best
    digits = wanted.removeprefix("v")
    if not digits.isdecimal():
        raise ConfigError(f"{wanted!r} is no version; write v12, or best")
    return int(digits)


def ledger_folder(run_dir: Path, home: Path) -> Path | None:
    """Return the folder of ledgers that a run's is in, or would be.

    None outside of a DVC project, and where the ledger there is of another run with that name.
    """
    path = run_dir / "config.yaml"
    record = (load_config(path) if path.is_file() else RunConfig()).record
    try:
        ledgers = find_project(None, home) / record.ledger
    except ConfigError:
        return None  # no DVC project here, hence no ledgers
    own, pinned = run_dir / RUN, ledgers / run_dir.name / RUN
    if path.is_file() and not (
        own.is_file() and pinned.is_file() and own.read_bytes() == pinned.read_bytes()
    ):
        return None
    return ledgers


def explainer(config: RunConfig) -> Explain:
    """Return what says why a completion got its reward, in the environment of a configuration."""

    @cache
    def environment() -> AnyEnvironment | str:
        try:
            return environment_of(config.environment)
        except Exception as error:  # noqa: BLE001 (its package is not installed here, or its code fails)
            return f"the environment cannot say: {error}"

    def reason(key: str, answer: str, reward: float) -> str:
        if config.client_driven:
            return "its client's mean advantage or weight, in the place of a reward"
        if isinstance(found := environment(), str):
            return found
        try:
            return explain(found, found.problem_by_key(key), answer, reward)
        except Exception as error:  # noqa: BLE001 (code of the user's own)
            return f"the environment cannot say: {error}"

    return reason
