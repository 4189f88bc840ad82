"""Access tokens: who may do what for which run until when, decided from the claims alone.

A token carries claims and a signature. Making and checking signatures is done in
`services.security.access_tokens`. Time is Unix seconds on the clock of the side that decides, so a
worker's own clock never matters.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from antiphon.core.errors import ContractError
from antiphon.core.trust.worker_names import WORKER_NAME

ANY_RUN = "*"
"""Run of an access token for every run of its home: the run's own services have one."""

_TOKEN_ID = re.compile(r"[0-9a-f]{32}")
_RUN_ID = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Scope(StrEnum):
    """What an access token allows."""

    LEASE = "lease"
    """Register, send heartbeats and take leases."""
    SUBMIT = "submit"
    """Hand in groups."""
    PULL = "pull"
    """Fetch manifests and chunks of weights."""
    SAMPLE = "sample"
    """Ask the gateway for tokens, and report rewards: hosts of environments."""
    DOOR = "door"
    """Sample and train through the front door: clients with loops of their own."""
    ADMIN = "admin"
    """Everything: the run's own services, and people who look after it."""


@dataclass(frozen=True, slots=True)
class TokenClaims:
    """What an access token says of its bearer."""

    token_id: str
    """32 hex digits; revocation names it."""
    run_id: str
    """The run it is for, or `*`."""
    worker_name: str
    """Must agree with the certificate and with the name that registers."""
    scopes: tuple[Scope, ...]
    expires_at: int
    """Unix seconds."""
    max_leases: int
    """Most groups its bearer may hold at the same time."""


class Denial(StrEnum):
    """In which way a call is refused."""

    UNKNOWN = "unknown"
    """It is not proven who asks."""
    FORBIDDEN = "forbidden"
    """It is known who asks, and they may not."""
    BUSY = "busy"
    """They may, but later: they ask too much at once."""


class Refusal(ContractError):
    """A call that is not answered: why, in a sentence for the caller."""

    def __init__(self, denial: Denial, sentence: str) -> None:
        super().__init__(sentence)
        self.denial = denial


def check_claims(claims: TokenClaims) -> None:
    """Check that claims are valid.

    Raises:
        ContractError: naming the claim.
    """
    if not _TOKEN_ID.fullmatch(claims.token_id):
        raise ContractError(f"access token id {claims.token_id[:40]!r} is not 32 hex digits")
    if not _RUN_ID.fullmatch(claims.run_id):
        raise ContractError(f"run {claims.run_id[:80]!r} in an access token is invalid as the name of a run")
    if not WORKER_NAME.fullmatch(claims.worker_name):
        raise ContractError(
            f"worker name {claims.worker_name[:80]!r} cannot be used; take up to 64 letters, digits, dots, "
            "dashes and underscores"
        )
    if not claims.scopes:
        raise ContractError(f"an access token needs at least one scope: {', '.join(Scope)}")
    if claims.max_leases < 1:
        raise ContractError(f"max_leases={claims.max_leases} would allow nothing; give 1 or more")


def check_access(
    claims: TokenClaims,
    *,
    run_id: str,
    scope: Scope,
    certificate_names: Collection[str],
    revoked: Collection[str],
    now: float,
) -> None:
    """Check that the bearer of signed claims may make a call.

    Args:
        claims: with a signature that was found right.
        run_id: the run that is served.
        scope: what the call needs.
        certificate_names: names in the certificate of the connection.
        revoked: token ids and worker names that count no more.
        now: Unix seconds.

    Raises:
        Refusal: when they may not.

    >>> c = TokenClaims("0" * 32, "run-1", "far", (Scope.LEASE,), expires_at=100, max_leases=4)
    >>> may = dict(run_id="run-1", certificate_names={"far"}, revoked=(), now=99.0)
    >>> check_access(c, scope=Scope.LEASE, **may)
    >>> check_access(c, scope=Scope.ADMIN, **may)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    antiphon.core.trust.access_tokens.Refusal: this call needs scope admin, but ...
    """
    name, token = claims.worker_name, f"access token {claims.token_id[:8]}"
    if now >= claims.expires_at:
        raise Refusal(
            Denial.UNKNOWN,
            f"{token} of {name} expired {now - claims.expires_at:.0f} s ago; ask for a new one",
        )
    if claims.token_id in revoked:
        raise Refusal(Denial.UNKNOWN, f"{token} of {name} was revoked; ask for a new one")
    if name in revoked:
        raise Refusal(Denial.FORBIDDEN, f"{name} was excluded from this run")
    if claims.run_id not in (ANY_RUN, run_id):
        raise Refusal(
            Denial.FORBIDDEN,
            f"{token} is for run {claims.run_id}, but this is run {run_id}; use the right address",
        )
    if name not in certificate_names:
        shown = ", ".join(sorted(certificate_names)) or "no one"
        raise Refusal(
            Denial.FORBIDDEN,
            f"{token} is of {name}, but the certificate names {shown}; use the bundle of one worker",
        )
    if scope not in claims.scopes and Scope.ADMIN not in claims.scopes:
        held = ", ".join(claims.scopes)
        raise Refusal(Denial.FORBIDDEN, f"this call needs scope {scope}, but {token} has {held} alone")
