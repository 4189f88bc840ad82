"""Packages: where Python code that is not ours lies, whose release it is, and a digest of what is in it.

Code is found as Python finds it: installed beside Antiphon, or in a folder that PYTHONPATH names; what is
found in neither is looked for in the working directory.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.config_sections import FILE, EnvironmentSection
from antiphon.core.digests import digest_bytes, digest_file
from antiphon.core.errors import ConfigError
from antiphon.system.rows import split_files

ENVIRONMENTS = "antiphon.environments"
"""Group of the entry points by which installed packages name their environments."""
OURS = {"poker": "antiphon.environments.poker.table:Poker"}
"""Classes of ours that have a plain name."""
_MADE = ("__pycache__",)
"""Folders that Python makes from the others."""


@dataclass(frozen=True, slots=True)
class Package:
    """A top-level package or module."""

    name: str
    path: Path
    """Its folder, or its one file."""

    @property
    def release(self) -> str:
        """Return name and version of the distribution that installed it; empty where none is known."""
        for found in importlib.metadata.distributions():
            declared = (found.read_text("top_level.txt") or found.name.replace("-", "_")).split()
            if self.name in declared:
                return f"{found.name} {found.version}"
        return ""

    @property
    def root(self) -> Path:
        """Return the folder that Python has to search to find it."""
        return self.path.parent

    def digest(self) -> str:
        """Return the digest of its files' names and contents, those that Python makes left out."""
        if self.path.is_file():
            return digest_file(self.path)
        files = sorted(
            path
            for path in self.path.rglob("*")
            if path.is_file() and not {part for part in path.parts if part in _MADE or part.startswith(".")}
        )
        lines = [f"{path.relative_to(self.path).as_posix()} {digest_file(path)}\n" for path in files]
        return digest_bytes("".join(lines).encode())


def find_package(module: str) -> Package | None:
    """Return the top-level package of a module or of `module:Class`; None without one. Nothing of it runs."""
    name = module.partition(":")[0].partition(".")[0]
    spec = _find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    path = Path(places[0])
    if not path.exists():
        return None  # built into Python
    return Package(name, path.resolve())


def reference_of(environment: str) -> str | None:
    """Return `module:Class` of an environment from outside, by its name; None for one of ours, or unknown.

    Names with a slash are ours.
    """
    if ":" in environment:
        return environment
    if "/" in environment:
        return None
    if environment in OURS:
        return OURS[environment]
    found = importlib.metadata.entry_points(group=ENVIRONMENTS, name=environment)
    return next(iter(found)).value if found else None


def package_facts(environment: str) -> dict[str, str]:
    """Return what records say of the package of an environment from outside; empty for one of ours."""
    reference = reference_of(environment)
    package = None if reference is None else find_package(reference)
    if reference is None or package is None:
        return {}
    return {"class": reference, "release": package.release, "digest": package.digest()}


def environment_facts(section: EnvironmentSection) -> dict[str, str]:
    """Return what records say of the package of an environment from outside, or of the files that one reads.

    It is empty for the others, and where such a file is not on this machine.
    """
    facts = package_facts(scored_by(section))
    if section.name != FILE:
        return facts
    try:
        files = split_files(section.parameters)
        digests = {split: digest_of(found) for split, found in files.items()}
    except (ConfigError, OSError):
        return {}
    whole = digest_bytes("".join([*digests.values(), facts.get("digest", "")]).encode())
    return {"class": FILE, "release": "", **facts, "digest": whole, **digests}


def method_facts(algorithm: AlgorithmSection) -> dict[str, dict[str, str]]:
    """Return what records say of the packages of the user's own objective and advantage, of those here."""
    named = {"objective": algorithm.objective, "advantage": algorithm.advantage or ""}
    found = {field: package_facts(name) for field, name in named.items() if ":" in name}
    return {field: facts for field, facts in found.items() if facts}


def digest_of(files: Sequence[Path]) -> str:
    """Return the digest of files' contents, in their order."""
    return digest_bytes("".join(map(digest_file, files)).encode())


def scored_by(section: EnvironmentSection) -> str:
    """Return by which name the code of an environment is found; of `file` that of its score function."""
    score = str(section.parameters.get("score")) if section.name == FILE else ""
    return score if ":" in score else section.name


def search_working_directory() -> None:
    """Let Python find modules in the working directory, after all other places."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def named_folders() -> list[Path]:
    """Return the folders that PYTHONPATH names, those left out that hold the working directory too."""
    entries = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    here = Path.cwd().resolve()
    return [entry for entry in entries if entry.is_dir() and not here.is_relative_to(entry)]


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    return found or PathFinder.find_spec(name, [str(Path.cwd())])
