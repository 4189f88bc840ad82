"""Engines: which launcher starts the workers of a class."""

from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.core.errors import ConfigError
from antiphon.runs.fleet.launcher import Launcher, LaunchSite


def make_launcher(one: PoolClass, site: LaunchSite) -> Launcher:
    """Return the launcher of a class whose workers are started elsewhere.

    Raises:
        ConfigError: when what it needs is not installed here.
    """
    section = one.launcher
    if section.kind == "ssh":
        from antiphon.runs.fleet.ssh import SshLauncher

        return SshLauncher(one, section, site)
    if section.kind == "slurm":
        from antiphon.runs.fleet.slurm import SlurmLauncher

        return SlurmLauncher(one, section, site)
    if section.kind == "ray":
        from antiphon.runs.fleet.ray import RayLauncher

        return RayLauncher(one, section, site)
    if section.kind == "skypilot":
        from antiphon.runs.fleet.skypilot import SkyPilotLauncher

        return SkyPilotLauncher(one, section, site)
    if section.kind == "kubernetes":
        from antiphon.runs.fleet.kubernetes import KubernetesLauncher

        return KubernetesLauncher(one, section, site)
    raise ConfigError(f"provisioning.pool: workers of {one.name} are processes of the run's own machine")
