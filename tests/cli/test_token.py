"""An access token that lets its worker do nothing is not made."""

import pytest

from antiphon.cli.token import _scopes
from antiphon.core.errors import ConfigError
from antiphon.core.trust.access_tokens import Scope


def test_scopes_without_leases_are_refused() -> None:
    assert _scopes("lease, submit,pull") == (Scope.LEASE, Scope.SUBMIT, Scope.PULL)
    assert _scopes("admin") == (Scope.ADMIN,)
    for text in ("submit", "submit,pull", ""):
        with pytest.raises(ConfigError, match=f"--scopes {text} lets a worker do nothing.*add lease"):
            _scopes(text)
