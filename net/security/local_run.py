"""Local runs: the bundle that a run on one machine makes for itself, where none is configured.

Loopback is open to every user of a machine. So the services of such a run recognise each other as
they would over a network: by certificates of an authority of this run alone and by a token. The keys
of that authority are thrown away once used; what is left lies in the run's folder, for its owner.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from antiphon.net.security.access_tokens import write_services_token
from antiphon.net.security.certificates import AUTHORITY_DAYS, ensure_authority, issue
from antiphon.net.security.credentials import KEYS, SERVICES_NAME, Credentials, load_credentials
from antiphon.net.security.keys import TOKEN_KEY, ensure_key, make_private_folder

_HOSTS = ("localhost", "127.0.0.1", "::1")


def local_bundle(run_dir: Path) -> Path:
    """Return the folder of a run's own bundle."""
    return run_dir / KEYS / "local"


def local_credentials(run_dir: Path) -> Credentials | None:
    """Read the bundle that a run made for itself, or return None when it made none.

    Raises:
        ConfigError: when a file is missing, or a secret can be read by others.
    """
    bundle = local_bundle(run_dir)
    return replace(load_credentials(bundle), local=True) if bundle.exists() else None


def ensure_local_credentials(run_dir: Path, hosts: Sequence[str] = ()) -> Credentials:
    """Read the bundle that a run made for itself; it is made first when there is none.

    Args:
        run_dir: the run's folder.
        hosts: further addresses that the services are dialled by.

    Raises:
        ConfigError: when a file of it is missing, or a secret can be read by others.
    """
    bundle = local_bundle(run_dir)
    if not bundle.exists():
        make_private_folder(bundle.parent)
        now = datetime.now(UTC)
        with TemporaryDirectory(prefix=".local-", dir=bundle.parent) as folder:
            authority = Path(folder)
            made = authority / SERVICES_NAME
            ensure_authority(authority, now)
            issue(authority, made, SERVICES_NAME, [*{*_HOSTS, *hosts}], AUTHORITY_DAYS, now)
            write_services_token(made, ensure_key(authority, TOKEN_KEY), now, AUTHORITY_DAYS)
            try:
                made.rename(bundle)
            except OSError:
                if not bundle.exists():  # else another service of the run was quicker: its bundle counts
                    raise
    return replace(load_credentials(bundle), local=True)
