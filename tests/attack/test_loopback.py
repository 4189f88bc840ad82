"""Another user of the machine, who can dial every port on loopback, is let in nowhere."""

import asyncio
import dataclasses
import json
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from antiphon.cli.worker import worker_credentials
from antiphon.core.config import build_config, dump_config
from antiphon.core.errors import AntiphonError, ConfigError, ContractError, UnavailableError
from antiphon.net.rpc.serving import call, open_channel
from antiphon.net.security.credentials import Credentials
from antiphon.net.security.local_run import ensure_local_credentials, local_bundle, local_credentials
from antiphon.runs.attach import attached, look, run_credentials
from antiphon.runs.supervisor import Supervisor, service_spec
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.learner.client import LearnerClient
from antiphon.weights.rpc import BroadcastClient

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "chain-sum"
RUN_ID = "run-1"
START_S = 200.0
CONFIG = build_config(
    {
        "environment": {"train_size": 32, "heldout_size": 1},
        "evaluation": {"prompts": 1},
        "model": {"path": str(MODEL)},
        "record": {"mlflow": False, "dvc": False},
    }
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / RUN_ID
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(CONFIG))
    (tmp_path / "store").mkdir()
    return folder


@pytest.fixture
def supervisor(run_dir: Path) -> Iterator[Supervisor]:
    found = Supervisor(run_dir, 0, 3600.0, [].append)
    yield found
    found.close()


async def health(address: str, credentials: Credentials | None) -> int:
    """Return what the health service of an address answers; 1 is serving."""
    async with open_channel(address, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await call(stub.Check, health_pb2.HealthCheckRequest(service=""), 20.0)
    return int(reply.status)


ASKS: dict[str, Callable[[str, Credentials | None], Awaitable[object]]] = {
    "coordinator": lambda address, who: asked(CoordinatorClient(address, 20.0, credentials=who)),
    "learner": lambda address, who: asked(LearnerClient(address, credentials=who)),
    "reward": health,
}


async def asked(client: CoordinatorClient | LearnerClient) -> object:
    try:
        return await client.status()
    finally:
        await client.close()


def strangers(run_dir: Path, elsewhere: Path) -> dict[str, Credentials | None]:
    """What someone has who cannot read the run's folder."""
    own, other = ensure_local_credentials(run_dir), ensure_local_credentials(elsewhere)
    assert own.token_file is not None and other.token_file is not None
    return {
        "nothing": None,
        "another run's": other,
        "another run's, and this authority's certificate": dataclasses.replace(
            other, authority=own.authority
        ),
    }


async def turned_away(address: str, ask: Callable[..., Awaitable[object]], who: Credentials | None) -> str:
    with pytest.raises((ContractError, UnavailableError)) as refused:
        await ask(address, who)
    sentence = str(refused.value)
    assert sentence and "\n" not in sentence
    return sentence


@pytest.mark.engine
def test_every_service_of_a_run_refuses_who_cannot_read_its_folder(
    run_dir: Path, supervisor: Supervisor, tmp_path: Path
) -> None:
    place = (RUN_ID, run_dir, tmp_path / "store", "127.0.0.1")
    supervisor.start(service_spec(*place, "coordinator"))
    ports = {"coordinator": supervisor.wait_ready("coordinator", START_S)}
    for name in ("learner", "reward"):
        supervisor.start(service_spec(*place, name, f"127.0.0.1:{ports['coordinator']}"))
    ports |= {name: supervisor.wait_ready(name, START_S) for name in ("learner", "reward")}

    async def attack() -> None:
        own = local_credentials(run_dir)
        for name, port in ports.items():
            address = f"127.0.0.1:{port}"
            for what, who in strangers(run_dir, tmp_path / "elsewhere").items():
                said = await turned_away(address, ASKS[name], who)
                if what == "another run's":
                    assert "do not believe each other's certificates" in said
                if what == "nothing":
                    assert "it may want credentials" in said
                await turned_away(address, health, who)
            assert await health(address, own) == 1
            await ASKS[name](address, own)
        origin = BroadcastClient(f"127.0.0.1:{ports['learner']}")
        with pytest.raises(UnavailableError):
            async for _ in origin.get_chunks("0" * 64, [0]):
                pass
        await origin.close()
        # The folder's owner needs to say nothing; status and void find the bundle by the run.
        found = await look(f"127.0.0.1:{ports['coordinator']}", RUN_ID, run_credentials(run_dir, CONFIG))
        assert found is not None and found.run_id == RUN_ID

    asyncio.run(attack())


def test_a_certificate_without_the_token_is_refused_in_a_sentence(
    run_dir: Path, supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(service_spec(RUN_ID, run_dir, tmp_path / "store", "127.0.0.1", "coordinator"))
    address = f"127.0.0.1:{supervisor.wait_ready('coordinator', START_S)}"
    own = local_credentials(run_dir)
    other = ensure_local_credentials(tmp_path / "elsewhere")
    assert own is not None

    async def attack() -> None:
        for token, sentence in (
            (None, "carries no access token"),
            (other.token_file, "signature is not right"),
        ):
            client = CoordinatorClient(address, 20.0, credentials=dataclasses.replace(own, token_file=token))
            with pytest.raises(ContractError, match=sentence):
                await client.finish()
            await client.close()

    asyncio.run(attack())


def test_the_bundle_is_its_owners_alone_and_can_make_no_other(run_dir: Path) -> None:
    first = ensure_local_credentials(run_dir)
    assert ensure_local_credentials(run_dir) == first  # made once: who joined stays joined
    bundle = local_bundle(run_dir)
    assert first.local and stat.S_IMODE(bundle.stat().st_mode) == 0o700
    assert {path.name for path in bundle.iterdir()} == {
        "ca.pem",
        "cert.pem",
        "key.pem",
        "token",
        "tokens.pub",
    }
    for path in bundle.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [path.name for path in bundle.parent.iterdir()] == ["local"]  # no key of the authority is left
    (bundle / "token").chmod(0o644)
    with pytest.raises(AntiphonError, match="can be read by others"):
        local_credentials(run_dir)


def test_a_worker_finds_the_bundle_by_the_run_and_is_told_when_there_is_none(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    own = ensure_local_credentials(run_dir)
    assert worker_credentials(None, RUN_ID, "127.0.0.1:1") == own
    assert worker_credentials(local_bundle(run_dir), "", "127.0.0.1:1").token_file == own.token_file
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 lets no one in without .*--run RUN"):
        worker_credentials(None, "", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"there is no run another of yours .*127\.0\.0\.1:1; give --cred"):
        worker_credentials(None, "another", "127.0.0.1:1")


def test_nothing_is_served_of_a_resting_run_that_is_looked_at(run_dir: Path) -> None:
    def listening() -> set[int]:
        found = psutil.Process().net_connections("tcp")
        return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}

    async def ask() -> None:
        before = listening()
        async with attached(run_dir) as (coordinator, running):
            assert not running and (await coordinator.status()).run_id == RUN_ID
            assert listening() == before

    asyncio.run(ask())


def test_a_port_that_went_to_another_program_is_no_coordinator(run_dir: Path, tmp_path: Path) -> None:
    """A crashed coordinator's port can be taken by anyone: they learn nothing and are not believed."""
    ensure_local_credentials(run_dir)
    heard: list[str] = []

    async def listen(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        heard.append(str(context.invocation_metadata()))
        return b""

    async def attack() -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(listen)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("antiphon.Coordinator", {"Status": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        (run_dir / "services").mkdir()
        (run_dir / "services" / "coordinator.json").write_text(json.dumps({"pid": 1, "port": port}))
        async with attached(run_dir) as (_, running):
            assert not running
        await server.stop(0)

    asyncio.run(attack())
    assert heard == []
