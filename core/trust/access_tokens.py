"""Tokens: who may do what for which run until when, decided from the words alone.

A token is a text of three parts: a mark, the claims, and an ed25519 signature over both. Making
and checking signatures is done elsewhere; here claims are read, written and rewarded. Time is Unix
seconds on the clock of whoever judges, so a worker's own clock never matters.
"""

import base64
import binascii
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from antiphon.core.errors import ContractError

MARK = "antiphon1"
"""First part of every token; raised when the claims change their form."""
ANY_RUN = "*"
"""A token for every run of its home: the run's own services have one."""
LONGEST_TOKEN = 2048
"""Characters; nothing longer is looked at."""
WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a worker may be called; also the name in its certificate."""

_TOKEN_ID = re.compile(r"[0-9a-f]{32}")
_RUN_ID = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Scope(StrEnum):
    """What a token allows."""

    LEASE = "lease"
    """Register, send heartbeats and take leases."""
    SUBMIT = "submit"
    """Hand in groups."""
    PULL = "pull"
    """Fetch manifests and chunks of weights."""
    ADMIN = "admin"
    """Everything: the run's own services, and people who look after it."""


WORKER_SCOPES = (Scope.LEASE, Scope.SUBMIT, Scope.PULL)
"""What a rollout worker needs."""


@dataclass(frozen=True, slots=True)
class TokenClaims:
    """What a token says of its bearer."""

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
    """Which of the two ways of saying no is meant."""

    UNKNOWN = "unknown"
    """It is not proven who asks."""
    FORBIDDEN = "forbidden"
    """It is known who asks, and they may not."""
    BUSY = "busy"
    """They may, but later: they ask too much at once."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is not answered, in a sentence for whoever made it."""

    denial: Denial
    sentence: str


def dump_claims(claims: TokenClaims) -> bytes:
    """Return the claims as compact JSON; equal claims give equal bytes."""
    fields = {
        "id": claims.token_id,
        "run": claims.run_id,
        "worker": claims.worker_name,
        "scopes": [scope.value for scope in claims.scopes],
        "expires": claims.expires_at,
        "leases": claims.max_leases,
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def load_claims(payload: bytes) -> TokenClaims:
    """Read what `dump_claims` wrote.

    Raises:
        ContractError: when the bytes are no claims.
    """
    try:
        tree = json.loads(payload)
        claims = TokenClaims(
            token_id=str(tree["id"]),
            run_id=str(tree["run"]),
            worker_name=str(tree["worker"]),
            scopes=tuple(Scope(scope) for scope in tree["scopes"]),
            expires_at=int(tree["expires"]),
            max_leases=int(tree["leases"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ContractError(
            "the token's claims cannot be read; make a new one with `antiphon token create`"
        ) from None
    check_claims(claims)
    return claims


def check_claims(claims: TokenClaims) -> None:
    """Check that claims can be meant.

    Raises:
        ContractError: naming the claim.
    """
    if not _TOKEN_ID.fullmatch(claims.token_id):
        raise ContractError(f"token id {claims.token_id[:40]!r} is not 32 hex digits")
    if not _RUN_ID.fullmatch(claims.run_id):
        raise ContractError(f"run {claims.run_id[:80]!r} in a token cannot be the name of a run")
    if not WORKER_NAME.fullmatch(claims.worker_name):
        raise ContractError(
            f"worker name {claims.worker_name[:80]!r} cannot be used; take up to 64 letters, digits, dots, "
            "dashes and underscores"
        )
    if not claims.scopes:
        raise ContractError("a token needs at least one scope: lease, submit, pull or admin")
    if claims.max_leases < 1:
        raise ContractError(f"max_leases={claims.max_leases} would allow nothing; give 1 or more")


def signed_bytes(payload: bytes) -> bytes:
    """Return what a token's signature covers: the mark and the claims."""
    return MARK.encode() + b"." + payload


def join_token(payload: bytes, signature: bytes) -> str:
    """Return the token's text."""
    return f"{MARK}.{_encode(payload)}.{_encode(signature)}"


def split_token(text: str) -> tuple[bytes, bytes]:
    """Return (claims, signature) of a token's text; nothing is checked yet.

    Raises:
        ContractError: when it is no token.
    """
    mark, *parts = text.split(".", 3) if len(text) <= LONGEST_TOKEN else ("",)
    if mark != MARK or len(parts) != 2:
        raise ContractError(
            f"this is no token of the form {MARK}.CLAIMS.SIGNATURE; make one with `antiphon token create`"
        )
    try:
        return _decode(parts[0]), _decode(parts[1])
    except (binascii.Error, ValueError):
        raise ContractError("the token is not base64; copy it whole") from None


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _decode(text: str) -> bytes:
    raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _encode(raw) != text:  # stray bits in the last letter would make two texts of one token
        raise ValueError(text)
    return raw


def refuse_claims(
    claims: TokenClaims,
    *,
    run_id: str,
    scope: Scope,
    certificate_names: Collection[str],
    revoked: Collection[str],
    now: float,
) -> Refusal | None:
    """Tell why the bearer of signed claims may not make a call, or None when they may.

    Args:
        claims: with a signature that was found right.
        run_id: the run that is served.
        scope: what the call needs.
        certificate_names: names in the certificate of the connection.
        revoked: token ids and worker names that count no more.
        now: Unix seconds.

    >>> c = TokenClaims("0" * 32, "run-1", "far", (Scope.LEASE,), expires_at=100, max_leases=4)
    >>> may = dict(run_id="run-1", certificate_names={"far"}, revoked=(), now=99.0)
    >>> refuse_claims(c, scope=Scope.LEASE, **may) is None
    True
    >>> refuse_claims(c, scope=Scope.ADMIN, **may).denial.value
    'forbidden'
    """
    name, short = claims.worker_name, claims.token_id[:8]
    if now >= claims.expires_at:
        return Refusal(
            Denial.UNKNOWN,
            f"token {short} of {name} expired {now - claims.expires_at:.0f} s ago; ask for a new one",
        )
    if claims.token_id in revoked:
        return Refusal(Denial.UNKNOWN, f"token {short} of {name} was revoked; ask for a new one")
    if name in revoked:
        return Refusal(Denial.FORBIDDEN, f"worker {name} was excluded from this run")
    if claims.run_id not in (ANY_RUN, run_id):
        return Refusal(
            Denial.FORBIDDEN,
            f"token {short} is for run {claims.run_id}, but this is run {run_id}; use the right address",
        )
    if name not in certificate_names:
        shown = ", ".join(sorted(certificate_names)) or "nobody"
        return Refusal(
            Denial.FORBIDDEN,
            f"token {short} is of {name}, but the certificate names {shown}; use the bundle of one worker",
        )
    if scope not in claims.scopes and Scope.ADMIN not in claims.scopes:
        held = ", ".join(claims.scopes)
        return Refusal(Denial.FORBIDDEN, f"this call needs scope {scope}, but token {short} has {held} alone")
    return None


def name_of_worker(worker_id: str) -> str:
    """Return the name within a worker's id: its registrations are numbered.

    >>> name_of_worker("far-east-3")
    'far-east'
    """
    return worker_id.rpartition("-")[0]
