"""Where torch cannot compile, a sentence says why before anything starts."""

import shutil
import sys

import pytest

from antiphon.core.errors import ConfigError
from antiphon.cpu.compiler import check_compiler, why_not_compiling


def test_a_compiler_that_is_missing_and_a_path_with_a_blank_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/project/.venv")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert why_not_compiling() is None
    check_compiler("rollout.compiled=true")
    monkeypatch.setattr(sys, "prefix", "/home/new user/.venv")
    with pytest.raises(
        ConfigError, match=r"rollout\.compiled=true .*/home/new user/\.venv has a blank; move"
    ):
        check_compiler("rollout.compiled=true")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "clang++")
    with pytest.raises(ConfigError, match=r"clang\+\+ is not there; install it"):
        check_compiler("learner.compiled=true")
