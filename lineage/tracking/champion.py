"""Champion: the registry's name for the best policy that was evaluated in an experiment.

One registered model for each experiment; its alias `champion` moves only to a version that
scored higher than the one it names, so evaluations may come late, twice or in any order. A
version gets its files before the alias, so that `models:/NAME@champion` names something that loads.
"""

from pathlib import Path
from typing import Any

from antiphon.lineage.tracking.model_files import Exporter, add_files
from antiphon.lineage.tracking.tracked_run import TrackedRun

ALIAS = "champion"
SCORE_TAG = "antiphon.reward"
ORIGIN_TAG = "antiphon.policy"


def crown(
    run: TrackedRun,
    registered: str,
    version: int,
    reward: float,
    prompts: int,
    export: Exporter | None = None,
    scratch: Path | None = None,
) -> bool:
    """Move the alias to a policy version if none has scored as high; tell whether it was moved.

    Args:
        run: the run whose logged model it is.
        registered: name of the registered model; made when there is none.
        version: policy version that was evaluated.
        reward: its held-out reward.
        prompts: held-out prompts it was scored on; kept as a tag, as is the digest of its weights.
        export: writes the version's folder; without it, as in a run with record.dvc=false, the registered
            version has no files.
        scratch: folder for what has to be uploaded.
    """
    model_id = run.models.get(version)
    if model_id is None:
        return False
    champion = _champion(run.client, registered)
    origin = f"{run.run_id}/v{version}"
    if champion is not None and float(champion.tags.get(SCORE_TAG, "-inf")) >= reward:
        return False
    if export is not None and scratch is not None:
        add_files(run.client, model_id, version, export, scratch)
    wanted = f"name = '{registered}' and tags.`{ORIGIN_TAG}` = '{origin}'"
    made = next(iter(run.client.search_model_versions(wanted, max_results=1)), None)
    if made is None:
        source = run.client.get_logged_model(model_id).artifact_location
        tags = {
            SCORE_TAG: repr(reward),
            ORIGIN_TAG: origin,
            "antiphon.version": str(version),
            "antiphon.prompts": str(prompts),
            "antiphon.weights_digest": run.digests.get(version, ""),
        }
        made = run.client.create_model_version(
            registered, source, run.run_id, tags=tags, model_id=model_id, await_creation_for=0
        )
    run.client.set_registered_model_alias(registered, ALIAS, str(made.version))
    return True


def _champion(client: Any, registered: str) -> Any:
    """Return the registered version that the alias names, or None; makes the registered model."""
    from mlflow.exceptions import MlflowException

    try:
        known = client.get_registered_model(registered)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        try:
            client.create_registered_model(
                registered, description="Policies that scored best when evaluated."
            )
        except MlflowException as other:
            if other.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return None
    number = known.aliases.get(ALIAS)
    return client.get_model_version(registered, str(number)) if number is not None else None
