"""A bearing channel: each call carries the token that its file has at that moment."""

import asyncio
from pathlib import Path
from typing import Any

from antiphon.net.rpc.serving import BearingChannel


class Method:
    _method = b"/antiphon.Coordinator/Status"

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[str, str], ...]] = []

    def __call__(self, request: str, *, timeout: float, metadata: tuple[tuple[str, str], ...]) -> str:
        self.seen.append(metadata)
        return f"{request} within {timeout:g} s"


class Channel:
    def __init__(self, method: Method) -> None:
        self.unary_unary = self.unary_stream = self.stream_unary = self.stream_stream = self.make
        self._made = method

    def make(self, path: str, **forms: Any) -> Method:
        return self._made

    def close(self) -> str:
        return "closed"

    async def __aenter__(self) -> None:
        self.entered = True

    async def __aexit__(self, *error: object) -> None:
        self.entered = False


def test_a_replaced_token_goes_with_the_next_call(tmp_path: Path) -> None:
    path, method = tmp_path / "token", Method()
    path.write_text("first\n")
    channel = BearingChannel(Channel(method), path)
    ask = channel.unary_unary("/antiphon.Coordinator/Status", request_serializer=None)
    assert ask("status", timeout=2.0) == "status within 2 s" and ask._method == method._method
    ask("status", timeout=2.0)
    new = tmp_path / "new"
    new.write_text("second")
    new.replace(path)
    ask("status", timeout=2.0, metadata=(("more", "x"),))
    path.unlink()
    ask("status", timeout=2.0)
    said = [dict(metadata)["authorization"] for metadata in method.seen]
    assert said == ["Bearer first", "Bearer first", "Bearer second", "Bearer "]
    assert method.seen[2][0] == ("more", "x") and channel.close() == "closed"


def test_a_channel_that_is_opened_as_a_context_closes_with_it(tmp_path: Path) -> None:
    channel = Channel(Method())

    async def enter_and_leave() -> None:
        async with BearingChannel(channel, tmp_path / "token") as opened:
            assert isinstance(opened, BearingChannel) and channel.entered

    asyncio.run(enter_and_leave())
    assert not channel.entered
