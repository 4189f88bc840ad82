"""push: send what a remote store does not have yet, without a run, and wait until it is there."""

from pathlib import Path

from antiphon.core.errors import UnavailableError
from antiphon.runs.directory import home_directory


def push(
    *,
    home: Path | None = None,
    timeout_s: float = 600.0,
) -> int:
    """Send the artifacts that wait in the outbox, each to the store its run named.

    Args:
        home: the home directory; by default ANTIPHON_HOME or ./.antiphon.
        timeout_s: longest wait for each remote store, in seconds.
    """
    from antiphon.lineage.store.artifact_store import ArtifactStore
    from antiphon.lineage.store.outbox import outboxes
    from antiphon.lineage.store.remote import RemoteStore
    from antiphon.lineage.store.uploader import Uploader
    from antiphon.runs.directory import store_directory

    root = store_directory((home or home_directory()).absolute())
    waiting = [outbox for outbox in outboxes(root) if outbox.pending(1)]
    if not waiting:
        print("nothing waits")
    for outbox in waiting:
        remote = RemoteStore(outbox.url, outbox.endpoint_url)
        remote.check()
        uploader = Uploader(ArtifactStore(root, remote))
        uploader.flush(timeout_s)
        report = uploader.close(timeout_s=0.0)
        print(f"{outbox.url}: {report.uploaded} sent, {report.known} were there, {report.pending} left")
        if report.refused:
            print(f"{outbox.url}: {report.refused} put aside; {report.reason}")
        if report.pending:
            raise UnavailableError(
                f"{report.pending} artifacts did not get to {outbox.url} within {timeout_s:g} s"
                f"{': ' + report.reason if report.reason else ''}; the same command continues"
            )
    return 0
