"""invite: let workers elsewhere into a run by certificate and access token, look at a token, take it back."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from antiphon.core.errors import ConfigError, ContractError
from antiphon.core.trust.access_tokens import ANY_RUN, Scope, TokenClaims
from antiphon.core.trust.worker_names import WORKER_NAME
from antiphon.lineage.door_keys import BARRED, PREFIX
from antiphon.net.security.access_tokens import load_claims, make_token, new_token_id, write_services_token
from antiphon.net.security.certificates import ensure_authority, hosts_of, issue
from antiphon.net.security.credentials import KEYS, SERVICES_NAME
from antiphon.net.security.keys import (
    LEARNER_KEY,
    TOKEN_KEY,
    ensure_key,
    load_public,
    make_private_folder,
    write_private,
)
from antiphon.runs.attach import attached
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_run

SERVICES_TOKEN_DAYS = 90
"""How long the token in the services' own bundle lasts; giving the command again renews it."""
MOST_OF_A_POOL = 1024
"""As many as a class of the pool may have."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def invite(
    *names: str,
    pool: str = "",
    count: int | None = None,
    run: str | None = None,
    host: list[str] | None = None,
    relay_host: list[str] | None = None,
    hours: float = 24.0,
    scopes: str = "lease,submit,pull",
    max_leases: int = 64,
    days: int = 90,
    keys: Path | None = None,
    show: Path | None = None,
    revoke: bool = False,
    pardon: bool = False,
    reason: str = "",
) -> None:
    """Let workers elsewhere into a run: certificates and access tokens, and taking them back.

    A private authority, the services' bundle and, for each worker, a bundle to send there are made. With
    --run an access token for that run is written into each worker's bundle. The authority and the signing
    keys are made once and stay. Certificates are made again each time, so the same command renews them.
    Without a worker the services' bundle is made or renewed.

    Args:
        names: names of workers, as in their certificates; with --revoke also the id of an access token.
        pool: a class of provisioning.pool, whose workers NAME-0, NAME-1 and so on are meant too.
        count: how many they are.
        run: the run that the workers may serve; `*` for every run of this home. With --revoke and --pardon
            the run that it holds in; by default the newest.
        host: name or address by which workers reach the services, beside localhost; several are allowed.
        relay_host: name or address by which other workers reach the one worker named, which may then hand
            weights on to them (`antiphon worker --relay-address`); several are allowed.
        hours: how long an access token lasts.
        scopes: what it allows, of lease, submit, pull, sample, admin; hosts of environments need sample.
            `door` alone prints a key of the front door (`antiphon door`) for --hours; with --revoke or
            --pardon the keys of a name count no more, or again.
        max_leases: most groups that the worker may hold at a time.
        days: how long certificates last.
        keys: folder for all of it; by default keys in the home directory.
        show: instead, say what the access token in this file or bundle allows, and whether its signature is
            right.
        revoke: instead, exclude these workers, or make these access tokens invalid, in a run.
        pardon: instead, let workers that were excluded try again, as strangers; revoked tokens stay revoked.
        reason: with --revoke and --pardon: kept in the journal.
    """
    if sum((show is not None, revoke, pardon)) > 1:
        raise ConfigError("--show, --revoke and --pardon are three things; give one of them")
    if show is not None:
        return _show(show)
    if bool(pool) != (count is not None):
        raise ConfigError("--pool and --count go together: the name of a class, and how many workers it has")
    if not 0 <= (count or 0) <= MOST_OF_A_POOL:
        raise ConfigError(f"--count {count} is not from 0 to {MOST_OF_A_POOL}; give what the class has")
    workers = [*names, *(f"{pool}-{number}" for number in range(count or 0))]
    if scopes == Scope.DOOR:
        return _door_keys(workers, hours, keys or home_directory() / KEYS, revoke, pardon)
    if revoke or pardon:
        if not workers:
            raise ConfigError(f"{'--pardon' if pardon else '--revoke'} needs the name of a worker; add it")
        return asyncio.run(_decide(run, workers, reason, pardon))
    allowed, hosts, relay_hosts = _scopes(scopes), host or [], relay_host or []
    if days < 1:
        raise ConfigError(f"--days {days} would make certificates that never hold; give 1 or more")
    _checked(hours)
    for name in workers:
        _check_name(name)
    if relay_hosts and len(workers) != 1:
        raise ConfigError("--relay-host is the address of one worker; name one with it")
    if run is not None and not workers:
        raise ConfigError("--run lets workers into a run; name one with it")
    folder, now = keys or home_directory() / KEYS, datetime.now(UTC)
    services = folder / SERVICES_NAME
    made = ensure_authority(folder, now) or not (services / "cert.pem").exists()
    if hosts or made or not workers:
        dialled = list(dict.fromkeys([*LOOPBACK, *(hosts or _hosts(services))]))
        issue(folder, services, SERVICES_NAME, dialled, days, now)
        print(f"services: {services} (dialled as {', '.join(dialled)})")
    # A worker that may serve under the services' own address could pose as them.
    for name in set(relay_hosts) - set(LOOPBACK):
        if name in _hosts(services):
            raise ConfigError(f"--relay-host {name} is an address of the services; give the worker's own")
    signer = ensure_key(folder, TOKEN_KEY)
    learner = ensure_key(services, LEARNER_KEY)
    write_services_token(services, signer, now, SERVICES_TOKEN_DAYS)
    if workers:
        make_private_folder(folder / "workers")
    for name in workers:
        bundle = folder / "workers" / name
        relays = relay_hosts or _hosts(bundle)
        issue(folder, bundle, name, relays, days, now)
        write_private(bundle / f"{LEARNER_KEY}.pub", learner.public.hex().encode() + b"\n")
        if relays:
            write_private(bundle / f"{TOKEN_KEY}.pub", signer.public.hex().encode() + b"\n")
        if run is None:
            print(f"worker {name}: {bundle}; `antiphon invite {name} --run RUN` lets it in")
            continue
        expires = int(now.timestamp() + hours * 3600)
        claims = TokenClaims(new_token_id(), run, name, allowed, expires, max_leases)
        write_private(bundle / "token", make_token(claims, signer).encode() + b"\n")
        print(f"worker {name}: {bundle}, with token {claims.token_id} for run {run}, {hours:g} h")
    print(f"the authority {folder / 'ca.key'} and {folder / 'tokens.key'} stay on this machine")


def _door_keys(names: Sequence[str], hours: float, folder: Path, revoke: bool, pardon: bool) -> None:
    """Print a key of the front door for each name, or say there that the keys of a name count no more."""
    if not names:
        raise ConfigError("--scopes door makes a key for somebody; give a name")
    barred = home_directory() / BARRED
    if revoke or pardon:
        known = dict.fromkeys(barred.read_text(encoding="utf-8").split() if barred.exists() else ())
        left = [*known, *names] if revoke else [one for one in known if one not in names]
        make_private_folder(barred.parent)
        write_private(barred, "".join(f"{one}\n" for one in dict.fromkeys(left)).encode())
        print(f"{', '.join(names)}: keys of the front door count {'no more' if revoke else 'again'}")
        return
    now, signer = datetime.now(UTC), ensure_key(folder, TOKEN_KEY)
    for name in names:
        _check_name(name)
        expires = int(now.timestamp() + _checked(hours) * 3600)
        claims = TokenClaims(new_token_id(), ANY_RUN, name, (Scope.DOOR,), expires, 1)
        print(f"{name}, {hours:g} h, token {claims.token_id}:\n{PREFIX}{make_token(claims, signer)}")


def _checked(hours: float) -> float:
    if not 0.0 < hours <= 24.0 * 366:
        raise ConfigError(f"--hours {hours:g} is not within a year; access tokens are short-lived")
    return hours


def _check_name(name: str) -> None:
    if not WORKER_NAME.fullmatch(name) or name == SERVICES_NAME:
        raise ConfigError(f"worker {name} is not possible; use letters, digits, dot, dash, underscore")


def _hosts(bundle: Path) -> list[str]:
    """Return the addresses that a bundle's certificate names, beside its bearer; none without one."""
    path = bundle / "cert.pem"
    return [host for host in hosts_of(path.read_bytes()) if host != bundle.name] if path.exists() else []


def _show(token: Path) -> None:
    path = token / "token" if token.is_dir() else token
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"there is no access token in {path}: {error}; `antiphon invite WORKER --run RUN` makes one"
        ) from None
    claims, public = load_claims(text, None), load_public(home_directory() / KEYS, TOKEN_KEY)
    try:
        signed = (
            "right" if public and load_claims(text, public) else "cannot be checked without keys/tokens.pub"
        )
    except ContractError:
        signed = "WRONG"
    left_h = (claims.expires_at - datetime.now(UTC).timestamp()) / 3600
    print(f"token {claims.token_id}\nworker {claims.worker_name}\nrun {claims.run_id}")
    print(f"scopes {', '.join(claims.scopes)}\nleases at most {claims.max_leases}")
    print(f"expired {-left_h:.1f} h ago" if left_h <= 0 else f"expires in {left_h:.1f} h")
    print(f"signature {signed}")


async def _decide(run: str | None, names: Sequence[str], reason: str, pardon: bool) -> None:
    directory = find_run(home_directory(), run)
    async with attached(directory) as (coordinator, running):
        for name in names:
            await (coordinator.pardon if pardon else coordinator.revoke)(name, reason)
            said = "may try again" if pardon else "counts no more"
            print(f"{name} {said} in run {directory.name}{'' if running else ', which is not running'}")


def _scopes(text: str) -> "tuple[Scope, ...]":
    try:
        found = tuple(Scope(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--scopes {text} is not of {', '.join(Scope)}; separate them by commas") from None
    if Scope.DOOR in found:
        raise ConfigError(f"--scopes {text} has door among others; a key of the door is made by it alone")
    if not {Scope.ADMIN, Scope.LEASE, Scope.SAMPLE} & {*found}:
        raise ConfigError(
            f"--scopes {text} lets a worker do nothing, since it registers and hands in under a lease; add "
            "lease, or leave --scopes out for lease,submit,pull"
        )
    return found
