"""Bearing channel: every call carries the caller's access token as it is in its file at that moment."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from antiphon.net.security.credentials import read_token


class BearingChannel:
    """An encrypted channel whose calls carry the token that is in a file now.

    Not as call credentials, which gRPC for Python asks for in a new thread for every call.
    """

    def __init__(self, channel: Any, path: Path) -> None:
        self._channel, self._path = channel, path
        self._read: tuple[int, int, int] | None = None
        self._token = ""
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            setattr(self, kind, functools.partial(self._bearing, getattr(channel, kind)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def _bearing(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        method = make(*args, **kwargs)

        def begin(*args: Any, metadata: Sequence[tuple[str, str]] = (), **kwargs: Any) -> Any:
            return method(*args, metadata=(*metadata, ("authorization", self._bearer())), **kwargs)

        begin._method = method._method  # type: ignore[attr-defined]  # errors name the call by it
        return begin

    def _bearer(self) -> str:
        """Return the token, which is read again when its file was replaced or changed."""
        try:
            found = self._path.stat()
            state = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            state = None
        if state is None or state != self._read:
            self._read, self._token = state, read_token(self._path)
        return f"Bearer {self._token}"
