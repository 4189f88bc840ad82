"""Configuration of launchers: by which engine the workers of a class are started, and what that is told."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from antiphon.core.config_sections import Section

_WORD = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}$"
_HOST = re.compile(r"([A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?")


class _Elsewhere(Section):
    """What every launcher needs that starts workers on other machines."""

    command: str = Field(default="antiphon", min_length=1, max_length=1024)
    """How the `antiphon` command is called there, a line of shell."""
    setup: str = Field(default="", max_length=16_384)
    """Lines of shell that run before it, such as `module load cuda`."""


class LocalLauncherSection(Section):
    """Processes of the run's own machine."""

    kind: Literal["local"] = "local"


class SshLauncherSection(_Elsewhere):
    """Processes of machines that are reached by `ssh`."""

    kind: Literal["ssh"]
    hosts: tuple[str, ...] = Field(min_length=1, max_length=1024)
    """[USER@]HOST[:PORT] each; worker N of the class runs on host N modulo their count."""
    options: tuple[str, ...] = ()
    """Further arguments of `ssh` and `scp`, such as `-i`, `~/.ssh/spot`."""
    work_dir: str = Field(default=".antiphon/fleet", min_length=1, max_length=1024)
    """Folder there for bundles, logs and weights on their way; relative to the user's home."""
    wheel: str = ""
    """File of this package that is copied there and installed by `pip`; "" where it is installed already."""

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := next((host for host in hosts if not _HOST.fullmatch(host)), None):
            raise ValueError(f"{wrong!r} is no host; give [USER@]HOST[:PORT]")
        return hosts


class SlurmLauncherSection(_Elsewhere):
    """Members of one job array of Slurm."""

    kind: Literal["slurm"]
    partition: str = ""
    """Where jobs are queued; "" for the cluster's default."""
    account: str = ""
    """Who pays; "" for the user's default."""
    time: str = ""
    """Longest time of a job, as `sbatch --time` takes it; "" for the partition's."""
    gpus: int = Field(default=0, ge=0, le=64)
    """Of each worker."""
    cpus: int = Field(default=1, ge=1, le=1024)
    """Of each worker."""
    memory_mib: int = Field(default=0, ge=0, le=1 << 24)
    """Of each worker; 0 for the partition's default."""
    options: tuple[str, ...] = ()
    """Further options of `sbatch`, such as `--constraint=a100`."""
    work_dir: str = Field(default=".antiphon/fleet", min_length=1, max_length=1024)
    """Folder on the file system that all nodes see; relative to the user's home."""


class RayLauncherSection(_Elsewhere):
    """Actors of a Ray cluster, each of which holds one ordinary worker."""

    kind: Literal["ray"]
    address: str = Field(default="auto", pattern=_WORD)
    """Of the cluster: `auto`, HOST:PORT, or ray://HOST:PORT."""
    cpus: float = Field(default=1.0, ge=0.0, le=1024.0)
    """Of each worker."""
    gpus: float = Field(default=0.0, ge=0.0, le=64.0)
    """Of each worker."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further resources of Ray that each worker takes."""


class SkyPilotLauncherSection(_Elsewhere):
    """Managed jobs of SkyPilot, whose `sky` command is called."""

    kind: Literal["skypilot"]
    resources: tuple[dict[str, str | int | float | bool], ...] = ({"use_spot": True},)
    """What would do, each as in SkyPilot's `resources`: the cheapest that is there is taken."""
    sky: str = Field(default="sky", min_length=1, max_length=1024)
    """The command."""


class KubernetesLauncherSection(_Elsewhere):
    """Pods of a StatefulSet, whose replicas are changed by the plain API."""

    kind: Literal["kubernetes"]
    server: str = Field(default="https://kubernetes.default.svc", pattern=r"^https?://[A-Za-z0-9.\[\]:-]+/?$")
    """URL of the API."""
    namespace: str = Field(default="antiphon", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    """File with the token that may read and scale the StatefulSet."""
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """Certificate of the API's authority."""
    image: str = Field(default="antiphon:0.1.0", pattern=_WORD)
    """Of the workers."""
    cpus: str = Field(default="2", pattern=r"^[0-9]+m?$")
    """Requested by each worker, as Kubernetes writes it."""
    memory: str = Field(default="8Gi", pattern=r"^[0-9]+[KMGT]?i?$")
    """Requested by each worker."""
    gpus: int = Field(default=0, ge=0, le=64)
    """nvidia.com/gpu of each worker."""


LauncherSection = Annotated[
    LocalLauncherSection
    | SshLauncherSection
    | SlurmLauncherSection
    | RayLauncherSection
    | SkyPilotLauncherSection
    | KubernetesLauncherSection,
    Field(discriminator="kind"),
]
