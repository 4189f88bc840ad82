"""serve: one service alone, in the foreground, until it is asked to stop.

The main job starts the same commands for itself; by hand they make a run whose parts live on
different machines or under another supervisor.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

from antiphon.cli.arguments import check_address, credentials_folder
from antiphon.core.errors import ConfigError
from antiphon.runs.directory import home_directory, store_directory
from antiphon.system.collecting import collect_seldom
from antiphon.system.rank_places import check_place


def serve(
    service: Literal["coordinator", "learner", "reward", "scorer"],
    /,
    *,
    config: Path,
    run_id: str = "",
    run_dir: Path | None = None,
    store: Path | None = None,
    coordinator: str = "",
    scorer: str = "",
    host: str = "",
    port: int | None = None,
    ready_file: Path | None = None,
    credentials: Path | None = None,
    wait_for_journal: bool = False,
) -> int:
    """Run one service in the foreground: coordinator, learner, reward or scorer.

    Args:
        service: the coordinator hands out work, keeps the journal and assembles batches; the learner trains
            on them and publishes policy versions; reward rewards finished groups with the environment; the
            scorer says how probable tokens are under the reference model.
        config: the run's configuration file.
        run_id: the run's id; by default the name in the configuration.
        run_dir: the run's folder; by default runs/RUN_ID in the home directory.
        store: root of the artifact store; by default store in the home directory.
        coordinator: HOST:PORT of the run's coordinator; the learner and the reward service need it.
        scorer: HOST:PORT of the run's scorer; the reward service of a run with a reference model needs it.
        host: address to listen on; by default services.host of the configuration.
        port: port to listen on, 0 for a free one; by default what the configuration says, else 0.
        ready_file: file that gets {"pid", "port"} once the service can work.
        credentials: folder with the services' certificate and token; by default services.credentials, else
            ANTIPHON_CREDENTIALS, else keys/local in the run's folder, which is made, on loopback alone.
        wait_for_journal: while the coordinator's journal cannot be opened, since its disk is full or its
            database is away, say so to every caller and try again for services.outage_timeout_s.
    """
    collect_seldom()  # while everything is imported
    from antiphon.core.config import load_config

    resolved = load_config(config)
    if service != "coordinator":
        if wait_for_journal:
            raise ConfigError(f"serve {service} has no journal; leave --wait-for-journal out")
        if not coordinator and service != "scorer":
            raise ConfigError(
                f"serve {service} needs --coordinator HOST:PORT, the address of the run's coordinator"
            )
        if coordinator:
            check_address(coordinator, "--coordinator")
        if scorer:
            check_address(scorer, "--scorer")
        elif service == "reward" and resolved.reference.own_process:
            raise ConfigError(
                "serve reward needs --scorer HOST:PORT, the address of the run's scorer, since reference.kl "
                "or reference.distillation is set"
            )
    run_id = run_id or resolved.run.name
    run_dir = run_dir or home_directory() / "runs" / run_id
    run_dir.mkdir(parents=True, exist_ok=True)
    store, folder = store or store_directory(home_directory()), credentials_folder(credentials, resolved)
    start: Any
    if service == "coordinator":
        from antiphon.services.coordinator.server import serve_coordinator

        store.mkdir(parents=True, exist_ok=True)
        port = resolved.services.coordinator_port if port is None else port
        start = partial(
            serve_coordinator, resolved, run_id, run_dir, store, wait_for_journal=wait_for_journal
        )
    elif service == "learner" and check_place(resolved):
        from antiphon.services.learner.ranks.follower import follow

        return follow(resolved, run_dir / "checkpoints", store)
    elif service == "learner":
        from antiphon.net.security.credentials import learner_signer
        from antiphon.services.learner.server import serve_learner
        from antiphon.system.processes import write_starting_file

        start = partial(
            serve_learner,
            *(resolved, run_id, run_dir, store, coordinator),
            signer=learner_signer(run_dir, None if folder is None else Path(folder)),
            starting=lambda found: write_starting_file(ready_file, found.doing, found.counter),
        )
    elif service == "scorer":
        from antiphon.services.scorer.server import serve_scorer

        start = partial(serve_scorer, resolved, run_id)
    else:
        from antiphon.services.reward.server import serve_reward

        start = partial(serve_reward, resolved, run_id, coordinator, run_dir=run_dir, scorer_address=scorer)
    from antiphon.net.rpc.serving import check_host
    from antiphon.net.security.credentials import find_credentials
    from antiphon.net.security.local_run import ensure_local_credentials
    from antiphon.system.processes import run_service, write_ready_file

    host, bundle = host or resolved.services.host, find_credentials(folder)
    if bundle is None:
        check_host(host)
        bundle = ensure_local_credentials(run_dir, [host])
    ready = partial(write_ready_file, ready_file)
    return run_service(
        lambda stop: start(host=host, port=port or 0, ready=ready, credentials=bundle, stop=stop)
    )
