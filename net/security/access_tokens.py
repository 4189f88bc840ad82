"""Access tokens: JSON web tokens, signed with ed25519, that carry claims.

The one place that makes and reads them. No other algorithm is accepted, whatever a token's header
says. Expiry is decided with the other claims by `core.trust.access_tokens.check_access`.
"""

import json
import secrets
from datetime import datetime
from pathlib import Path

import jwt

from antiphon.core.errors import ContractError
from antiphon.core.trust.access_tokens import ANY_RUN, Scope, TokenClaims, check_claims
from antiphon.net.security.credentials import SERVICES_NAME
from antiphon.net.security.keys import TOKEN_KEY, SigningKey, public_key, write_private

ALGORITHM = "EdDSA"
_NO_TOKEN = "this is no access token; `antiphon invite NAME` makes one, for a run or for the door"
LONGEST_TOKEN = 2048
"""Characters; nothing longer is looked at."""


def new_token_id() -> str:
    """Return an id that cannot be guessed, 32 hex digits."""
    return secrets.token_hex(16)


def make_token(claims: TokenClaims, key: SigningKey) -> str:
    """Return the signed access token.

    Raises:
        ContractError: when a claim is invalid.
    """
    check_claims(claims)
    payload = {
        "jti": claims.token_id,
        "run": claims.run_id,
        "sub": claims.worker_name,
        "scopes": list(claims.scopes),
        "exp": claims.expires_at,
        "leases": claims.max_leases,
    }
    return jwt.encode(payload, key.private, ALGORITHM)


def write_services_token(bundle: Path, key: SigningKey, now: datetime, days: int) -> None:
    """Write the token that allows the services everything, and the key to check tokens by, into their bundle.

    Args:
        bundle: the services' bundle.
        key: signs tokens.
        now: the time, with its zone.
        days: how long the token lasts.
    """
    expires = int(now.timestamp()) + days * 86400
    claims = TokenClaims(new_token_id(), ANY_RUN, SERVICES_NAME, (Scope.ADMIN,), expires, max_leases=1 << 20)
    write_private(bundle / f"{TOKEN_KEY}.pub", key.public.hex().encode() + b"\n")
    write_private(bundle / "token", make_token(claims, key).encode() + b"\n")


def load_claims(text: str, public: bytes | None) -> TokenClaims:
    """Return the claims of an access token.

    Args:
        text: the token.
        public: key that must have signed it, 32 bytes; None believes it, which is right for display alone.

    Raises:
        ContractError: when it is no access token, was signed otherwise, or has an invalid claim.
    """
    if len(text) > LONGEST_TOKEN:
        raise ContractError(_NO_TOKEN)
    try:
        # Signature alone: expiry is decided with the other claims.
        if public is None:
            signed = jwt.PyJWS().decode(text, options={"verify_signature": False})
        else:
            signed = jwt.PyJWS().decode(text, public_key(public), [ALGORITHM])
        payload = json.loads(signed)
    except jwt.InvalidSignatureError:
        raise ContractError(
            "the access token's signature is not right: it was altered, or made elsewhere"
        ) from None
    except jwt.InvalidAlgorithmError:
        raise ContractError(
            f"the access token is not signed with {ALGORITHM}; `antiphon invite WORKER --run RUN` makes one"
        ) from None
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        raise ContractError(_NO_TOKEN) from None
    try:
        claims = TokenClaims(
            token_id=str(payload["jti"]),
            run_id=str(payload["run"]),
            worker_name=str(payload["sub"]),
            scopes=tuple(Scope(scope) for scope in payload["scopes"]),
            expires_at=int(payload["exp"]),
            max_leases=int(payload["leases"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ContractError(
            "the access token's claims cannot be read; `antiphon invite WORKER --run RUN` makes a new one"
        ) from None
    check_claims(claims)
    return claims
