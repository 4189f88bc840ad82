"""Launcher: the port behind which an engine starts, lists and stops the workers of one class of the pool.

An order is a worker's name within a run: giving it again changes nothing, since the engine knows the instance
by the label of the run and that name. What is there is asked of the engine, so that a continued run takes up
what an earlier process of it had started. How many workers are wanted is never decided here, nor is an order
ever repeated here; where a worker runs, and when, is the engine's to say. Every call may take long: who calls
bounds it.
"""

import io
import secrets
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from antiphon.core.capacity.order_book import Instance
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.net.security.credentials import SERVICES_NAME
from antiphon.system.files import write_atomically

LABEL_FILE = "fleet.label"
"""In a run's folder: what its instances are known by in engines that others use too."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for: one worker of one run."""

    worker: str
    """Its name: CLASS-ORDINAL."""
    arguments: tuple[str, ...]
    """Of the antiphon command, without --credentials and --work-dir, which depend on the machine."""
    bundle: Path
    """Folder on this machine with its certificate, key and token; it reaches the worker and no one else."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the worker's process needs; nothing secret."""

    @property
    def ordinal(self) -> int:
        """Return the worker's number within its class."""
        return int(self.worker.rpartition("-")[2])

    def line(self, command: str, bundle: str, work_dir: str) -> str:
        """Return the line of shell that becomes the worker; `bundle` and `work_dir` are places there,
        already quoted as the shell needs them."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words = ["exec", "env", *variables, command, *map(shlex.quote, self.arguments)]
        return " ".join([*words, "--credentials", bundle, "--work-dir", work_dir])


class Launcher(Protocol):
    """Starts, lists and stops the workers of one class in one engine.

    Every method raises an AntiphonError with one sentence, the engine's own words in it: ConfigError where
    the engine is not installed or refuses for good, UnavailableError where it does not answer.
    """

    async def start(self, order: Order) -> Instance:
        """Have a worker started, unless it is there already, and return what the engine knows of it."""
        ...

    async def running(self) -> tuple[Instance, ...]:
        """Return the instances of this class and run that are there or waited for, ordered or not."""
        ...

    async def stop(self, worker: str, grace_s: float) -> None:
        """Have a worker asked to leave (SIGTERM) and killed `grace_s` seconds later; nothing for one that is
        not there. It returns once the engine has taken that in."""
        ...

    async def missing(self) -> list[str]:
        """Return what the engine lacks for this class, in sentences; nothing is started."""
        ...

    def render(self, order: Order) -> dict[str, str]:
        """Return what would be submitted: names of files and their texts, without a secret."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchSite:
    """What a run's launchers share."""

    run_id: str
    label: str
    """What its instances are known by: the run's name and a random part, since two may use one cluster."""
    address: str
    """HOST:PORT at which workers reach the coordinator."""
    bundles: Path | None
    """Folder with the bundle of each worker; None where the run made its credentials for itself."""
    config: RunConfig

    def order(self, worker: str) -> Order:
        """Return the order of a worker, whose bundle is there.

        Raises:
            ConfigError: when it has none.
        """
        order = self.draft(worker)
        again = f"`antiphon invite --pool {worker.rpartition('-')[0]} --count N --run {self.run_id}`"
        if self.bundles is None:
            raise ConfigError(
                f"worker {worker} is started elsewhere and needs a certificate, which "
                "services.credentials=null does not make; give services.credentials the bundle "
                f"keys/services, and {again} makes those of workers"
            )
        if not (order.bundle / "token").is_file():
            raise ConfigError(
                f"worker {worker} has no bundle with a token in {order.bundle}; {again} makes one"
            )
        return order

    def draft(self, worker: str, *further: str) -> Order:
        """Return the order of a worker, whether it has a bundle or not, with `further` arguments."""
        arguments = ("worker", "--coordinator", self.address, "--run", self.run_id, "--name", worker)
        threads = ("--threads", str(self.config.rollout.threads))
        return Order(
            worker, (*arguments, *threads, *further), (self.bundles or Path("keys/workers")) / worker
        )


def packed_bundle(folder: Path) -> bytes:
    """Return the files of a bundle as an archive, each for its owner alone."""

    def private(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mode, entry.uid, entry.gid, entry.uname, entry.gname = 0o600, 0, 0, "", ""
        return entry

    files = sorted(path for path in folder.iterdir() if path.is_file())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in files:
            archive.add(path, path.name, filter=private)
    return buffer.getvalue()


def launch_site(config: RunConfig, run_id: str, run_dir: Path, address: str) -> LaunchSite:
    """Return what the launchers of a run share; its label is made once and stays with the run's folder."""
    label = run_dir / LABEL_FILE
    if not label.exists():
        write_atomically(label, f"{run_id}-{secrets.token_hex(4)}".encode())
    return LaunchSite(run_id, label.read_text().strip(), address, _bundles(config), config)


def _bundles(config: RunConfig) -> Path | None:
    """Return the folder with the bundles of workers, which lies beside that of the services."""
    services = Path(config.services.credentials or "").expanduser().absolute()
    return services.parent / "workers" if services.name == SERVICES_NAME else None


def check_bundles(config: RunConfig) -> None:
    """Check that each worker that is started elsewhere could join.

    Raises:
        ConfigError: when one has no bundle, or could not find the coordinator again.
    """
    site = LaunchSite("RUN", "", "", _bundles(config), config)
    for one in elsewhere(config):
        for worker in one.workers:
            site.order(worker)


def elsewhere(config: RunConfig) -> list[PoolClass]:
    """Return the classes of the pool whose workers are started on other machines.

    Raises:
        ConfigError: when such workers could not find the coordinator again.
    """
    found = [one for one in config.provisioning.pool if one.launcher.kind != "local"]
    if found and not config.services.coordinator_port:
        raise ConfigError(
            f"services.coordinator_port=0 may be another one when the run continues, where workers of "
            f"{found[0].name} would not find it; give a port"
        )
    return found
