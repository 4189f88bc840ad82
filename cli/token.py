"""token: access tokens let a worker into a run for a while, see what a token allows, take it back."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from antiphon.cli.help import words_of
from antiphon.core.errors import ConfigError

if TYPE_CHECKING:
    from antiphon.core.trust.access_tokens import Scope

app = App(
    name="token",
    **words_of("token"),
    help="Create, show or revoke the access tokens that let workers into a run.",
)


@app.command
def create(
    *,
    worker: str,
    run: str,
    scopes: str = "lease,submit,pull",
    hours: float = 24.0,
    max_leases: int = 64,
    keys: Path | None = None,
) -> int:
    """Write an access token into the worker's bundle.

    Args:
        worker: the worker's name, as in its certificate.
        run: the run it may serve; `*` for every run of this home.
        scopes: what it may do, of lease, submit, pull, admin.
        hours: how long it lasts.
        max_leases: most groups it may hold at a time.
        keys: folder that `antiphon certs` made; by default keys in the home directory.
    """
    from antiphon.core.trust.access_tokens import TokenClaims
    from antiphon.net.security.access_tokens import make_token, new_token_id
    from antiphon.net.security.credentials import KEYS
    from antiphon.net.security.keys import TOKEN_KEY, load_key, write_private
    from antiphon.runs.directory import home_directory

    if not 0.0 < hours <= 24.0 * 366:
        raise ConfigError(f"--hours {hours:g} is not within a year; access tokens are short-lived")
    folder = keys or home_directory() / KEYS
    bundle = folder / "workers" / worker
    if not (bundle / "cert.pem").exists():
        raise ConfigError(
            f"worker {worker} has no bundle in {folder}; `antiphon certs --worker {worker}` makes it"
        )
    expires = int(datetime.now(UTC).timestamp() + hours * 3600)
    claims = TokenClaims(new_token_id(), run, worker, _scopes(scopes), expires, max_leases)
    write_private(bundle / "token", make_token(claims, load_key(folder, TOKEN_KEY)).encode() + b"\n")
    print(f"token {claims.token_id} of {worker} for run {run}, {hours:g} h: {bundle / 'token'}")
    return 0


@app.command
def show(token: Path) -> int:
    """Say what an access token allows and whether its signature is right.

    Args:
        token: the file, or a bundle that holds one.
    """
    from antiphon.core.errors import ContractError
    from antiphon.net.security.access_tokens import load_claims
    from antiphon.net.security.credentials import KEYS
    from antiphon.net.security.keys import TOKEN_KEY, load_public
    from antiphon.runs.directory import home_directory

    path = token / "token" if token.is_dir() else token
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"there is no access token in {path}: {error}; `antiphon token create` makes one"
        ) from None
    claims = load_claims(text, None)
    public = load_public(home_directory() / KEYS, TOKEN_KEY)
    signed = "cannot be checked without keys/tokens.pub"
    if public is not None:
        try:
            load_claims(text, public)
            signed = "right"
        except ContractError:
            signed = "WRONG"
    left_h = (claims.expires_at - datetime.now(UTC).timestamp()) / 3600
    print(f"token {claims.token_id}\nworker {claims.worker_name}\nrun {claims.run_id}")
    print(f"scopes {', '.join(claims.scopes)}\nleases at most {claims.max_leases}")
    print(f"expired {-left_h:.1f} h ago" if left_h <= 0 else f"expires in {left_h:.1f} h")
    print(f"signature {signed}")
    return 0


@app.command
def revoke(name: str, *, run: str | None = None, reason: str = "") -> int:
    """Let a token, by its id, or a worker, by its name, count no more in a run.

    Args:
        name: the token's id or the worker's name.
        run: the run; by default the newest.
        reason: kept in the journal.
    """
    return asyncio.run(_tell(run, name, reason))


@app.command
def pardon(worker: str, *, run: str | None = None, reason: str = "") -> int:
    """Let a worker that was shut out try again, as a stranger; revoked tokens stay revoked.

    Args:
        worker: the worker's name.
        run: the run; by default the newest.
        reason: kept in the journal.
    """
    return asyncio.run(_tell(run, worker, reason, pardoned=True))


async def _tell(run: str | None, name: str, reason: str, pardoned: bool = False) -> int:
    from antiphon.runs.attach import attached
    from antiphon.runs.directory import home_directory, store_directory
    from antiphon.runs.finding import find_run

    home = home_directory()
    directory = find_run(home, run)
    async with attached(directory, store_directory(home)) as (coordinator, running):
        await (coordinator.pardon if pardoned else coordinator.revoke)(name, reason)
    verb = "may try again" if pardoned else "counts no more"
    print(f"{name} {verb} in run {directory.name}{'' if running else ', which is resting'}")
    return 0


def _scopes(text: str) -> "tuple[Scope, ...]":
    from antiphon.core.trust.access_tokens import Scope

    try:
        found = tuple(Scope(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(
            f"--scopes {text} is not of lease, submit, pull, admin; separate them by commas"
        ) from None
    if Scope.ADMIN not in found and Scope.LEASE not in found:
        raise ConfigError(
            f"--scopes {text} lets a worker do nothing, since it registers and hands in under a lease; add "
            "lease, or leave --scopes out for lease,submit,pull"
        )
    return found
