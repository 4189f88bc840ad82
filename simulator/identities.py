"""Identities: what the processes of a simulated run show of themselves to each other.

Access tokens are production's, signed with a key that is the same in every simulation; a certificate is the
names that it would carry.
"""

import functools

from antiphon.core.digests import digest_bytes
from antiphon.core.trust.access_tokens import Scope, TokenClaims
from antiphon.net.rpc.in_process import Identity
from antiphon.net.security.access_tokens import make_token
from antiphon.net.security.credentials import SERVICES_NAME
from antiphon.net.security.keys import SigningKey, signing_key

_KEY: SigningKey = signing_key(bytes(32))
TOKEN_KEY = _KEY.public
"""What checks the tokens, 32 bytes."""
_EXPIRES_AT = 1 << 40
"""Unix seconds; simulated clocks may be years wrong."""
_WORKER_SCOPES = (Scope.LEASE, Scope.SUBMIT, Scope.PULL)
_MAX_LEASES = 64


@functools.cache
def worker_identity(run_id: str, name: str) -> Identity:
    """Return what a rollout worker of that name shows."""
    return _identity(run_id, name, _WORKER_SCOPES)


@functools.cache
def services_identity(run_id: str) -> Identity:
    """Return what the run's own services show."""
    return _identity(run_id, SERVICES_NAME, (Scope.ADMIN,))


def _identity(run_id: str, name: str, scopes: tuple[Scope, ...]) -> Identity:
    token_id = digest_bytes(name.encode())[:32]
    token = make_token(TokenClaims(token_id, run_id, name, scopes, _EXPIRES_AT, _MAX_LEASES), _KEY)
    return Identity(f"Bearer {token}", (name,))
