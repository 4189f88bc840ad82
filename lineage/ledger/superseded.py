"""Superseded weights: versions that retention does not keep leave the ledger while the run goes on."""

from collections.abc import Mapping
from pathlib import Path

from antiphon.api.policy_file import policy_facts
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_file
from antiphon.lineage.ledger.pins import Ledger
from antiphon.lineage.names import version_entry, version_of_weights
from antiphon.lineage.retention import is_anchor, keeps_weights
from antiphon.lineage.store.artifact_store import ArtifactStore


def is_superseded(ledger: Ledger, version: int, scores: Mapping[int, float], config: RunConfig) -> bool:
    """Return whether the weights of a version need not enter the ledger any more; `scores` by version."""
    if is_anchor(version, config):
        return False
    newest = max([version, *_held(ledger)])
    return not keeps_weights(version, newest, scores, config)


def remove_superseded(
    ledger: Ledger, store: ArtifactStore, run_id: str, scores: Mapping[int, float], config: RunConfig
) -> None:
    """Take superseded weights out of the ledger, DVC's cache and the store, oldest first.

    What a killed process began to take away goes too. A file that does not say it is of this run may be
    another run's as well: only its place in the ledger goes, the rest is left to `antiphon gc`.

    Raises:
        UnavailableError: when there is no space left for the ledger's journal or tree.
    """

    def release(path: Path) -> bool:
        if policy_facts(path).get("run") != run_id:
            return False
        store.discard(digest_file(path))
        return True

    held = sorted(_held(ledger))
    gone = [version for version in held if not keeps_weights(version, held[-1], scores, config)]
    ledger.remove([version_entry(version, "safetensors") for version in gone], release)


def _held(ledger: Ledger) -> list[int]:
    return [version for rel in ledger if (version := version_of_weights(rel)) is not None]
