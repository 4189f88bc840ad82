"""Remote store: the same objects in a place that others reach, a folder or a bucket.

An object lies at ``<store>/objects/ab/<digest>``, and is never written twice.
"""

from pathlib import Path

from antiphon.core.digests import check_digest, digest_file
from antiphon.core.errors import IntegrityError, UnavailableError
from antiphon.lineage.store.remote_place import RemotePlace


class RemoteStore:
    """Objects by digest in a folder or an S3 bucket; any number of threads may use it."""

    def __init__(self, url: str, endpoint_url: str | None = None) -> None:
        """Name the store, ``s3://bucket/prefix`` or a folder's absolute path; nothing is opened yet.

        `endpoint_url` is the S3 server's address; by default what AWS_ENDPOINT_URL_S3 says, else
        Amazon's.
        """
        self._place = RemotePlace(url, endpoint_url, "record.artifact_url", "record.artifact_endpoint")
        self.url, self.endpoint_url = self._place.url, endpoint_url

    def check(self) -> None:
        """Make sure that the store takes and gives objects.

        Raises:
            ConfigError: for wrong keys, an absent bucket or folder, or missing rights.
            UnavailableError: when nothing answers.
        """
        self._place.check()

    def put(self, digest: str, path: Path) -> bool:
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
        if self._place.size(name) == size:
            return False
        self._place.put(name, path)
        if (kept := self._place.size(name)) != size:
            raise UnavailableError(
                f"{self.url} took {name} of {size} bytes and has {kept or 0}; what answers there is no store"
            )
        return True

    def fetch(self, digest: str, folder: Path) -> Path | None:
        """Copy an object into a new file in `folder`, checked; None when the store has none.

        Raises:
            IntegrityError: when its bytes do not match its name.
            ConfigError, UnavailableError: see `check`.
        """
        copy = self._place.fetch(_name(digest), folder)
        if copy is not None and digest_file(copy) != digest:
            copy.unlink(missing_ok=True)
            raise IntegrityError(
                f"object {digest} in {self.url} does not match its digest; "
                "remove it there and upload a sound copy"
            )
        return copy

    def has(self, digest: str) -> bool:
        """Tell whether an object of that name is there; its bytes are checked when fetched.

        Raises:
            ConfigError, UnavailableError: see `check`.
        """
        return self._place.size(_name(digest)) is not None


def _name(digest: str) -> str:
    return f"objects/{check_digest(digest)[:2]}/{digest}"
