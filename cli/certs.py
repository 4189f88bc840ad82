"""certs: make the certificates with which services and workers recognise each other."""

from datetime import UTC, datetime
from pathlib import Path

from antiphon.core.errors import ConfigError

SERVICES_TOKEN_DAYS = 90
"""How long the token in the services' own bundle lasts; giving the command again renews it."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def certs(
    *,
    worker: list[str] | None = None,
    host: list[str] | None = None,
    relay_host: list[str] | None = None,
    keys: Path | None = None,
    days: int = 90,
) -> int:
    """Make a private authority, the services' bundle and, for each worker named, a bundle to send there.

    What is there already stays: the authority and the signing keys are made once. Certificates are
    made anew each time, so the same command renews them.

    Args:
        worker: name of a worker; give it several times for several.
        host: name or address by which workers reach the services, beside localhost; several are allowed.
        relay_host: name or address by which other workers reach the worker named, which may then hand weights
            on to them (`antiphon worker --relay-address`); several are allowed.
        keys: folder for all of it; by default keys in the home directory.
        days: how long certificates last.
    """
    from antiphon.core.trust.worker_names import WORKER_NAME
    from antiphon.net.security.access_tokens import write_services_token
    from antiphon.net.security.certificates import ensure_authority, hosts_of, issue
    from antiphon.net.security.credentials import KEYS, SERVICES_NAME
    from antiphon.net.security.keys import (
        LEARNER_KEY,
        TOKEN_KEY,
        ensure_key,
        make_private_folder,
        write_private,
    )
    from antiphon.runs.directory import home_directory

    if days < 1:
        raise ConfigError(f"--days {days} would make certificates that never hold; give 1 or more")
    for name in worker or ():
        if not WORKER_NAME.fullmatch(name) or name == SERVICES_NAME:
            raise ConfigError(f"--worker {name} is not possible; use letters, digits, dot, dash, underscore")
    if relay_host and len(worker or ()) != 1:
        raise ConfigError("--relay-host is the address of one worker; give one --worker NAME with it")
    folder, now = keys or home_directory() / KEYS, datetime.now(UTC)
    services = folder / SERVICES_NAME
    made = ensure_authority(folder, now)
    if host or made or not (services / "cert.pem").exists():
        hosts = list(dict.fromkeys([*LOOPBACK, *(host or ())]))
        issue(folder, services, SERVICES_NAME, hosts, days, now)
        print(f"services: {services} (dialled as {', '.join(hosts)})")
    # Whoever may serve under the services' own address could pose as them.
    for name in set(relay_host or ()) - set(LOOPBACK):
        if name in hosts_of((services / "cert.pem").read_bytes()):
            raise ConfigError(f"--relay-host {name} is an address of the services; give the worker's own")
    signer = ensure_key(folder, TOKEN_KEY)
    learner = ensure_key(services, LEARNER_KEY)
    write_services_token(services, signer, now, SERVICES_TOKEN_DAYS)
    if worker:
        make_private_folder(folder / "workers")
    for name in worker or ():
        bundle = folder / "workers" / name
        issue(folder, bundle, name, relay_host or [], days, now)
        write_private(bundle / f"{LEARNER_KEY}.pub", learner.public.hex().encode() + b"\n")
        if relay_host:
            write_private(bundle / f"{TOKEN_KEY}.pub", signer.public.hex().encode() + b"\n")
        print(f"worker {name}: {bundle}; `antiphon token create --worker {name} --run RUN` lets it in")
    print(f"the authority {folder / 'ca.key'} and {folder / 'tokens.key'} stay on this machine")
    return 0
