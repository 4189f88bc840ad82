"""The gateway of a run in a thread of this process, before rows at workers whose model is a function."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from antiphon.benchmarks.parts.scripted_gateway import MODEL, Say
from antiphon.core.config import RunConfig, build_config
from antiphon.core.status import RunStatus
from antiphon.environments.host import HostEnvironment
from antiphon.lineage.hosts import HOST_TOKEN, read_gateway
from antiphon.models.codec import TextCodec
from antiphon.net.security.guard import Guard
from antiphon.services.reward.gateway import Gateway, open_gateway
from antiphon.services.reward.turns import answer_turns
from tests.support.hosted_rows import AskingCoordinator, Row
from tests.support.turn_model import KEEP

WAIT_S = 60.0
SAMPLES = 4


def config_of(model: str | Path, seats: int = 2, **gateway: Any) -> RunConfig:
    """Return the configuration of a hosted run."""
    return build_config(
        {
            "model": {"path": str(model), "renderer": "qwen3", "template_arguments": KEEP},
            "environment": {"name": "host", "seats": seats, "train_size": 32, "reward_range": [-3.0, 4.0]},
            "loop": {"group_size": SAMPLES},
            "evaluation": {"samples": seats, "temperature": 0.5},
            "sampling": {"max_tokens": 16},
            "rollout": {"max_model_tokens": 3000},
            "gateway": gateway,
        }
    )


class Served:
    """A gateway in a thread, with a coordinator that asks it about some groups."""

    def __init__(
        self, run_dir: Path, url: str, coordinator: AskingCoordinator, loop: Any, gateway: Gateway
    ) -> None:
        self.run_dir, self.url, self.coordinator, self._loop = run_dir, url, coordinator, loop
        self._gateway, self._let_in, admit = gateway, asyncio.Event(), gateway._admit

        def noting(*given: Any) -> str:
            found = admit(*given)
            self._let_in.set()
            return found

        gateway._admit = noting
        self.host, _, port = url.rpartition("/")[2].partition(":")
        self.port = int(port)
        self.token = (run_dir / HOST_TOKEN).read_text().strip()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and what the body says."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)
        text = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {self.token}"} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        try:
            connection.request(method, path, text, given)
            reply = connection.getresponse()
            said = reply.read()
            return reply.status, json.loads(said) if said else None
        finally:
            connection.close()

    def ok(self, path: str, body: Any, **headers: str) -> Any:
        status, said = self.ask("POST", path, body, **headers)
        assert status == 200, said
        return said

    def refused(self, path: str, body: Any, **headers: str) -> str:
        status, said = self.ask("POST", path, body, **headers)
        assert 400 <= status < 500 and said["error"]["code"] == status, said
        return str(said["error"]["message"])

    def take(self, host: str = "h1") -> Any:
        return self.ok("/antiphon/v1/take", {"host": host})

    def revoke_once_heard(self, barred: Mapping[str, str]) -> None:
        """Bar tokens as soon as a request was let in."""

        async def revoke() -> None:
            await self._let_in.wait()
            self._gateway.heard(_status(barred), ())

        asyncio.run_coroutine_threadsafe(revoke(), self._loop).result(WAIT_S)

    def wait_over(self) -> None:
        waiting = asyncio.run_coroutine_threadsafe(self.coordinator.over.wait(), self._loop)
        assert waiting.result(WAIT_S)


def _status(barred: Mapping[str, str]) -> RunStatus:
    return RunStatus("run-1", 4, 0, 1, 0, 0, 3, 0, 0, 0, 0, 0, 0, barred=barred)


@contextmanager
def served(
    config: RunConfig,
    run_dir: Path,
    rows: Sequence[Row],
    guard: Guard | None = None,
    barred: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Served]:
    """Serve hosts, whom a coordinator asks about some rows."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gateway", daemon=True)
    thread.start()
    coordinator, ready, stop = AskingCoordinator(rows), threading.Event(), asyncio.Event()
    codec, gateways = TextCodec.load(config.model.path), list[Gateway]()

    async def serve() -> None:
        environment = HostEnvironment(config.environment)
        async with open_gateway(config, environment, codec, run_dir, guard) as gateway:
            gateways.append(gateway)
            gateway.heard(_status(barred), ())
            answering = asyncio.create_task(answer_turns(coordinator, gateway, "g", 10.0, 0.02))
            looking = asyncio.create_task(gateway.look())
            ready.set()
            await stop.wait()
            answering.cancel()
            looking.cancel()
            await asyncio.wait({answering, looking}, timeout=WAIT_S)

    serving = asyncio.run_coroutine_threadsafe(serve(), loop)
    try:
        serving.add_done_callback(lambda done: ready.set())
        assert ready.wait(WAIT_S)
        if serving.done():
            serving.result()
        record = read_gateway(run_dir)
        yield Served(run_dir, record.url, coordinator, loop, gateways[0])
    finally:
        loop.call_soon_threadsafe(stop.set)
        serving.result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


def rows_that_say(codec: TextCodec, say: Callable[[str, Sequence[int]], str], groups: int) -> list[Row]:
    """Return the rows of groups whose policy says a text of each trajectory's name and context."""

    def sample(name: str, context: Sequence[int]) -> list[int]:
        return [*codec.encode(say(name, context), add_special_tokens=False), codec.end_token_id]

    return [Row(f"g{group}/{index}", sample) for group in range(groups) for index in range(SAMPLES)]


@contextmanager
def say_to_hosts(run_dir: Path, say: Say, groups: int, seats: int = 2) -> Iterator[Served]:
    """Serve hosts whose policy says what a function says, as the scripted gateway's does."""
    config = config_of(MODEL, seats)
    codec = TextCodec.load(config.model.path)

    def said(name: str, context: Sequence[int]) -> str:
        return say(name, 0, codec.tokenizer.decode(context, skip_special_tokens=False)) or ""

    with served(config, run_dir, rows_that_say(codec, said, groups)) as found:
        yield found
