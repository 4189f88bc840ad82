"""worker: join a run from this machine with one command; it dials out, and may hand weights on."""

import asyncio
import os
import re
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.cli.arguments import check_address, credentials_folder
from antiphon.core.errors import ConfigError
from antiphon.core.trust.worker_names import WORKER_NAME
from antiphon.runs.directory import home_directory

if TYPE_CHECKING:
    from antiphon.net.security.credentials import Credentials


def worker(
    *,
    coordinator: str,
    name: str = "",
    run: str = "",
    work_dir: Path | None = None,
    threads: int | None = None,
    ready_file: Path | None = None,
    credentials: Path | None = None,
    relay_address: str = "",
    check: bool = False,
) -> int:
    """Join a run from this machine and sample for it.

    It samples until the run is finished, whose configuration comes from the coordinator.

    Args:
        coordinator: HOST:PORT of the run's coordinator.
        name: name of the worker, unique in the run; by default that of its certificate, or, with the
            credentials of the run's owner, made from the host and process.
        run: the run it means to serve; by default the one that the coordinator serves.
        work_dir: folder for weights on their way; by default workers/NAME in the home directory.
        threads: CPU threads of the engine; by default OMP_NUM_THREADS, else 1.
        ready_file: file that gets {"pid", "port"} once the worker can sample.
        credentials: folder with the worker's certificate and token; by default ANTIPHON_CREDENTIALS, else
            that of the run which --run names, where it runs on this machine and is yours.
        relay_address: HOST:PORT at which other workers reach this one and take weights from it; it listens
            on PORT. The credentials must name HOST (`antiphon invite --relay-host`). By default none does.
        check: register, leave, and say so, instead of sampling: whether a worker here would be let in.
    """
    check_address(coordinator, "--coordinator")
    if relay_address:
        check_address(relay_address, "--relay-address")
    if name and not WORKER_NAME.fullmatch(name):
        raise ConfigError(f"--name {name} is not possible; use letters, digits, dot, dash, underscore")
    from antiphon.services.rollout.engine.environment import child_environment

    inherited = os.environ.get("OMP_NUM_THREADS", "")
    wanted = threads if threads is not None else int(inherited) if inherited.isdigit() else 1
    if (environment := child_environment(wanted)) != dict(os.environ):
        sys.stdout.flush()  # started again as the engine needs it, with the same name: the process stays
        os.execve(
            sys.executable, [sys.executable, "-P", "-m", "antiphon.cli.app", *sys.argv[1:]], environment
        )
    from antiphon.services.rollout.process import greet_coordinator, serve_worker
    from antiphon.system.processes import run_service, write_ready_file

    ready = partial(write_ready_file, ready_file, 0)
    bundle = worker_credentials(credentials, run, coordinator)
    name = name_in(bundle, name)
    work_dir = work_dir or home_directory() / "workers" / name
    if check:
        print(asyncio.run(greet_coordinator(coordinator, name, run, bundle)))
        return 0
    work_dir.mkdir(parents=True, exist_ok=True)
    start = partial(serve_worker, coordinator, name, run, work_dir, ready, relay_address=relay_address)
    return run_service(lambda stop: start(credentials=bundle, stop=stop))


def name_in(bundle: "Credentials", given: str) -> str:
    """Return the name that a worker has by its bundle.

    Raises:
        ConfigError: when another one is given: the bundle speaks for one worker alone.
    """
    from antiphon.net.security.certificates import bearer_of
    from antiphon.net.security.credentials import SERVICES_NAME

    own = bearer_of(bundle.certificate)
    if own == SERVICES_NAME:  # the run's owner may start as many as wanted
        host = re.sub("[^A-Za-z0-9._-]", "-", socket.gethostname())[:48] or "host"
        return given or f"{host}-{os.getpid()}"
    if given and given != own:
        raise ConfigError(
            f"--name {given} is not that of the credentials, which are those of worker {own}; leave it out, "
            f"or make a bundle by `antiphon invite {given}`"
        )
    return own


def worker_credentials(given: Path | None, run: str, coordinator: str) -> "Credentials":
    """Read the bundle that an option or ANTIPHON_CREDENTIALS names, else that of a run of this home.

    Raises:
        ConfigError: when there is none, since no coordinator lets anyone in without, or it cannot be read.
    """
    from antiphon.net.security.credentials import find_credentials
    from antiphon.net.security.local_run import local_credentials

    bundle = find_credentials(credentials_folder(given))
    if bundle is None and run:
        bundle = local_credentials(home_directory() / "runs" / run)
        if bundle is None:
            raise ConfigError(
                f"there is no run {run} of yours under {home_directory() / 'runs'}, whose credentials "
                f"would open the coordinator at {coordinator}; give --credentials FOLDER, or one of "
                "`antiphon runs`"
            )
    if bundle is None:
        raise ConfigError(
            f"the coordinator at {coordinator} lets no one in without credentials; give --credentials FOLDER "
            "or ANTIPHON_CREDENTIALS, or --run RUN for a run of your own on this machine"
        )
    return bundle
