"""serve: one service alone, in the foreground, until it is asked to stop.

The main job starts the same commands for itself; by hand they make a run whose parts live on
different machines or under another supervisor.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App, Parameter

from antiphon.cli.arguments import check_address, credentials_folder
from antiphon.cli.verbs import words_of
from antiphon.core.errors import ConfigError
from antiphon.runs.directory import home_directory, store_directory
from antiphon.system.collecting import collect_seldom

if TYPE_CHECKING:
    from antiphon.core.config import RunConfig

app = App(
    name="serve",
    **words_of("serve"),
    help="Run one service in the foreground: coordinator, learner or reward.",
)


@Parameter(name="*")
@dataclass(frozen=True)
class ServiceFlags:
    """Where a service finds its run and where it listens."""

    config: Path
    """The run's configuration file."""
    run_id: str = ""
    """The run's id; by default the name in the configuration."""
    run_dir: Path | None = None
    """The run's folder; by default runs/RUN_ID in the home directory."""
    store: Path | None = None
    """Root of the artifact store; by default store in the home directory."""
    coordinator: str = ""
    """HOST:PORT of the run's coordinator; the learner and the reward service need it."""
    host: str = ""
    """Address to listen on; by default services.host of the configuration."""
    port: int | None = None
    """Port to listen on, 0 for a free one; by default what the configuration says, else 0."""
    ready_file: Path | None = None
    """File that gets {"pid", "port"} once the service can work."""
    credentials: Path | None = None
    """Folder with the services' certificate and token; by default services.credentials, else
    ANTIPHON_CREDENTIALS, else keys/local in the run's folder, which is made, on loopback alone."""


@app.command
def coordinator(*, flags: ServiceFlags, wait_for_journal: bool = False) -> int:
    """Hand out work, keep the journal, assemble batches.

    Args:
        wait_for_journal: while the journal cannot be opened, since its disk is full or its database is
            away, say so to every caller and try again for services.outage_timeout_s.
    """
    collect_seldom()  # while everything is imported
    from antiphon.core.config import load_config
    from antiphon.services.coordinator.server import serve_coordinator

    config = load_config(flags.config)
    run_id, run_dir, store = _place(flags, config)
    store.mkdir(parents=True, exist_ok=True)
    port = config.services.coordinator_port if flags.port is None else flags.port
    start = partial(serve_coordinator, config, run_id, run_dir, store, wait_for_journal=wait_for_journal)
    return _serve(flags, config, port, start, run_dir)


@app.command
def learner(*, flags: ServiceFlags) -> int:
    """Train on sealed batches and publish policy versions."""
    collect_seldom()
    from antiphon.core.config import load_config

    config = load_config(flags.config)
    address = _coordinator(flags, "learner")
    run_id, run_dir, store = _place(flags, config)

    from antiphon.net.security.credentials import learner_signer
    from antiphon.services.learner.server import serve_learner
    from antiphon.system.processes import write_starting_file

    folder = credentials_folder(flags.credentials, config)
    signer = learner_signer(run_dir, None if folder is None else Path(folder))
    start = partial(
        serve_learner,
        config,
        run_id,
        run_dir,
        store,
        address,
        signer=signer,
        starting=lambda found: write_starting_file(flags.ready_file, found.doing, found.counter),
    )
    return _serve(flags, config, flags.port or 0, start, run_dir)


@app.command
def reward(*, flags: ServiceFlags) -> int:
    """Reward finished groups with the run's environment."""
    collect_seldom()
    from antiphon.core.config import load_config

    config = load_config(flags.config)
    address = _coordinator(flags, "reward")

    from antiphon.services.reward.server import serve_reward

    run_id, run_dir, _ = _place(flags, config)
    return _serve(flags, config, flags.port or 0, partial(serve_reward, config, run_id, address), run_dir)


def _place(flags: ServiceFlags, config: "RunConfig") -> tuple[str, Path, Path]:
    """Return the run's id, its folder, which is made, and the root of the artifact store."""
    run_id = flags.run_id or config.run.name
    run_dir = flags.run_dir or home_directory() / "runs" / run_id
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_id, run_dir, flags.store or store_directory(home_directory())


def _serve(
    flags: ServiceFlags,
    config: "RunConfig",
    port: int,
    start: Callable[..., Coroutine[Any, Any, None]],
    run_dir: Path,
) -> int:
    from antiphon.net.rpc.serving import check_host
    from antiphon.net.security.credentials import find_credentials
    from antiphon.net.security.local_run import ensure_local_credentials
    from antiphon.system.processes import run_service, write_ready_file

    host = flags.host or config.services.host
    credentials = find_credentials(credentials_folder(flags.credentials, config))
    if credentials is None:
        check_host(host)
        credentials = ensure_local_credentials(run_dir, [host])
    return run_service(
        lambda stop: start(
            host=host,
            port=port,
            ready=partial(write_ready_file, flags.ready_file),
            credentials=credentials,
            stop=stop,
        )
    )


def _coordinator(flags: ServiceFlags, service: str) -> str:
    if not flags.coordinator:
        raise ConfigError(
            f"serve {service} needs --coordinator HOST:PORT, the address of the run's coordinator"
        )
    return check_address(flags.coordinator, "--coordinator")
