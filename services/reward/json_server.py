"""JSON server: asks a server elsewhere over HTTP; whatever it answers ends in JSON or in one sentence.

Nothing that the other side does can hold a request up for longer than its deadline, or fill the memory, and
no sentence repeats its orders or the key.
"""

import json
from typing import Any, Self

import aiohttp

from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.core.reporting.plain_text import plain
from antiphon.environments.outside import secret_values
from antiphon.environments.scoring.messages import REASON_CHARS

ANSWER_BYTES = 1 << 20
"""Longest answer that is read, unless more is asked for."""
SAID_CHARS = 100
"""Characters of a refusal that are repeated."""
PASSING = (408, 425, 429)
"""Statuses below 500 after which it is worth asking again."""


class JsonServer:
    """A server that a section of the configuration names; an asynchronous context."""

    def __init__(self, section: str, key: str | None, timeout_s: float, at_once: int) -> None:
        """Prepare; nothing is asked before the context is entered.

        Args:
            section: of the configuration, whose fields `url` and `key` sentences name.
            key: the variable whose value is sent as the API key.
            timeout_s: longest time of one request.
            at_once: requests at the same time.

        Raises:
            ConfigError: when the variable is not set, or holds what no header can.
        """
        self._field, self._timeout_s, self._at_once = section, timeout_s, at_once
        self._secrets = secret_values([key] if key else [], f"{section}.key")
        if not all("!" <= letter <= "~" for value in self._secrets.values() for letter in value):
            raise ConfigError(
                f"{section}.key: the value of {key} has a space, a line end or a letter that no header can "
                "carry; export the key alone"
            )

    async def __aenter__(self) -> Self:
        (value,) = self._secrets.values() or ("",)
        keys = {"Authorization": f"Bearer {value}"} if value else {}
        self._session = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity", **keys},
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            connector=aiohttp.TCPConnector(limit=self._at_once),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # few bytes would become many
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def post(self, url: str, body: dict[str, Any], most: int = ANSWER_BYTES) -> Any:
        """Return the JSON of an answer of at most `most` bytes.

        Raises:
            UnavailableError: when asking again may help.
            ContractError: when it will not.
        """
        found = bytearray()
        try:
            async with self._session.post(url, json=body, allow_redirects=False) as answer:
                async for chunk in answer.content.iter_any():
                    found += chunk
                    if len(found) > most:
                        raise UnavailableError(f"its answer has more than {most >> 20} MiB")
        except TimeoutError:
            raise UnavailableError(f"it did not answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            said = self.plain(str(error), most=SAID_CHARS)  # it may quote what is no HTTP
            raise UnavailableError(f"it cannot be asked: {type(error).__name__}: {said}") from None
        if (status := answer.status) != 200:
            said = self._said(found)
            if 300 <= status < 400:
                place = self.plain(answer.headers.get("Location", ""), most=SAID_CHARS)
                said = f"go to {place}; give the final address in {self._field}.url"
            kind = UnavailableError if status >= 500 or status in PASSING else ContractError
            raise kind(f"it answered with status {status}: {said}")
        try:
            return json.loads(found)
        except (ValueError, RecursionError):
            raise UnavailableError(f"its answer is no JSON: {self._said(found)}") from None

    def _said(self, answer: bytearray) -> str:
        return self.plain(answer.decode(errors="replace"), most=SAID_CHARS)

    def plain(self, text: str, keep: str = "", most: int | None = REASON_CHARS) -> str:
        """Return a text of the other side without orders and without the key."""
        for name, value in self._secrets.items():
            text = text.replace(value, f"${name}")
        return plain(text, keep)[:most]
