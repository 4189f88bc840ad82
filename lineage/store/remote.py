"""Remote store: the same objects in a place that others reach, a folder or a bucket.

One code path for both, over fsspec: an object lies at ``<store>/objects/ab/<digest>``, appears
whole or not at all, and is never written twice. Whatever the place answers, callers get one of
two errors: `ConfigError` for what a person must fix, `UnavailableError` for what may
pass. Keys come from the environment alone and never appear in a message.
"""

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from antiphon.core.digests import check_digest, digest_file
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a connection."""
READ_TIMEOUT_S = 60.0
"""Longest silence within an answer."""

_WRONG_KEY = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidSecurity",
    "AuthorizationHeaderMalformed",
}


class RemoteStore:
    """Objects by digest in a folder or an S3 bucket; any number of threads may use it."""

    def __init__(self, url: str, endpoint_url: str | None = None) -> None:
        """Name the store, ``s3://bucket/prefix`` or a folder's absolute path; nothing is opened yet.

        `endpoint_url` is the S3 server's address; by default what AWS_ENDPOINT_URL_S3 says, else
        Amazon's.
        """
        self.url = url.rstrip("/")
        self.endpoint_url = endpoint_url
        self._is_s3 = url.startswith("s3://")
        self._root = self.url.removeprefix("s3://")
        self._opened: Any = None
        self._opening = threading.Lock()

    def check(self) -> None:
        """Make sure that the store takes and gives objects.

        Raises:
            ConfigError: for wrong keys, an absent bucket or folder, or missing rights.
            UnavailableError: when nothing answers.
        """
        probe = f"{self._root}/.antiphon-check-{os.getpid()}"
        with self._explained():
            filesystem = self._filesystem()
            filesystem.pipe_file(probe, b"antiphon")
            filesystem.rm_file(probe)

    def put(self, digest: str, path: Path) -> bool:
        """Store the file at `path`; False when the store had it, so that nothing is sent twice.

        Raises:
            IntegrityError: when the file's bytes do not match `digest`; nothing is sent.
            ConfigError, UnavailableError: see `check`.
        """
        target = self._place(digest)
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
        with self._explained():
            filesystem = self._filesystem()
            if self._size(filesystem, target) == size:
                return False
            if self._is_s3:
                filesystem.put_file(str(path), target)  # an S3 object appears when all of it is there
            else:
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                incoming = f"{target}.incoming-{os.getpid()}-{threading.get_ident()}"
                filesystem.put_file(str(path), incoming)
                os.replace(incoming, target)
        return True

    def fetch(self, digest: str, folder: Path) -> Path | None:
        """Copy an object into a new file in `folder`, checked; None when the store has none.

        Raises:
            IntegrityError: when its bytes do not match its name.
            ConfigError, UnavailableError: see `check`.
        """
        handle, name = tempfile.mkstemp(prefix=".incoming-", dir=folder)
        os.close(handle)
        try:
            with self._explained():
                try:
                    self._filesystem().get_file(self._place(digest), name)
                except FileNotFoundError:
                    Path(name).unlink(missing_ok=True)
                    return None
            if digest_file(Path(name)) != digest:
                raise IntegrityError(
                    f"object {digest} in {self.url} does not match its digest; "
                    "remove it there and upload a sound copy"
                )
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return Path(name)

    def has(self, digest: str) -> bool:
        """Tell whether an object of that name is there; its bytes are checked when fetched.

        Raises:
            ConfigError, UnavailableError: see `check`.
        """
        with self._explained():
            return self._size(self._filesystem(), self._place(digest)) is not None

    def _place(self, digest: str) -> str:
        return f"{self._root}/objects/{check_digest(digest)[:2]}/{digest}"

    def _size(self, filesystem: Any, target: str) -> int | None:
        try:
            return int(filesystem.info(target)["size"])
        except FileNotFoundError:
            return None

    def _filesystem(self) -> Any:
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
        if not self._is_s3 and not Path(self._root).is_dir():
            # Never made here: it may be a mount that is away, and what is put under it would be lost.
            raise ConfigError(
                f"record.artifact_url={self.url} is no folder; make or mount it, or name another one"
            )
        return self._opened

    def _open(self) -> Any:
        import fsspec  # seconds of imports that runs without a remote store do not pay

        if not self._is_s3:
            return fsspec.filesystem("file")
        if not _has_keys():
            raise ConfigError(
                f"record.artifact_url={self.url} needs keys, and the environment has none; set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            )
        client = {"endpoint_url": self.endpoint_url} if self.endpoint_url else {}
        client["region_name"] = os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
        filesystem = fsspec.filesystem(
            "s3",
            client_kwargs=client,
            config_kwargs={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": READ_TIMEOUT_S,
                "retries": {"max_attempts": 1},
            },
            # Others write to the same bucket, so what a listing said is nothing to rely on.
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        filesystem.retries = 1  # whoever waits for this decides when to try again
        return filesystem

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import botocore.exceptions as refused

        try:
            yield
        except refused.NoCredentialsError:
            raise self._wrong_key("there are none") from None
        except (refused.BotoCoreError, TimeoutError, ConnectionError) as error:
            raise self._silent(error) from None
        except (refused.ClientError, OSError) as error:
            raise self._translate(error) from None

    def _translate(self, error: Exception) -> AntiphonError:
        """Explain what s3fs or a file system raised; s3fs hides S3's code in the cause."""
        cause = error.__cause__ if error.__cause__ is not None else error
        reply = getattr(cause, "response", None) or {}
        code = str(reply.get("Error", {}).get("Code", ""))
        if code in _WRONG_KEY:
            return self._wrong_key(code)
        if code == "NoSuchBucket" or isinstance(error, FileNotFoundError):
            return ConfigError(
                f"record.artifact_url={self.url}: there is no bucket or folder of that name"
                f"{self._where()}; make it, or correct record.artifact_url"
            )
        if code == "RequestTimeTooSkewed":
            return ConfigError(
                f"record.artifact_url={self.url} refuses this machine's clock{self._where()}; set the clock"
            )
        number = getattr(error, "errno", None)
        if code in {"AccessDenied", "403"} or number in (errno.EACCES, errno.EPERM):
            return ConfigError(
                f"record.artifact_url={self.url} may not be used with these rights{self._where()}; give "
                "the key in AWS_ACCESS_KEY_ID the right to read, list and write there, or correct the address"
            )
        if number in (errno.ENOSPC, errno.EDQUOT):
            return UnavailableError(f"no space is left in record.artifact_url={self.url}; free some there")
        if not reply and not isinstance(cause, OSError):
            return self._silent(cause)
        return UnavailableError(
            f"record.artifact_url={self.url} refused an object{self._where()} "
            f"({code or type(error).__name__}); it is tried again, look at the server if this continues"
        )

    def _wrong_key(self, what: str) -> ConfigError:
        return ConfigError(
            f"record.artifact_url={self.url} refuses the keys of the environment{self._where()} ({what}); "
            "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )

    def _silent(self, error: BaseException) -> UnavailableError:
        return UnavailableError(
            f"record.artifact_url={self.url} does not answer{self._where()} ({type(error).__name__}); check "
            "record.artifact_endpoint and that the server runs"
        )

    def _where(self) -> str:
        return f" at record.artifact_endpoint={self.endpoint_url}" if self.endpoint_url else ""


def _has_keys() -> bool:
    import botocore.session

    return botocore.session.Session().get_credentials() is not None
