"""Spared libraries: transformers loads sooner and knows what it knew."""

import json
import subprocess
import sys
from importlib.metadata import packages_distributions, version

from antiphon.models.spared_libraries import NAMED_ALIKE, Packages

PROGRAM = """
import importlib.metadata, json
from antiphon.models.spared_libraries import NAMED_ALIKE, spare_unused_libraries

before = importlib.metadata.packages_distributions
spare_unused_libraries()
assert importlib.metadata.packages_distributions is before
from transformers.utils import import_utils

assert not import_utils.PACKAGE_DISTRIBUTION_MAPPING, "something else was asked for; is it called alike?"
found = {name: import_utils._is_package_available(name, return_version=True)[1] for name in NAMED_ALIKE}
print(json.dumps(found))
"""


def test_no_package_is_read_until_one_may_be_called_otherwise() -> None:
    packages, known = Packages(), packages_distributions()
    assert [packages.get(name, []) for name in NAMED_ALIKE] == [[]] * len(NAMED_ALIKE) and not packages
    assert packages.get("yaml") == known["yaml"] and packages == known


def test_transformers_finds_the_versions_of_those_that_are_called_alike() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: version(name.replace("_", "-")) for name in NAMED_ALIKE}
