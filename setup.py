"""What pyproject.toml cannot say: benchmarks can be imported in a checkout and are no part of a wheel."""

from setuptools import setup
from setuptools.command.build_py import build_py

CHECKOUT_ONLY = "antiphon.benchmarks"


class BuildPy(build_py):
    """Leaves the benchmarks out, unless the installation points at the checkout."""

    def run(self) -> None:
        """Build the packages."""
        if not self.editable_mode:
            self.packages = [name for name in self.packages if not name.startswith(CHECKOUT_ONLY)]
        super().run()


setup(cmdclass={"build_py": BuildPy})
