"""Environments: the interpreters of the clients, each with a cookbook of its own beside the SDK.

They know nothing of this project. Each is made once, in the user's cache, from the list of all of its
packages that lies with the examples, so that nothing has to be resolved.
"""

import os
import subprocess
import venv
from pathlib import Path

from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.benchmarks.parts.own_environment import MissingToolError

EXAMPLES = PROJECT / "examples" / "door"
COOKBOOKS = ("0.6.1", "0.5.8")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Has the CPU build of torch where no configured source does."""
INSTALL_S = 900.0


def client_python(cookbook: str) -> Path:
    """Return the interpreter of an environment with this version of the cookbook, made if need be.

    Raises:
        MissingToolError: when it cannot be made, with what pip said.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "antiphon"
    folder, wanted = cache / f"cookbook-{cookbook}", EXAMPLES / f"cookbook-{cookbook}.txt"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.is_file() and complete.read_text() == wanted.read_text():
        return python
    cache.mkdir(parents=True, exist_ok=True)
    venv.create(folder, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(wanted)]
    for more in ([], ["--extra-index-url", TORCH_INDEX]):
        done = subprocess.run(
            [*command, *more],
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            env={**os.environ, "PYTHONPATH": ""},
        )
        if done.returncode == 0:
            complete.write_text(wanted.read_text())
            return python
    raise MissingToolError(
        f"the environment of cookbook {cookbook} cannot be made: {done.stderr.strip()[-600:]}"
    )
