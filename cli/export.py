"""export: a version of a run as a Hugging Face folder."""

import tempfile
from pathlib import Path

from antiphon.core.errors import ConfigError
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.lineage.export import (
    BEST,
    Export,
    check_place,
    choose_version,
    export_adapter,
    export_version,
)
from antiphon.lineage.saved_weights import SCHEME, find_saved, saved_at
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_artifacts
from antiphon.system.logs import configure_logs


def export(run: str, version: str, folder: Path | None = None, /, *, adapter: bool = False) -> None:
    """Write a version of a run as a Hugging Face folder.

    Transformers and vLLM load it. Its README.md names run, version, weights digest, held-out score, base
    model, recipe, and the command that makes the same weights again. The folder appears whole or not at all.
    A run that is still going gives what it has published so far. A version that is recorded by its digest
    alone (record.weights) is made again first, by repeating the steps from the nearest checkpoint.

    Args:
        run: the run's id; or tinker://RUN/weights/NAME as a client of the door saved it, and then no version.
        version: v12, or best, the version with the highest held-out score; best when it is left out.
        folder: a folder that does not exist yet, or is empty.
        adapter: write the adapter alone (learner.lora), as a folder of peft's, instead of whole weights.
    """
    wanted, place = (version, folder) if folder is not None else (BEST, Path(version))
    if run.startswith(SCHEME):
        if folder is not None:
            raise ConfigError(f"{run} names a version; leave {version} out")
        place = Path(version)
        saved = find_saved(home_directory(), saved_at(run))
        run, wanted = saved.saved.run_id, f"v{saved.version}"
    artifacts, own = find_artifacts(home_directory(), run, None)
    chosen = choose_version(artifacts, wanted)
    check_place(place)
    if adapter:
        found = _export_adapter(artifacts, chosen, place)
        print(f"{place}: the adapter of version {found.version} of {found.run_id}, {found.score}")
        print(f"look at {place}/README.md for its base")
        return
    if artifacts.weights(chosen) is not None:
        found = export_version(artifacts, chosen, place)
    else:
        from antiphon.services.learner.replay.steps import weights_of  # torch and DeepSpeed

        configure_logs("warning")
        with weights_of(artifacts, chosen, own, lambda said: print(said, flush=True)) as weights:
            found = export_version(artifacts, chosen, place, weights=weights)
    print(
        f"{place}: version {found.version} of {found.run_id}, {found.score}, "
        f"weights {found.weights_digest[:12]}"
    )
    print(f"look at {place}/README.md; `vllm serve {place}` serves it")


def _export_adapter(artifacts: ReplayCopy, version: int, place: Path) -> Export:
    from antiphon.weights.adapter import write_merged  # numpy

    file, base = artifacts.adapter(version), artifacts.weights(0)
    if file is None or base is None:
        raise ConfigError(
            f"version {version} of run {artifacts.run_id} has no adapter in its ledger: those have one that "
            "learner.lora made, but not version 0; leave --adapter out for whole weights"
        )
    with tempfile.TemporaryDirectory(prefix="antiphon-version-") as folder:
        write_merged(base, file, version, artifacts.weights_digest(version), Path(folder) / "merged")
    return export_adapter(artifacts, version, file, place)
