"""What pyproject.toml cannot say: a wheel holds no benchmarks, and copies of examples/ and prefect.yaml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CHECKOUT_ONLY = "antiphon.benchmarks"


class BuildPy(build_py):
    """Leaves the benchmarks out and copies what is no code, except where the checkout is installed."""

    def run(self) -> None:
        """Build the packages."""
        if not self.editable_mode:
            self.packages = [name for name in self.packages if not name.startswith(CHECKOUT_ONLY)]
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "antiphon"  # beside the packages, as in the checkout
            self.copy_file("prefect.yaml", str(package / "prefect.yaml"))
            left = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            shutil.copytree("examples", package / "examples", ignore=left, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildPy})
