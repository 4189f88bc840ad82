"""Restoring: which snapshots a learner that was started again believes, and where it begins."""

from collections.abc import Callable, Collection, Mapping, Sequence

from antiphon.core.config_sections import LoopSection
from antiphon.core.records import StepCommit


def committed_snapshots(stored: Mapping[int, str], commits: Sequence[StepCommit]) -> set[int]:
    """Return the versions whose stored weights are the committed ones.

    A version may have been written and not committed, and its batch voided since. Version 0 has no
    commit; the coordinator knows what it was announced with.

    Args:
        stored: version -> digest of its stored weights.
        commits: of all steps, in order.
    """
    committed = {commit.version: commit.weights_digest for commit in commits}
    return {version for version, digest in stored.items() if not version or committed.get(version) == digest}


def first_version(
    loop: LoopSection,
    committed: int,
    stored: Collection[int],
    newest_checkpoint: Callable[[int], int | None],
) -> int:
    """Return the newest version to start from, so that no snapshot still needed is skipped.

    Args:
        loop: says which versions are published, and how old one may be that still samples.
        committed: steps so far.
        stored: versions with a snapshot.
        newest_checkpoint: returns the newest version up to another one with a sound checkpoint, or None.
    """
    oldest = max(0, committed - loop.max_staleness)
    needed = range(oldest + -oldest % loop.publish_interval, committed + 1, loop.publish_interval)
    first = min((version for version in needed if version not in stored), default=committed)
    # Going back to the base weights repeats the whole run. Elastic mode continues from the newest
    # snapshot instead; fixed mode cannot sample its next step without the one that is missing.
    return first if loop.mode == "fixed" or newest_checkpoint(first) is not None else committed
