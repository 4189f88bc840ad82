"""What pyproject.toml cannot say: a wheel holds no benchmarks, and a copy of prefect.yaml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CHECKOUT_ONLY = "antiphon.benchmarks"


class BuildPy(build_py):
    """Leaves the benchmarks out and copies prefect.yaml, unless the installation points at the checkout."""

    def run(self) -> None:
        """Build the packages."""
        if not self.editable_mode:
            self.packages = [name for name in self.packages if not name.startswith(CHECKOUT_ONLY)]
        super().run()
        if not self.editable_mode:
            self.copy_file("prefect.yaml", str(Path(self.build_lib) / "antiphon" / "prefect.yaml"))


setup(cmdclass={"build_py": BuildPy})
