"""export: a version of a run as a Hugging Face folder."""

from pathlib import Path

from antiphon.lineage.export import BEST, check_place, choose_version, export_version
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_artifacts
from antiphon.system.logs import configure_logs


def export(run: str, version: str, folder: Path | None = None, /) -> None:
    """Write a version of a run as a Hugging Face folder.

    Transformers and vLLM load it. Its README.md names run, version, weights digest, held-out score, base
    model, recipe, and the command that makes the same weights again. The folder appears whole or not at all.
    A run that is still going gives what it has published so far. A version that is recorded by its digest
    alone (record.weights) is made again first, by repeating the steps from the nearest checkpoint.

    Args:
        run: the run's id.
        version: v12, or best, the version with the highest held-out score; best when it is left out.
        folder: a folder that does not exist yet, or is empty.
    """
    wanted, place = (version, folder) if folder is not None else (BEST, Path(version))
    artifacts, own = find_artifacts(home_directory(), run, None)
    chosen = choose_version(artifacts, wanted)
    check_place(place)
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
