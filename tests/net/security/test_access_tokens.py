"""Access tokens: what is signed comes back, and nothing else is believed."""

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ContractError
from antiphon.core.trust.access_tokens import Scope, TokenClaims
from antiphon.net.security.access_tokens import LONGEST_TOKEN, load_claims, make_token
from antiphon.net.security.keys import SigningKey, signing_key

KEY = signing_key(bytes(range(32)))
GOOD = TokenClaims("0" * 32, "run", "w", (Scope.LEASE,), 2**31, 1)

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True)
claims = st.builds(
    TokenClaims,
    token_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    run_id=names,
    worker_name=names,
    scopes=st.lists(st.sampled_from(Scope), min_size=1, unique=True).map(tuple),
    expires_at=st.integers(0, 2**40),
    max_leases=st.integers(1, 1000),
)


@given(claims)
def test_tokens_survive_their_text(made: TokenClaims) -> None:
    text = make_token(made, KEY)
    assert load_claims(text, KEY.public) == load_claims(text, None) == made


@given(st.one_of(st.text(max_size=300), st.text(alphabet="ey._-AZaz09", max_size=200)))
def test_what_is_no_token_is_refused_in_words(text: str) -> None:
    for public in (KEY.public, None):
        with pytest.raises(ContractError, match="this is no access token"):
            load_claims(text, public)


@given(st.dictionaries(st.sampled_from(["jti", "run", "sub", "scopes", "exp", "leases"]), st.none()))
def test_signed_claims_that_are_none_are_refused_in_words(payload: dict[str, None]) -> None:
    with pytest.raises(ContractError, match="claims cannot be read"):
        load_claims(jwt.encode(payload, KEY.private, "EdDSA"), KEY.public)


def test_no_other_algorithm_is_accepted() -> None:
    payload = jwt.decode(make_token(GOOD, KEY), options={"verify_signature": False})
    unsigned = jwt.encode(payload, None, "none")
    # A secret is what everybody knows, for who takes the public key for one.
    shared = jwt.encode(payload, KEY.public, "HS256")
    for text in (unsigned, shared):
        with pytest.raises(ContractError, match="not signed with EdDSA"):
            load_claims(text, KEY.public)


def test_a_signature_counts_for_one_key_and_one_text() -> None:
    text = make_token(GOOD, KEY)
    other = SigningKey(Ed25519PrivateKey.generate())
    with pytest.raises(ContractError, match="signature is not right"):
        load_claims(text, other.public)
    head, body, signature = text.split(".")
    swapped = make_token(TokenClaims("0" * 32, "run", "w", (Scope.ADMIN,), 2**31, 1), KEY).split(".")[1]
    with pytest.raises(ContractError, match="signature is not right"):
        load_claims(".".join((head, swapped, signature)), KEY.public)
    assert load_claims(".".join((head, body, signature)), KEY.public) == GOOD


def test_nothing_long_is_looked_at() -> None:
    text = make_token(GOOD, KEY)
    assert len(text) < 400
    with pytest.raises(ContractError, match="this is no access token"):
        load_claims(text + "A" * LONGEST_TOKEN, KEY.public)
