"""Tests that need the sandbox say so."""

import os
import shutil

import pytest

from antiphon.system.sandbox import PROGRAM


def needs_bubblewrap() -> None:
    """Skip the test, and in CI fail it, without bubblewrap."""
    if shutil.which(PROGRAM) is None:
        reason = "needs the package bubblewrap"
        if os.environ.get("ANTIPHON_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
