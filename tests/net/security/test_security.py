"""Who may do what: certificates and tokens are asked for, and a refusal changes nothing (fault F14)."""

import asyncio
import dataclasses
import stat
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.coordinator.loop_state import LoopState
from antiphon.core.errors import ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.records import FinishReason, PartialTrajectory, VersionSpan
from antiphon.core.requests import LeaseRequest, TurnRequest, WorkerHeartbeat
from antiphon.core.trust.access_tokens import Denial, Refusal, Scope
from antiphon.net.rpc.serving import open_channel, start_server
from antiphon.net.security.certificates import check_dates, ensure_authority, issue
from antiphon.net.security.credentials import Credentials, load_credentials
from antiphon.net.security.guard import SCOPE_OF, WORKER_NAMED_IN, Caller, Guard, GuardLimits, Rate
from antiphon.net.security.keys import LEARNER_KEY, load_key, write_private
from antiphon.protos import (
    broadcast_pb2,
    coordinator_pb2,
    learner_pb2,
    records_pb2,
    reward_pb2,
    rollout_pb2,
    scorer_pb2,
)
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.system.clock import wall_clock
from antiphon.weights.signature import sign_manifest
from tests.support.light_parties import hello, sample_lease
from tests.support.loop_model import RUN_ID, light_manifest, make_config
from tests.support.secured import House, SecuredSite, make_house, secured

CONFIG = make_config(steps=4, max_staleness=0, filter_="none")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return make_house(tmp_path_factory.mktemp("home") / "keys", ["w", "other"])


def serve_and(tmp_path: Path, house: House, act: Callable[[SecuredSite], Awaitable[None]]) -> None:
    async def run() -> None:
        async with secured(CONFIG, tmp_path, house) as site, asyncio.timeout(60.0):
            await act(site)

    asyncio.run(run())


def altered(token: str) -> str:
    head, claims, signature = token.split(".")
    return ".".join((head, claims[:-4] + ("AAAA" if claims[-4:] != "AAAA" else "BBBB"), signature))


REFUSED: dict[str, tuple[Callable[[House], Credentials], str]] = {
    "expired": (lambda h: h.worker("w", expires_at=1_000_000), "expired .* ago"),
    "other run": (lambda h: h.worker("w", run_id="run-2"), "is for run run-2"),
    "other worker's": (lambda h: with_token(h, "w", h.token("other")), "the certificate names w"),
    "too narrow": (lambda h: h.worker("w", scopes=(Scope.PULL,)), "needs scope lease"),
    "altered": (lambda h: with_token(h, "w", altered(h.token("w"))), "signature is not right"),
    "no token": (lambda h: dataclasses.replace(h.worker("w"), token_file=None), "carries no access token"),
    "no form": (lambda h: with_token(h, "w", "eyJ.x"), "this is no access token"),
    "huge": (lambda h: with_token(h, "w", "eyJ." + "A" * 4000 + ".AA"), "this is no access token"),
}


def with_token(house: House, name: str, text: str) -> Credentials:
    write_private(house.keys / "workers" / name / "token", text.encode())
    return load_credentials(house.keys / "workers" / name)


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_tokens_are_refused_in_a_sentence(tmp_path: Path, house: House, case: str) -> None:
    make, words = REFUSED[case]

    async def act(site: SecuredSite) -> None:
        before = site.state_machine.journal.empty, dict(site.state_machine.state.registrations)
        with pytest.raises(ContractError, match=words):
            await site.client(make(house)).register(hello("w"))
        assert (site.state_machine.journal.empty, site.state_machine.state.registrations) == before
        assert not site.state_machine.loop.fleet.living()

    serve_and(tmp_path, house, act)


def test_strangers_to_the_authority_are_refused(tmp_path: Path, house: House) -> None:
    stranger = make_house(tmp_path / "elsewhere")

    async def act(site: SecuredSite) -> None:
        with pytest.raises(ContractError, match="do not believe each other's certificates"):
            await site.client(stranger.worker("w")).register(hello("w"))
        # Believing the services but not believed by them: they hang up without a word.
        impostor = dataclasses.replace(stranger.worker("w"), authority=house.services.authority)
        with pytest.raises((ContractError, UnavailableError)):
            await site.client(impostor).register(hello("w"))
        with pytest.raises(UnavailableError):  # no TLS at all
            await CoordinatorClient(site.address, timeout_s=3.0).register(hello("w"))
        assert not site.state_machine.loop.fleet.living()

    serve_and(tmp_path, house, act)


def test_an_address_that_the_certificate_does_not_name_is_said_at_once(tmp_path: Path) -> None:
    house = make_house(tmp_path / "keys")
    issue(house.keys, house.keys / "services", "services", ["elsewhere.example"], 1, datetime.now(UTC))

    async def act(site: SecuredSite) -> None:
        with pytest.raises(ContractError, match="an address that the services' certificate names"):
            await site.client(house.worker("w")).register(hello("w"))

    serve_and(tmp_path, house, act)


def test_a_worker_speaks_for_itself_alone(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite) -> None:
        worker = site.client(house.worker("w"))
        with pytest.raises(ContractError, match="speaks for 'boss'"):
            await worker.register(hello("boss"))
        await worker.register(hello("w"))
        with pytest.raises(ContractError, match="speaks for 'other'"):
            await worker.heartbeat(WorkerHeartbeat("other-1", None, None, (), 0, 0.0, 0.0))
        for call in (worker.finish(), worker.status(), worker.pause("x"), worker.open_step(0)):
            with pytest.raises(ContractError, match="needs scope admin"):
                await call
        state = site.state_machine.state
        assert not state.finished and not state.paused_reason and not state.opened_steps

    serve_and(tmp_path, house, act)


def test_a_whole_lease_over_tls_and_its_quota(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite) -> None:
        flow, worker = site.client(house.services), site.client(house.worker("w", max_leases=3))
        learner_key = load_key(house.keys / "services", LEARNER_KEY)
        with pytest.raises(IntegrityError, match="is not signed"):
            await flow.announce_snapshot(light_manifest(0))
        await flow.announce_snapshot(sign_manifest(light_manifest(0), learner_key))
        await flow.open_step(0)
        welcome = await worker.register(hello("w"))
        assert welcome.learner_key == house.services.learner_key == learner_key.public
        manifest = await worker.latest_manifest(0)
        assert manifest is not None and manifest.signature
        first = await worker.lease_group(LeaseRequest(welcome.worker_id, 0, 8, 5.0))
        assert len(first.leases) == 3  # the token allows no more
        again = await worker.lease_group(LeaseRequest(welcome.worker_id, 0, 8, 0.0))
        assert not again.leases
        submission = sample_lease(first.leases[0], welcome.worker_id, 0)
        assert (await worker.submit_group(submission)).value == "accepted"

    serve_and(tmp_path, house, act)


def test_requests_that_wait_together_share_one_quota(tmp_path: Path, house: House) -> None:
    async def act(site: SecuredSite) -> None:
        flow, worker = site.client(house.services), site.client(house.worker("w", max_leases=2))
        learner_key = load_key(house.keys / "services", LEARNER_KEY)
        await flow.announce_snapshot(sign_manifest(light_manifest(0), learner_key))
        worker_id = (await worker.register(hello("w"))).worker_id
        calls = [worker.lease_group(LeaseRequest(worker_id, 0, 2, 4.0)) for _ in range(20)]
        asked = [asyncio.ensure_future(call) for call in calls]
        while site.state_machine.loop.fleet.named("w")[0].max_leases is None:  # the first of them arrived
            await asyncio.sleep(0.01)
        await flow.open_step(0)
        replies = await asyncio.gather(*asked)
        assert sum(len(reply.leases) for reply in replies) == 2
        assert site.state_machine.loop.leases.count_of_worker(worker_id) == 2

    serve_and(tmp_path, house, act)


def test_revocation_counts_at_once_and_survives_a_restart(tmp_path: Path, house: House) -> None:
    token_id = "ab" * 16

    async def act(site: SecuredSite) -> None:
        flow, worker = site.client(house.services), site.client(house.worker("w", token_id=token_id))
        await worker.register(hello("w"))
        await flow.revoke(token_id, "left the team")
        with pytest.raises(ContractError, match="was revoked"):
            await worker.register(hello("w"))
        await site.client(house.worker("w")).register(hello("w"))  # a new token is as good as new
        await flow.revoke("other", "cheated")
        with pytest.raises(ContractError, match="other was excluded"):
            await site.client(house.worker("other")).register(hello("other"))
        with pytest.raises(ContractError, match="neither a token's id nor a worker's name"):
            await flow.revoke("../x", "")

    serve_and(tmp_path, house, act)

    async def after(site: SecuredSite) -> None:
        assert set(site.state_machine.state.revoked) == {token_id, "other"}
        with pytest.raises(ContractError, match="was revoked"):
            await site.client(house.worker("w", token_id=token_id)).register(hello("w"))

    serve_and(tmp_path, house, after)


def test_nothing_but_loopback_goes_unencrypted(tmp_path: Path) -> None:
    async def start() -> None:
        await start_server("0.0.0.0", 0, lambda server: None, [])

    with pytest.raises(
        ConfigError, match=r"services.host=0.0.0.0 would serve without encryption.*antiphon invite"
    ):
        asyncio.run(start())

    async def dial() -> None:
        open_channel("far.example:7700")

    with pytest.raises(ConfigError, match="would be spoken to without encryption; give credentials"):
        asyncio.run(dial())


def test_secrets_are_their_owners_alone(house: House) -> None:
    for path in house.keys.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir() or path.suffix == ".key" or path.name in ("key.pem", "token"):
            assert not mode & 0o077, f"{path} has mode {mode:04o}"
    leaky = house.keys / "workers" / "other"
    (leaky / "key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        load_credentials(leaky)
    (leaky / "key.pem").chmod(0o600)


def test_every_rpc_has_a_scope() -> None:
    found = {
        f"/{service.full_name}/{method.name}"
        for module in (coordinator_pb2, broadcast_pb2, learner_pb2, reward_pb2, scorer_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert found == set(SCOPE_OF)


def denial_of(call: Callable[[], object]) -> Denial | None:
    """Return in which way a guard refuses; None where it does not."""
    try:
        call()
    except Refusal as refusal:
        return refusal.denial
    return None


def test_every_request_of_a_worker_says_for_whom_it_speaks(house: House) -> None:
    asked = {
        method.input_type.full_name
        for module in (coordinator_pb2, broadcast_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if SCOPE_OF[f"/{service.full_name}/{method.name}"] is not Scope.ADMIN
    }
    assert asked <= {kind.DESCRIPTOR.full_name for kind in WORKER_NAMED_IN}
    public = house.services.token_key
    assert public is not None
    guard = Guard(public, RUN_ID, wall_clock, lambda: 0.0)
    unknown = coordinator_pb2.StepRequest(step=0)
    caller = guard.enter("/antiphon.Coordinator/Register", f"Bearer {house.token('w')}", {"w"})
    assert isinstance(caller, Caller)
    assert denial_of(lambda: guard.admit(caller, unknown)) is Denial.FORBIDDEN
    fetching = guard.enter("/antiphon.Broadcast/GetBlocks", f"Bearer {house.token('w')}", {"w"})
    assert isinstance(fetching, Caller)
    assert denial_of(lambda: guard.admit(fetching, broadcast_pb2.BlocksRequest())) is None


def test_a_flood_is_slowed_and_others_are_not(house: House) -> None:
    seconds = [0.0]
    often = Rate(9.0, 99.0)
    limits = GuardLimits(Rate(2.0, 10.0), Rate(100.0, 1000.0), registrations=often, releases=often)
    public = house.services.token_key
    assert public is not None
    guard = Guard(public, RUN_ID, wall_clock, lambda: seconds[0], limits)
    hello_w = rollout_pb2.WorkerHello(worker_name="w")

    def ask(name: str, message: rollout_pb2.WorkerHello = hello_w) -> Denial | None:
        def call() -> None:
            found = guard.enter("/antiphon.Coordinator/Register", f"Bearer {house.token(name)}", {name})
            assert isinstance(found, Caller)
            guard.leave(found)
            guard.weigh(found, message.ByteSize())
            guard.admit(found, message)

        return denial_of(call)

    answers = [ask("w") for _ in range(15)]
    assert answers == [None] * 10 + [Denial.BUSY] * 5
    assert ask("other", rollout_pb2.WorkerHello(worker_name="other")) is None
    seconds[0] = 1.0  # two more were filled in
    assert [ask("w") for _ in range(3)] == [None, None, Denial.BUSY]
    seconds[0] = 60.0
    heavy = rollout_pb2.WorkerHello(worker_name="w", run_id="x" * 900)
    assert [ask("w", heavy), ask("w", heavy)] == [None, Denial.BUSY]


def test_a_message_counts_as_the_requests_that_it_holds(house: House) -> None:
    seconds = [0.0]
    often = Rate(9.0, 99.0)
    limits = GuardLimits(Rate(2.0, 10.0), often, registrations=often, releases=often)
    public = house.services.token_key
    assert public is not None
    guard = Guard(public, RUN_ID, wall_clock, lambda: seconds[0], limits)
    stream = guard.enter("/antiphon.Coordinator/Work", f"Bearer {house.token('w')}", {"w"})  # one of the ten
    assert isinstance(stream, Caller)
    lease = rollout_pb2.WorkRequest(lease=rollout_pb2.LeaseRequest(worker_id="w-1"))

    def ask(count: int) -> Denial | None:
        return denial_of(lambda: guard.admit(stream, rollout_pb2.WorkRequests(requests=[lease] * count)))

    assert [ask(6), ask(1), ask(6)] == [None, None, Denial.BUSY]
    seconds[0] = 2.0
    assert ask(6) is None


def test_turns_beyond_their_rate_slow_their_worker_and_cost_it_no_requests(house: House) -> None:
    seconds, places = [0.0], {"w-1": 2}
    often = Rate(9.0, 99.0)
    limits = GuardLimits(Rate(2.0, 10.0), often, registrations=often, releases=often, turns=Rate(5.0, 10.0))
    public = house.services.token_key
    assert public is not None
    guard = Guard(public, RUN_ID, wall_clock, lambda: seconds[0], limits, places_of=lambda w: places[w])
    stream = guard.enter("/antiphon.Coordinator/Work", f"Bearer {house.token('w')}", {"w"})
    assert isinstance(stream, Caller)
    turn = rollout_pb2.WorkRequest(turn=rollout_pb2.TurnRequest(worker_id="w-1"))
    lease = rollout_pb2.WorkRequest(lease=rollout_pb2.LeaseRequest(worker_id="w-1"))

    def ask(*requests: rollout_pb2.WorkRequest) -> float:
        return guard.admit(stream, rollout_pb2.WorkRequests(requests=requests))

    assert [ask(*[turn] * 10), ask(*[turn] * 10), ask(turn, turn)] == [0.0, 0.0, pytest.approx(0.2)]
    seconds[0] = 1.0
    assert [ask(*[turn] * 8), ask(*[turn] * 10)] == [0.0, pytest.approx(1.0)]
    assert ask(*[lease] * 9, turn) > 1.0
    assert denial_of(lambda: ask(*[lease] * 9)) is Denial.BUSY
    places["w-1"] = 0  # its leases have ended
    assert ask(*[turn] * 10) > 2.0


def ended_turn() -> PartialTrajectory:
    tokens, spans = np.array([5, 6], dtype=np.int32), (VersionSpan(0, 0, 2),)
    return PartialTrajectory(tokens, np.zeros(2, dtype=np.float32), spans, FinishReason.STOP, sample_index=0)


def test_many_turns_at_once_break_no_stream(
    tmp_path: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopState, "places_of", lambda self, worker_id: 64)

    async def act(site: SecuredSite) -> None:
        client = site.client(house.worker("w"))
        worker_id = (await client.register(hello("w"))).worker_id
        asked = TurnRequest(worker_id, "no-lease", ended_turn(), 0.0)
        for _ in range(3):  # more than a worker's requests, and no more at once than a stream carries
            replies = await asyncio.gather(*(client.answer_turn(asked) for _ in range(200)))
            assert all(reply.cancelled for reply in replies)

    serve_and(tmp_path, house, act)


def test_each_request_of_a_stream_is_judged_by_itself(house: House) -> None:
    public = house.services.token_key
    assert public is not None
    told: list[tuple[str, int]] = []
    guard = Guard(public, RUN_ID, wall_clock, lambda: 0.0, note_quota=lambda *quota: told.append(quota))
    bearer = f"Bearer {house.token('w', scopes=(Scope.LEASE,), max_leases=5)}"

    stream = guard.enter("/antiphon.Coordinator/Work", bearer, {"w"})
    assert isinstance(stream, Caller)

    def ask(*requests: rollout_pb2.WorkRequest) -> Denial | None:
        message = rollout_pb2.WorkRequests(requests=requests)
        denial = denial_of(lambda: guard.admit(stream, message))
        for told, rewarded in zip(requests, message.requests, strict=True):
            told.CopyFrom(rewarded)
        return denial

    assert ask() is None
    lease = rollout_pb2.WorkRequest(lease=rollout_pb2.LeaseRequest(worker_id="w-1", groups=8))
    assert ask(lease) is None and told == [("w-1", 5)]  # which is checked when they are granted
    first = rollout_pb2.WorkRequest(lease=rollout_pb2.LeaseRequest(worker_id="w-1", groups=1))
    second = rollout_pb2.WorkRequest(lease=rollout_pb2.LeaseRequest(worker_id="w-1", groups=8))
    assert ask(first, second) is None and told == [("w-1", 5)] * 3
    other = rollout_pb2.WorkRequest(lease=rollout_pb2.LeaseRequest(worker_id="v-1", groups=1))
    assert ask(other) is Denial.FORBIDDEN and len(told) == 3
    stranger = rollout_pb2.WorkRequest(heartbeat=rollout_pb2.WorkerHeartbeat(worker_id="v-1"))
    assert ask(stranger) is Denial.FORBIDDEN and ask(first, stranger) is Denial.FORBIDDEN
    assert ask(rollout_pb2.WorkRequest(submission=records_pb2.GroupSubmission())) is Denial.FORBIDDEN


def test_a_service_that_dies_while_encryption_is_agreed_on_is_away(house: House) -> None:
    """No repetition would fix certificates that are not believed; a service that was killed comes back."""

    async def attack() -> None:
        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.transport.abort()

        server = await asyncio.start_server(die, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = CoordinatorClient(address, timeout_s=10.0, credentials=house.services)
        with pytest.raises(UnavailableError):
            await client.status()
        await client.close()
        server.close()

    asyncio.run(attack())


def test_a_certificate_that_does_not_hold_by_this_clock_is_named(tmp_path: Path) -> None:
    now = datetime(2026, 5, 1, 12, tzinfo=UTC)
    ensure_authority(tmp_path, now)
    issue(tmp_path, tmp_path / "w", "w", [], 2, now)
    path = tmp_path / "w" / "cert.pem"
    check_dates(path, now)
    with pytest.raises(ConfigError, match=r"holds from 2026-05-01 .*clock .* says 2026-05-01 09:00"):
        check_dates(path, now - timedelta(hours=3))
    with pytest.raises(ConfigError, match=r"held until 2026-05-03 .*renew it with `antiphon invite`"):
        check_dates(path, now + timedelta(days=3))
