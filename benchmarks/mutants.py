"""Mutants: small changes, one at a time, which tests or the simulator must see.

A copy of the repository is changed. First come the changes of `NAMED`: each breaks one promise of the
coordinator, and the test that is named beside it must pass without the change and fail with it.
Then cosmic-ray, a kept tool that is installed into an environment of its own, changes `core/loop`. For each
change that is drawn, the tests of `core/loop` run, and if they pass, simulated runs. A change
that both let pass survives. Those that are known stand in `benchmarks/data/mutants.yaml`, each
with the reason why nothing can or need see it; any other one is a violation. Changes that cannot
do anything are left out: of type annotations, and of `is` to `==`.

    .venv/bin/python benchmarks/mutants.py --mutants 100
    .venv/bin/python benchmarks/mutants.py --mutants 100 --seed 1     # others
    .venv/bin/python benchmarks/mutants.py --mutants 0                # those of `NAMED` alone

Some thousand changes are possible, so a schedule draws others each week.
"""

import dataclasses
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from antiphon.benchmarks.parts.own_environment import MissingToolError, python_with
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish

TOOL = ("cosmic-ray==8.7.0",)
ROOT = Path(__file__).resolve().parents[1]
LISTED = yaml.safe_load((ROOT / "benchmarks" / "data" / "mutants.yaml").read_text(encoding="utf-8"))
CHANGED = "core/loop"
TESTS = "--doctest-modules core/loop tests/core/loop tests/properties/test_{ledger,partials,run_state}_*.py"
"""Of `core/loop`, its examples included, for bash."""
SEEDS = "0..11"
"""Simulated runs that must see what the tests let pass."""
TIMEOUT_S = 300.0
"""Of all that is run for one mutant; who takes longer waits for something that never comes."""
LEFT_OUT = (
    "core/ReplaceBinaryOperator_BitOr_",
    "core/ReplaceComparisonOperator_Is_Eq",
    "core/ReplaceComparisonOperator_IsNot_NotEq",
)
"""Changes of `A | B` between types; and of `is`, which is only used for None and enumerations, to `==`."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamedMutant:
    """One change that is always tried, and the test that must see it."""

    breaks: str
    """What does not hold with it."""
    file: str
    old: str
    """Stands in the file once."""
    new: str
    test: str
    """File and function, as pytest names them."""


NAMED = [NamedMutant(**one) for one in LISTED["named"]]


class StaleMutantError(Exception):
    """A change of `NAMED` that fits the code no more; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """One change."""

    module: str
    definition: str
    """Function or class that it is in."""
    operator: str
    line: str
    """The line that it changes."""
    occurrence: int = 0
    """Which of several such changes in the module; it moves with other code and tells no mutants apart."""

    @property
    def known_as(self) -> tuple[str, str, str, str]:
        """Return what stays the same when other code changes."""
        return (self.module, self.definition, self.operator, self.line)

    def __str__(self) -> str:
        return f"{self.module}, {self.definition}: {self.operator} in `{self.line}`"


def main() -> int:
    """Draw mutants as the command line says; the exit code is 1 when one survives without a reason."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--mutants", type=int, default=100, help="how many are drawn (default 100)")
    parser.add_argument("--seed", type=int, default=None, help="which are drawn (default: the week's number)")
    arguments = parser.parse_args()
    seed = int(time.time() // (7 * 86400)) if arguments.seed is None else arguments.seed
    found: dict[Mutant, bool] = {}
    possible = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        _copy_to(copy)
        try:
            named = _surviving_named(copy)
            if arguments.mutants:
                tool = python_with(TOOL, beside_project=False).with_name("cosmic-ray")
                found, possible = _outcomes(copy, tool, arguments.mutants, seed)
        except StaleMutantError as stale:
            print(f"mutants.py: {stale}", file=sys.stderr)
            return 2
        except MissingToolError as missing:
            print(f"mutants.py: {missing}; it needs a package index", file=sys.stderr)
            return 2
    reasons = {Mutant(**entry["mutant"]).known_as: entry["reason"] for entry in LISTED["surviving"]}
    surviving = [mutant for mutant, killed in found.items() if not killed]
    unexplained = [mutant for mutant in surviving if mutant.known_as not in reasons]
    for mutant in surviving:
        print(f"survives: {mutant}: {reasons.get(mutant.known_as, 'without a reason')}")
    result = {
        "named": len(NAMED),
        "named_surviving": len(named),
        "possible": possible,
        "mutants": len(found),
        "seed": seed,
        "killed_share": round(1.0 - len(surviving) / max(1, len(found)), 4),
        "mutants_surviving": len(surviving),
        "unexplained": len(unexplained),
    }
    violated = [f"{one.test} passes although this is broken: {one.breaks}" for one in named]
    violated += [f"{mutant} survives" for mutant in unexplained]
    return finish(result, record=arguments.record, violated=violated)


def _surviving_named(copy: Path) -> list[NamedMutant]:
    """Return the changes of `NAMED` that their tests let pass, each tried alone in a copy of the repository.

    Raises:
        StaleMutantError: when the old text of one is not there once, or its test fails without it.
    """
    texts = {one.file: (copy / one.file).read_text(encoding="utf-8") for one in NAMED}
    for one in NAMED:
        if (count := texts[one.file].count(one.old)) != 1:
            raise StaleMutantError(
                f"{one.file} has {one.old!r} {count} times, not once; "
                f"say again in NAMED what breaks this: {one.breaks}"
            )

    def status(*tests: str) -> int:
        words = ["-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
        return subprocess.run(
            [sys.executable, *words], cwd=copy, env=_environment(copy), stdout=subprocess.DEVNULL
        ).returncode

    if (ended := status(*(one.test for one in NAMED))) != 0:
        raise StaleMutantError(
            f"the tests of NAMED end with status {ended} without a change; mend them, or name others"
        )
    surviving = []
    for one in NAMED:
        (copy / one.file).write_text(texts[one.file].replace(one.old, one.new), encoding="utf-8")
        ended = status(one.test)
        (copy / one.file).write_text(texts[one.file], encoding="utf-8")
        print(f"{'survives' if ended == 0 else 'seen'} when it is broken: {one.breaks}", flush=True)
        surviving += [one] if ended == 0 else []
    return surviving


def _outcomes(copy: Path, tool: Path, count: int, seed: int) -> tuple[dict[Mutant, bool], int]:
    """Return whether each mutant was killed that the seed draws, and how many are possible."""
    config, session = copy / "mutants.toml", copy / "mutants.sqlite"
    config.write_text(
        f'[cosmic-ray]\nmodule-path = "{CHANGED}"\ntimeout = {TIMEOUT_S}\nexcluded-modules = []\n'
        f'test-command = "bash mutants.sh"\n[cosmic-ray.distributor]\nname = "local"\n',
        encoding="utf-8",
    )
    (copy / "mutants.sh").write_text(
        f"set -e\n{sys.executable} -m pytest -x -q -n0 -p no:cacheprovider {TESTS}\n"
        f"{sys.executable} -m antiphon.cli.app simulate --seeds {SEEDS}\n",
        encoding="utf-8",
    )
    environment = _environment(copy)

    def run(*command: str) -> None:
        subprocess.run(command, cwd=copy, check=True, env=environment, stdout=subprocess.DEVNULL)

    run("bash", "mutants.sh")  # unchanged, all must pass
    run(str(tool), "init", config.name, session.name)
    with sqlite3.connect(session) as tables:
        query = "SELECT job_id, module_path, definition_name, operator_name, start_pos_row, occurrence"
        rows = tables.execute(f"{query} FROM mutation_specs ORDER BY 2, 4, 6").fetchall()
        mutants = {
            job: Mutant(module, str(definition), operator, _line(copy / module, row), occurrence)
            for job, module, definition, operator, row, occurrence in rows
            if not operator.startswith(LEFT_OUT)
        }
        drawn = random.Random(seed).sample(sorted(mutants), min(count, len(mutants)))
        left_out = [(job,) for job, *_ in rows if job not in set(drawn)]
        for table in ("work_items", "mutation_specs"):
            tables.executemany(f"DELETE FROM {table} WHERE job_id = ?", left_out)
    run(str(tool), "exec", config.name, session.name)
    with sqlite3.connect(session) as tables:
        outcomes = dict(tables.execute("SELECT job_id, test_outcome FROM work_results").fetchall())
    return {mutants[job]: outcomes.get(job) != "SURVIVED" for job in drawn}, len(mutants)


def _environment(copy: Path) -> dict[str, str]:
    paths = {"PYTHONPATH": str(copy / "build" / "typing"), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **paths}


def _copy_to(copy: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["sh", "scripts/links"], cwd=copy, check=True)


def _line(path: Path, row: int) -> str:
    return path.read_text(encoding="utf-8").splitlines()[row - 1].strip()


if __name__ == "__main__":
    execute(main)
