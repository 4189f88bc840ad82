"""The token gateway as a host sees it: JSON over HTTP, asked again until a deadline from the last answer.

A repeated request gets the answer that was given, so asking again is always safe.
"""

import asyncio
import http.client
import io
import json
import ssl
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

CALL_S = 60.0
"""Longest wait for one answer; then the same is asked again."""
LONGEST_PAUSE_S = 5.0
LIMITS = {"turns": "environment.max_turns", "tokens": "maximum context length"}
"""What stands in the gateway's sentence when a trajectory has reached a limit of the run."""
REPORT = "; report it"
"""How that sentence ends: a judge's model may say the rest, too."""


class HostError(Exception):
    """Ends the program; its text is the one sentence that says why."""


class RefusedError(Exception):
    """The gateway did not accept a request, and would not later."""


class LimitError(RefusedError):
    """The trajectory has reached a limit of the run: it may be reported, and gets no further turn."""

    @property
    def limit(self) -> str | None:
        """Return which one."""
        return limit_in(str(self))


def limit_in(why: str) -> str | None:
    """Return the limit that a trajectory has reached by a sentence of the gateway, if that says so.

    >>> limit_in("This model's maximum context length is 8192 tokens.")
    >>> limit_in("the trajectory has its environment.max_turns=8 turns; report it")
    'turns'
    """
    return next((limit for limit, said in LIMITS.items() if said in why and REPORT in why), None)


class Gateway:
    """Calls to a gateway.

    Args:
        url: where it listens, such as http://127.0.0.1:8400.
        token: bearer token of scope `sample`.
        patience_s: longest time without an answer to anything, in seconds.
    """

    def __init__(self, url: str, token: str, patience_s: float) -> None:
        self.url, self.token, self.patience_s = url.rstrip("/"), token, patience_s
        at = urlsplit(self.url)
        if at.scheme not in ("http", "https") or not at.hostname:
            raise HostError(f"--gateway={url} is no address; write http://HOST:PORT")
        self._name, self._prefix = at.hostname, at.path
        self._port = at.port or (443 if at.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if at.scheme == "https" else None
        self._heard_s: float | None = None

    async def post(self, path: str, body: object, timeout_s: float | None = CALL_S) -> Any:
        """Return the JSON of an answer, None where it has none; ask again where there is no answer.

        Raises:
            LimitError, RefusedError: when the gateway says that there will be no answer.
            HostError: when it refuses the token, or has answered nothing for `patience_s`.
        """
        now = asyncio.get_running_loop().time
        self._heard_s, pause_s = self._heard_s or now(), 0.1
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    status, answer = await self._once(path, body)
            except (OSError, http.client.HTTPException, ValueError) as error:  # TimeoutError is an OSError
                why = f"{type(error).__name__}: {error}"
            else:
                if status < 500:
                    self._heard_s = now()
                if status < 400:
                    return answer
                said = answer.get("error") if isinstance(answer, dict) else None
                why = str((said.get("message") if isinstance(said, dict) else said) or f"status {status}")
                if status in (401, 403):
                    raise HostError(
                        f"the gateway at {self.url} refuses the token: {why}; give one of scope `sample` "
                        "with --token-file or ANTIPHON_TOKEN"
                    )
                if status < 500 and status != 429:
                    raise (LimitError if limit_in(why) else RefusedError)(why)
            if now() - self._heard_s > self.patience_s:
                raise HostError(
                    f"the gateway at {self.url} has not answered for {self.patience_s:g} s: {why}; start the "
                    "run, or name its gateway with --gateway"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _once(self, path: str, body: object) -> tuple[int, Any]:
        """Ask over a connection of its own, which a cancelled caller leaves."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._name, self._port, ssl=self._tls)
        try:
            head = (
                f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._name}:{self._port}\r\n"
                f"Authorization: Bearer {self.token}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + data)
            whole = io.BytesIO(await reader.read())
        finally:
            writer.close()
        socket: Any = SimpleNamespace(makefile=lambda _: whole)  # all that is asked of one
        response = http.client.HTTPResponse(socket)
        response.begin()
        text = response.read()
        return response.status, json.loads(text) if text else None
