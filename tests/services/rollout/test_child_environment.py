"""What a process that will hold an engine is started with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.services.rollout.engine.environment import child_environment

LIBRARY = Path(sys.prefix) / "lib" / "libiomp5.so"


@pytest.mark.skipif(not LIBRARY.exists(), reason="the OpenMP library is that of CPU builds")
@pytest.mark.parametrize("folder", ["plain", "with a blank"])
@pytest.mark.parametrize("before", [{}, {"LD_LIBRARY_PATH": "/opt/lib"}])
def test_the_openmp_library_is_loaded_from_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, before: dict[str, str]
) -> None:
    (tmp_path / folder / "lib").mkdir(parents=True)
    (tmp_path / folder / "lib" / LIBRARY.name).symlink_to(LIBRARY)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / folder))
    environment = child_environment(1, {"PATH": os.environ["PATH"], **before})
    words = "print(any('libiomp5.so' in line for line in open('/proc/self/maps')))"
    done = subprocess.run(
        [sys.executable, "-c", words], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert environment.get("LD_LIBRARY_PATH", "").endswith(before.get("LD_LIBRARY_PATH", ""))
