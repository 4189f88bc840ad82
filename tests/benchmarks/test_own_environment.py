"""An environment that was made before sees the packages of the project that uses it now."""

import sysconfig
from pathlib import Path

import pytest

from antiphon.benchmarks.parts.own_environment import python_with


def test_an_environment_made_by_another_clone_sees_the_packages_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "antiphon" / "tool-1.0"
    site = folder / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "project.pth").write_text("import site; site.addsitedir('/gone')\n")
    (folder / "complete").touch()
    assert python_with(("tool==1.0",), beside_project=True) == folder / "bin" / "python"
    assert sysconfig.get_paths()["purelib"] in (site / "project.pth").read_text()
