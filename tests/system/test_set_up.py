"""No library reports its use, whatever command runs."""

import os
import subprocess
import sys

from antiphon.system.set_up import NO_REPORTS


def test_every_command_and_what_it_starts_reports_nothing() -> None:
    code = """
import os, sys
from antiphon.cli import app
app.execute = lambda arguments: print(*(os.environ.get(name) for name in sys.argv[1:])) or 0
app.main()
"""
    variables = {name: value for name, value in os.environ.items() if name not in NO_REPORTS}
    for given in ({}, {"DO_NOT_TRACK": "0"}):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *NO_REPORTS],
            env=variables | given,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split() == list((NO_REPORTS | given).values())
