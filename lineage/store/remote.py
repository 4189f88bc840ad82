"""Remote store: the same objects in a place that others reach, a folder or a bucket.

An object lies at ``<store>/objects/ab/<digest>``, and is never written twice.
"""

from pathlib import Path

from antiphon.core.digests import check_digest, digest_file
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.lineage.store.remote_place import RemotePlace


class RemoteStore(RemotePlace):
    """Objects by digest in a folder or an S3 bucket; any number of threads may use it."""

    def __init__(self, url: str, endpoint_url: str | None = None) -> None:
        """Name the store; nothing is opened yet (see `RemotePlace`)."""
        super().__init__(url, endpoint_url, "record.artifact_url", "record.artifact_endpoint")

    def send(self, digest: str, path: Path) -> bool:
        """Store the file at `path`; False when the store had it, so that nothing is sent twice.

        Raises:
            IntegrityError: when the file's bytes do not match `digest`; nothing is sent.
            ConfigError, UnavailableError: see `check`.
        """
        name = _name(digest)
        try:
            size = path.stat().st_size
            sound = digest_file(path) == digest
        except OSError as error:
            raise UnavailableError(f"{path} cannot be uploaded: {error.strerror or error}") from error
        if not sound:
            raise IntegrityError(
                f"object {digest} in {path.parent} does not match its digest, so it is not uploaded; "
                "remove the file and restore it from a copy"
            )
        if self.size(name) == size:
            return False
        self.put(name, path)
        if (kept := self.size(name)) != size:
            raise UnavailableError(
                f"{self.url} took {name} of {size} bytes and has {kept or 0}; what answers there is no store"
            )
        return True

    def bring(self, digest: str, folder: Path) -> Path | None:
        """Copy an object into a new file in `folder`, checked; None when the store has none.

        Raises:
            IntegrityError: when its bytes do not match its name.
            ConfigError, UnavailableError: see `check`.
        """
        copy = self.fetch(_name(digest), folder)
        if copy is not None and digest_file(copy) != digest:
            copy.unlink(missing_ok=True)
            raise IntegrityError(
                f"object {digest} in {self.url} does not match its digest; "
                "remove it there and upload a sound copy"
            )
        return copy


def _name(digest: str) -> str:
    return f"objects/{check_digest(digest)[:2]}/{digest}"
