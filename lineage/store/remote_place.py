"""Remote place: objects in a folder or an S3 bucket that others reach; the one door to fsspec.

One code path for both. An object appears whole or not at all. Whatever the place answers, callers get one
of two errors: `ConfigError` for what a person must fix, `UnavailableError` for what may pass; both name the
configuration key that said where it is. Keys come from the environment alone and never appear in a message.
"""

import errno
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from antiphon.core.digests import check_digest, digest_file
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a connection."""
READ_TIMEOUT_S = 60.0
"""Longest silence within an answer."""
PART_BYTES = 8 << 20
"""A large object is sent in parts of this size, `PARTS_AT_ONCE` of them at the same time."""
PARTS_AT_ONCE = 4

_WRONG_KEY = {
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "AuthorizationHeaderMalformed"),
    "there are none",
}


class RemotePlace:
    """Objects by name in a folder or an S3 bucket; any number of threads may use it."""

    def __init__(self, url: str, endpoint_url: str | None, setting: str, endpoint_setting: str) -> None:
        """Name the place, ``s3://bucket/prefix`` or a folder's absolute path; nothing is opened yet.

        `endpoint_url` is the S3 server's address; None takes what AWS_ENDPOINT_URL_S3 says, else Amazon's.
        `setting` and `endpoint_setting` are the configuration keys that errors name.
        """
        self.url = url.rstrip("/")
        self.endpoint_url = endpoint_url
        self._setting, self._endpoint_setting = setting, endpoint_setting
        self._is_s3 = url.startswith("s3://")
        self._root = self.url.removeprefix("s3://")
        self._opened: Any = None
        self._opening = threading.Lock()

    def check(self) -> None:
        """Make sure that the place takes and gives objects.

        Raises:
            ConfigError: for wrong keys, an absent bucket or folder, or missing rights.
            UnavailableError: when nothing answers.
        """
        probe = f"{self._root}/.antiphon-check-{os.getpid()}"
        with self._explained():
            filesystem = self._filesystem()
            word = secrets.token_hex(16).encode()
            filesystem.pipe_file(probe, word)
            kept = self._size(filesystem, probe) == len(word) and filesystem.cat_file(probe) == word
            filesystem.rm_file(probe)
        if not kept:
            raise ConfigError(
                f"{self._setting}={self.url} took an object and gives back something else; what answers "
                f"at {self.endpoint_url or 'that address'} is no store, see {self._endpoint_setting}"
            )

    def size(self, name: str) -> int | None:
        """Return the bytes of an object, or None where there is none.

        Raises:
            ConfigError, UnavailableError: see `check`.
        """
        with self._explained():
            return self._size(self._filesystem(), self._path(name))

    def put(self, name: str, path: Path, pace: Callable[[int], None] | None = None) -> None:
        """Store the file at `path`.

        Args:
            name: of the object.
            path: of the file.
            pace: called with the bytes of each part after it was sent; the next one waits for it.

        Raises:
            ConfigError, UnavailableError: see `check`.
        """
        target = self._path(name)
        with self._explained():
            filesystem = self._filesystem()
            if self._is_s3:  # an S3 object appears when all of it is there
                filesystem.put_file(str(path), target, **_parts(pace))
                return
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            incoming = f"{target}.incoming-{os.getpid()}-{threading.get_ident()}"
            with path.open("rb") as source, open(incoming, "wb") as copy:
                while part := source.read(PART_BYTES):
                    copy.write(part)
                    if pace is not None:
                        pace(len(part))
            os.replace(incoming, target)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` up to `end`.

        Raises:
            UnavailableError: when it is not there (any more), besides.
            ConfigError, UnavailableError: see `check`.
        """
        with self._explained():
            try:
                data: bytes = self._filesystem().cat_file(self._path(name), start=start, end=end)
            except FileNotFoundError as error:
                _require_bucket(error)
                raise UnavailableError(f"{self.url} holds no {name} (any more)") from None
        return data

    def fetch(self, name: str, folder: Path) -> Path | None:
        """Copy an object into a new file in `folder`; None when there is none.

        Raises:
            ConfigError, UnavailableError: see `check`.
        """
        handle, copy = tempfile.mkstemp(prefix=".incoming-", dir=folder)
        os.close(handle)
        with ExitStack() as undo:
            undo.callback(Path(copy).unlink, missing_ok=True)
            with self._explained(), suppress(FileNotFoundError):
                self._filesystem().get_file(self._path(name), copy)
                undo.pop_all()
                return Path(copy)
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the objects in a folder of the place, name -> bytes; none where the folder is absent.

        Raises:
            ConfigError, UnavailableError: see `check`.
        """
        with self._explained():
            found = self._filesystem().find(self._path(folder), detail=True)
        return {path.removeprefix(f"{self._root}/"): int(info["size"]) for path, info in found.items()}

    def remove(self, name: str) -> None:
        """Remove an object; one that is not there is no error.

        Raises:
            ConfigError, UnavailableError: see `check`.
        """
        with self._explained():
            try:
                self._filesystem().rm_file(self._path(name))
            except FileNotFoundError as error:
                _require_bucket(error)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _size(self, filesystem: Any, target: str) -> int | None:
        try:
            return int(filesystem.info(target)["size"])
        except FileNotFoundError as error:
            _require_bucket(error)
            return None

    def _filesystem(self) -> Any:
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
        if not self._is_s3 and not Path(self._root).is_dir():
            # Never made here: it may be a mount that is away, and what is put under it would be lost.
            raise ConfigError(
                f"{self._setting}={self.url} is no folder; make or mount it, or name another one"
            )
        return self._opened

    def _open(self) -> Any:
        import botocore.session  # seconds of imports that runs without a remote store do not pay
        import fsspec

        if not self._is_s3:
            return fsspec.filesystem("file")
        if botocore.session.Session().get_credentials() is None:
            raise ConfigError(
                f"{self._setting}={self.url} needs keys, and the environment has none; set "
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
        filesystem.retries = 1  # the caller decides when to try again
        return filesystem

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import botocore.exceptions as refused
        from aiohttp import ClientError  # of the connection: an answer that is cut off within its bytes

        try:
            yield
        except (refused.BotoCoreError, refused.ClientError, ClientError, OSError) as error:
            lost = (refused.BotoCoreError, ClientError, TimeoutError, ConnectionError)
            keyless = isinstance(error, refused.NoCredentialsError)
            code = "there are none" if keyless else _code(error)
            raise self._explain(error, code, silent=isinstance(error, lost) and not keyless) from None

    def _explain(self, error: Exception, code: str, *, silent: bool) -> AntiphonError:
        """Explain what s3fs or a file system raised, with S3's `code` if there is one."""
        place = f"{self._setting}={self.url}"
        where = f" at {self._endpoint_setting}={self.endpoint_url}" if self.endpoint_url else ""
        cause, number = error.__cause__ or error, None if silent else getattr(error, "errno", None)
        if code in _WRONG_KEY:
            return ConfigError(
                f"{place} refuses the keys of the environment{where} ({code}); "
                "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if code == "NoSuchBucket" or isinstance(error, FileNotFoundError):
            return ConfigError(
                f"{place}: there is no bucket or folder of that name{where}; make it, or correct "
                f"{self._setting}"
            )
        if code == "RequestTimeTooSkewed":
            return ConfigError(f"{place} refuses this machine's clock{where}; set the clock")
        if code in {"AccessDenied", "403"} or number in (errno.EACCES, errno.EPERM):
            return ConfigError(
                f"{place} may not be used with these rights{where}; give "
                "the key in AWS_ACCESS_KEY_ID the right to read, list and write there, or correct the address"
            )
        if number in (errno.ENOSPC, errno.EDQUOT):
            return UnavailableError(f"no space is left in {place}; free some there")
        if silent or not (code or isinstance(cause, OSError)):
            return UnavailableError(
                f"{place} does not answer{where} ({type(error if silent else cause).__name__}); check "
                f"{self._endpoint_setting} and that the server runs"
            )
        return UnavailableError(
            f"{place} refused an object{where} ({code or type(error).__name__}); it is tried again, look at "
            "the server if this continues"
        )


class RemoteStore(RemotePlace):
    """The objects of a store by digest, each at ``objects/ab/<digest>`` and never written twice."""

    def __init__(self, url: str, endpoint_url: str | None = None) -> None:
        super().__init__(url, endpoint_url, "record.artifact_url", "record.artifact_endpoint")

    def send(self, digest: str, path: Path) -> bool:
        """Store the file at `path`; False when the store had it, so that nothing is sent twice.

        Raises:
            IntegrityError: when the file's bytes do not match `digest`; nothing is sent.
            ConfigError, UnavailableError: see `check`.
        """
        name = _object(digest)
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
        copy = self.fetch(_object(digest), folder)
        if copy is not None and digest_file(copy) != digest:
            copy.unlink(missing_ok=True)
            raise IntegrityError(
                f"object {digest} in {self.url} does not match its digest; "
                "remove it there and upload a sound copy"
            )
        return copy


def _object(digest: str) -> str:
    return f"objects/{check_digest(digest)[:2]}/{digest}"


def _parts(pace: Callable[[int], None] | None) -> dict[str, Any]:
    """Return how s3fs sends a file: parts at once, or one after the other where each is waited for."""
    if pace is None:
        return {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
    from fsspec.callbacks import Callback

    sent = 0

    def note(size: int | None, value: int, **_: Any) -> None:
        nonlocal sent
        pace(value - sent)
        sent = value

    return {"chunksize": PART_BYTES, "max_concurrency": 1, "callback": Callback(hooks={"pace": note})}


def _code(error: BaseException) -> str:
    """Return S3's code of an error, which s3fs hides in the cause; "" where there is none."""
    reply = getattr(error.__cause__ or error, "response", None) or {}
    return str(reply.get("Error", {}).get("Code", ""))


def _require_bucket(error: FileNotFoundError) -> None:
    """Tell an absent bucket, which someone must make, from an absent object."""
    if _code(error) == "NoSuchBucket":
        raise error
