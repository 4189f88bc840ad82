"""Library: reasoning-gym; a process loads the family of the task that it needs, and all only when asked.

The package imports all of its hundred tasks at once, and sympy and matplotlib with them: 1.7 CPU seconds in
each process of a run that builds the environment, where most families of tasks take less than a tenth.
"""

import importlib
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

NAME = "reasoning_gym"
_IMPURE = re.compile(
    r"\b(?:open|input|exit|today|now|loadtxt|time\.time|uuid4)\(|\bos\.(?!path)|hash\(id\(|\bnp\.random"
    r"|\bnumpy(?:\.| import )random|\b(?:tempfile|subprocess|multiprocessing|threading|socket)\b"
    r"|\b(?:sqlite3|pathlib|shelve)\b"
)
"""What code does that leaves files where it runs, asks a person, ends the process, or gives something else in
another process: by files, the clock, addresses, or chance that no seed decides."""
_pure_code: list[dict[str, Any]] = []
"""What codeio may execute: its data are looked through once, which takes more than a second."""


def all_tasks() -> dict[str, Any]:
    """Return every task of the library: name -> (dataset class, configuration class)."""
    importlib.import_module(NAME)
    _complete()
    return dict(_tasks())


def load_task(task: str) -> tuple[Any, Any]:
    """Return the dataset class and the configuration class of a task; its family is loaded if need be.

    Raises:
        KeyError: when the library has no such task.
    """
    if not _whole():
        spec = importlib.util.find_spec(NAME)
        family = None if spec is None else _family_of(task, spec)
        if spec is None or family is None:  # an unknown task, or the one that is made of all others
            return all_tasks()[task]  # type: ignore[no-any-return]
        if NAME not in sys.modules:
            _begin(spec)
        importlib.import_module(f"{NAME}.{family}")
    return _tasks()[task]  # type: ignore[no-any-return]


def create(task: str, **parameters: Any) -> Any:
    """Return a dataset of a task that was loaded; what the task raises of its parameters goes through.

    codeio executes code of its data to make a problem; what is no function of its input is left out.
    """
    dataset = importlib.import_module(f"{NAME}.factory").create_dataset(task, **parameters)
    code = sys.modules.get(f"{NAME}.code.codeio")  # asked for as such, or as a part of composite
    if code is not None and (known := code.CodeIODataset._jsonl_data) and known is not _pure_code:
        _pure_code[:] = [
            entry for entry in known if not _IMPURE.search(entry["code_sample"] + entry["input_generator"])
        ]
        code.CodeIODataset._jsonl_data = _pure_code
    return dataset


def common_scorer() -> Any:
    """Return the function that scores the answers of every task without one of its own."""
    return importlib.import_module(f"{NAME}.dataset").ProceduralDataset.score_answer


def _tasks() -> Any:
    return importlib.import_module(f"{NAME}.factory").DATASETS


def _whole() -> bool:
    """Return whether the package was imported with all of its families."""
    return NAME in sys.modules and "__getattr__" not in vars(sys.modules[NAME])


def _begin(spec: ModuleSpec) -> None:
    """Put the package in its place without its families; who asks it for more gets all of it."""
    package = importlib.util.module_from_spec(spec)

    def complete(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        _complete()
        return getattr(package, name)

    package.__getattr__ = complete  # type: ignore[method-assign]
    sys.modules[NAME] = package
    importlib.import_module(f"{NAME}.coaching")  # first, as in the package: its modules import each other


def _family_of(task: str, spec: ModuleSpec) -> str | None:
    named = re.compile(rf"""^DATASET_NAME = ["']{re.escape(task)}["']""", re.MULTILINE)
    for place in spec.submodule_search_locations or ():
        for path in sorted(Path(place).glob("*/*.py")):
            if named.search(path.read_text(encoding="utf-8")):
                return path.parent.name
    return None


def _complete() -> None:
    """Execute the package's own file if only families were loaded."""
    package = sys.modules[NAME]
    if not _whole() and package.__spec__ is not None and package.__spec__.loader is not None:
        del package.__getattr__
        package.__spec__.loader.exec_module(package)
