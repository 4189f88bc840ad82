"""Hosts: what became of the episodes that hosts of others' environments took, as the gateway keeps it.

It stands in a file of the run's folder, with the address that hosts ask, so that who looks at a run finds
both whether or not the gateway runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from antiphon.core.status import RunStatus
from antiphon.system.clock import wall_clock
from antiphon.system.files import write_atomically

GATEWAY_FILE = "gateway.json"
HOST_TOKEN = Path("keys") / "host.token"
"""What a host on the run's machine shows; both within the run's folder."""


@dataclass(slots=True)
class HostCounts:
    """Episodes of one host, counted."""

    taken: int = 0
    reported: int = 0
    """Whose rewards count."""
    failed: int = 0
    """Reported as failed, or failed because the host was silent and they cannot be built again."""
    refused: int = 0
    """Reports that were not believed; the episodes of those that were its own have failed."""
    lost: int = 0
    """Given to another host, since this one was silent."""
    seen_at: float = 0.0
    """When it was heard last, Unix seconds."""


@dataclass(frozen=True, slots=True)
class GatewayRecord:
    """What is known of a run's gateway."""

    url: str = ""
    """Where hosts ask; empty where there is no gateway."""
    hosts: Mapping[str, HostCounts] = field(default_factory=dict)
    untaken: int = 0
    """Groups that no host has."""

    def lines(self) -> list[str]:
        """Say what became of the episodes of each host."""
        return [
            f"host {name}: {one.taken} episodes taken, {one.reported} reported, {one.failed} failed, "
            f"{one.refused} reports refused, {one.lost} lost by silence"
            for name, one in sorted(self.hosts.items())
        ]


_RECORD = TypeAdapter(GatewayRecord)


def read_gateway(run_dir: Path) -> GatewayRecord:
    """Return what a run's folder says of its gateway."""
    try:
        return _RECORD.validate_json((run_dir / GATEWAY_FILE).read_bytes())
    except FileNotFoundError:
        return GatewayRecord()


def waiting_for_host(status: RunStatus, run_dir: Path, timeout_s: float) -> RunStatus:
    """Return a look at a run that says so where groups wait for a host and none was heard for `timeout_s`."""
    found, now = read_gateway(run_dir), wall_clock()
    if not found.untaken or any(now - one.seen_at < timeout_s for one in found.hosts.values()):
        return status
    words = f"a host of the environment to take {found.untaken} groups: none is there at {found.url}"
    return replace(status, waiting=words)


def write_gateway(run_dir: Path, record: GatewayRecord) -> None:
    """Keep what is known of a run's gateway."""
    write_atomically(run_dir / GATEWAY_FILE, _RECORD.dump_json(record))
