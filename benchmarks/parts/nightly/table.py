"""Benchmark tables: one JSON file for each commit that was measured, kept, compared and pinned.

`<folder>/<commit>.json` is what was measured of a commit, `metrics.json` the medians of the
newest table in the form that `dvc metrics` reads, `history.json` the medians of all of them in
the form that `dvc plots` reads. A commit that is measured again replaces its table; the ledger
keeps both, because its entries are named after their content.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from math import isfinite, sqrt
from pathlib import Path
from statistics import median
from typing import Any, Self

from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.lineage.documents.manifest import code_revision, flatten_config, hardware
from antiphon.lineage.ledger.pins import Ledger
from antiphon.system.files import write_atomically

MAD_TO_DEVIATION = 1.4826
"""Standard deviations in a median absolute deviation, for normal noise."""
NOISE_FACTOR = 3.0
"""Standard errors, and usual distances between commits, that are taken for noise."""
AGREEING_SHARE = 0.75
"""Share of the pairs that must point the same way."""
FEW_PAIRS = 3
"""With fewer pairs than this, the tolerance counts twice."""
HISTORY_COMMITS = 10
"""Newest earlier tables that the usual distance is taken from."""
SIZE = re.compile(r"c?\d+")
"""Part of a measure's name that says at which size it was measured."""


class Direction(StrEnum):
    """Which way a measure should go."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"
    """Shown, never compared."""


class Verdict(StrEnum):
    """What became of a measure."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    """No change beyond noise."""
    UNDECIDED = "undecided"
    """Nothing to compare with, or a measure that has no better side."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One measured quantity of a benchmark table."""

    name: str
    better: Direction = Direction.NEITHER
    tolerance: float = 0.05
    """Relative change that counts for nothing."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of two tables."""

    measure: Measure
    verdict: Verdict
    pairs: int
    """Cases that both tables have."""
    before: float | None
    """Median of the shared cases in the earlier table, in the measure's unit."""
    after: float | None
    change: float | None
    """Median relative change of the pairs, positive when the measure grew."""
    allowance: float | None
    """Relative change up to which it counts as noise."""


def measure_for(name: str) -> Measure:
    """Return which way a measure should go, by its name; unknown names are only shown.

    Of a dotted name the last part decides that is no size such as `64` or `c64`.

    >>> [measure_for(name).better.value for name in ("loop_s", "pairs_per_s", "ratio.c64", "s3.missing")]
    ['lower', 'higher', 'higher', 'lower']
    """
    parts = [part for part in name.split(".") if not SIZE.fullmatch(part)]
    said = parts[-1] if parts else name
    if said in KNOWN:
        return replace(KNOWN[said], name=name)
    if said.endswith(("_per_second", "_per_s", "_per_cpu_s")):
        return Measure(name, Direction.HIGHER, 0.10)
    if said.endswith(("_s", "_ms", "_seconds", "_gb", "_mib")) or said.startswith("seconds_per"):
        return Measure(name, Direction.LOWER, 0.10)
    return Measure(name)


def compare(
    measure: Measure,
    before: Mapping[str, float],
    after: Mapping[str, float],
    history: Sequence[Mapping[str, float]] = (),
) -> Comparison:
    """Compare one measure of two tables, case -> value each; `history`: the tables before, oldest first."""
    shared = [c for c in sorted(before) if c in after and isfinite(before[c]) and isfinite(after[c])]
    if not shared:
        return Comparison(measure, Verdict.UNDECIDED, 0, None, None, None, None)
    changes = _changes([before[c] for c in shared], [after[c] for c in shared])
    middle = median(changes)
    tolerance = measure.tolerance if len(changes) >= FEW_PAIRS else 2.0 * measure.tolerance
    deviation = MAD_TO_DEVIATION * median(abs(change - middle) for change in changes)
    usual = usual_distance([*history, before])
    allowance = max(tolerance, NOISE_FACTOR * deviation / sqrt(len(changes)), NOISE_FACTOR * usual)
    agreeing = sum(change * middle > 0.0 for change in changes)
    if measure.better is Direction.NEITHER:
        verdict = Verdict.UNDECIDED
    elif abs(middle) <= allowance or agreeing < AGREEING_SHARE * len(changes):
        verdict = Verdict.SAME
    else:
        verdict = Verdict.BETTER if (middle > 0.0) == (measure.better is Direction.HIGHER) else Verdict.WORSE
    was, now = (median(table[c] for c in shared) for table in (before, after))
    return Comparison(measure, verdict, len(shared), was, now, middle, allowance)


def usual_distance(history: Sequence[Mapping[str, float]]) -> float:
    """Return the median relative distance between successive tables; 0 with fewer than three.

    Two tables have one distance, and that may be the very change in question.

    >>> round(usual_distance([{"a": 10.0}, {"a": 11.0}, {"a": 10.0}]), 3)
    0.091
    """
    recent = history[-HISTORY_COMMITS:]
    distances = []
    for earlier, later in pairwise(recent):
        shared = [c for c in earlier if c in later and isfinite(earlier[c]) and isfinite(later[c])]
        if shared:
            distances.append(abs(median(_changes([earlier[c] for c in shared], [later[c] for c in shared]))))
    return median(distances) if len(distances) >= 2 else 0.0


def _changes(before: Sequence[float], after: Sequence[float]) -> list[float]:
    # The larger of the two values is the scale, so that a change and its way back weigh the same.
    return [0.0 if a == b else (a - b) / max(abs(a), abs(b)) for b, a in zip(before, after, strict=True)]


_SIDES = (
    # Broken promises, where any growth is a regression, and kept ones, where any fall is.
    (Direction.LOWER, 0.0, "lost twice beyond_bound wrong wrong_tokens postgres_wrong idle_wrong"),
    (Direction.LOWER, 0.0, "other_exits violations"),
    (Direction.LOWER, 0.0, "crashes state_changes missing doubled damaged not_completed false_positives"),
    (Direction.LOWER, 0.0, "metrics_missing versions_missing batches_missing"),
    (Direction.HIGHER, 0.0, "steps_equal_share logprobs_equal_share identical_share"),
    (Direction.HIGHER, 0.05, "ratio_min unhelpful unhelpful_to_keyed no_history"),
    (Direction.HIGHER, 0.08, "pass_after pass_last_three"),
    (Direction.HIGHER, 0.10, "ratio ratio_over_stage_sum greedy sampled"),
    (Direction.HIGHER, 0.10, "drafting_acceptance tokens_per_pass drafting_tokens_per_pass"),
    (Direction.HIGHER, 0.15, "pass_gain"),
    (Direction.LOWER, 0.20, "learner_idle_share idle_share heartbeats_core_share"),
    (Direction.LOWER, 0.50, "dropped_stale_share stale_share idle_share_overlapped"),
    (Direction.LOWER, 0.50, "wall_share cpu_share wasted_share lost_throughput"),
    # What was asked for, whatever its name ends with: shown, never rewarded.
    (Direction.NEITHER, 0.0, "down_s idle_workers heartbeats_per_s virtual_hours"),
)
KNOWN = {name: Measure(name, side, tolerance) for side, tolerance, names in _SIDES for name in names.split()}
"""Measures whose name alone does not show their better side."""


FORMAT = 1
"""Raised when a field changes its meaning."""

COMMIT_DIGITS = 12
"""Digits of a commit in file names and tables."""

PLACES = frozenset(
    {"coordinator.journal_url"}
    | {f"record.{name}" for name in ("artifact_url", "artifact_endpoint", "ledger")}
    | {f"services.{n}" for n in ("host", "address", "credentials", "coordinator_port", "metrics_port")}
)
"""Fields of a configuration that change with the machine and not with the work."""

LEDGER_NAME = "benchmarks"
"""The ledger that the tables are pinned in, beside those of the runs."""


@dataclass(frozen=True, slots=True)
class BenchmarkTable:
    """What was measured of one commit."""

    commit: str
    """The first digits of the commit; with + and a digest of the changes when there were some."""
    at: str
    """When it was measured, ISO 8601, UTC."""
    machine: str
    """Kind of machine; tables of different kinds are never compared."""
    cases: dict[str, dict[str, float]]
    """Case -> metric -> value, in the metric's unit."""
    weights: dict[str, str] = field(default_factory=dict)
    """Case -> digest of the final weights; equal digests say that nothing about learning changed."""
    failed: dict[str, str] = field(default_factory=dict)
    """Case -> why it has no metrics."""
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """Case -> field -> value: its resolved configuration, without what only says where things lie; a script
    has none beside its arguments, which are its name."""

    def differs(self, other: Self) -> dict[str, dict[str, tuple[str, str]]]:
        """Return case -> field -> (value in `other`, value here), for cases of both whose settings differ."""
        found: dict[str, dict[str, tuple[str, str]]] = {}
        for case in sorted(self.cases.keys() & other.cases.keys()):
            here, there = self.settings.get(case, {}), other.settings.get(case, {})
            if bool(here) != bool(there):  # a table of a time when they were not recorded
                found[case] = {"configuration": ("not recorded", "recorded")}
                continue
            names = sorted(here.keys() | there.keys())
            pairs = {name: (there.get(name, ""), here.get(name, "")) for name in names}
            if fields := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
                found[case] = fields
        return found

    def like(self, other: Self) -> Self:
        """Return this table with only those cases that `other` has with equal settings."""
        differing = self.differs(other)
        cases = {c: m for c, m in self.cases.items() if c in other.cases and c not in differing}
        return replace(self, cases=cases)

    def judged(self) -> list[str]:
        """Return the names of the metrics that have a better side."""
        return [name for name in self.names() if measure_for(name).better is not Direction.NEITHER]

    def metric(self, name: str) -> dict[str, float]:
        """Return case -> value of one metric, where it was measured."""
        return {case: metrics[name] for case, metrics in self.cases.items() if name in metrics}

    def names(self) -> list[str]:
        """Return the names of all metrics, in the order in which they came."""
        return list(dict.fromkeys(name for metrics in self.cases.values() for name in metrics))

    def medians(self) -> dict[str, float]:
        """Return metric with a better side -> median over the cases that have it."""
        return {name: median(self.metric(name).values()) for name in self.judged()}


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """A table and what became of each metric since the one before."""

    table: BenchmarkTable
    before: str
    """Commit it was compared with; empty when there was none."""
    comparisons: tuple[Comparison, ...]
    differing: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    """Case -> field -> (before, now), for cases that were not compared: their settings differ."""

    def worse(self) -> list[str]:
        """Return the metrics that got worse beyond noise."""
        return [c.measure.name for c in self.comparisons if c.verdict is Verdict.WORSE]

    def other_weights(self, earlier: BenchmarkTable | None) -> list[str]:
        """Return the cases that ended with other weights than in the earlier table."""
        known = earlier.weights if earlier is not None else {}
        return [case for case, digest in self.table.weights.items() if known.get(case, digest) != digest]


def name_of_commit(project: Path) -> str:
    """Return the name of a table measured now: the commit of `project`, or `unversioned` without git."""
    revision = code_revision(project)
    if not revision:
        return "unversioned"
    name = str(revision["revision"])[:COMMIT_DIGITS]
    return f"{name}+{str(revision['changes_md5'])[:8]}" if revision["modified"] else name


def settings_of(config: RunConfig) -> dict[str, str]:
    """Return field -> value of a resolved configuration, without what only says where things lie."""
    return {name: value for name, value in flatten_config(config).items() if name not in PLACES}


def name_of_machine() -> str:
    """Return the kind of this machine, by which tables are kept apart."""
    found = hardware()
    gpus = ", ".join(found["gpus"]) or "no GPU"
    return f"{found['cpu']}, {found['cores']} cores, {gpus}"


def compare_tables(table: BenchmarkTable, earlier: Sequence[BenchmarkTable]) -> ComparedTable:
    """Compare a table with the newest earlier one of another commit on the same kind of machine.

    Only cases with equal settings are compared, and only metrics that have a better side. `earlier` has all
    others, oldest first; their spread counts as noise too.
    """
    others = [t for t in earlier if t.machine == table.machine and t.commit != table.commit]
    comparable = [like for t in others if (like := t.like(table)).cases]
    before = comparable[-1] if comparable else None
    comparisons = tuple(
        compare(
            measure_for(name),
            before.metric(name) if before else {},
            table.metric(name),
            [t.metric(name) for t in comparable[:-1]],
        )
        for name in table.judged()
    )
    named = next((t for t in reversed(others) if before is None or t.commit == before.commit), None)
    differing = table.differs(named) if named is not None else {}
    return ComparedTable(table, before.commit if before else "", comparisons, differing)


def read_tables(folder: Path) -> list[BenchmarkTable]:
    """Return all tables of a folder, oldest first.

    Raises:
        IntegrityError: when a file is no table of this format.
    """
    derived = {"metrics.json", "history.json"}
    tables = [read_table(path) for path in sorted(folder.glob("*.json")) if path.name not in derived]
    return sorted(tables, key=lambda table: table.at)


def read_table(path: Path) -> BenchmarkTable:
    """Read one table back.

    Raises:
        IntegrityError: when the file is no table of this format.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain.pop("format") != FORMAT:
            raise ValueError("another format")
        return BenchmarkTable(**{key: plain[key] for key in plain.keys() - {"before", "verdicts"}})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{path} is no benchmark table of format {FORMAT} ({error}); restore it or move it elsewhere"
        ) from error


def write_table(folder: Path, compared: ComparedTable) -> Path:
    """Write a compared table and the two files derived from all of them; return the table's path.

    Raises:
        UnavailableError: when there is no space left.
    """
    table = compared.table
    path = folder / f"{table.commit}.json"
    verdicts = {c.measure.name: c.verdict.value for c in compared.comparisons}
    _write(path, {"format": FORMAT, **asdict(table), "before": compared.before, "verdicts": verdicts})
    history = [{"at": t.at, "commit": t.commit, **t.medians()} for t in read_tables(folder)]
    _write(folder / "history.json", history)
    summary = {"commit": table.commit, "regressions": len(compared.worse()), "metrics": table.medians()}
    _write(folder / "metrics.json", summary)
    return path


def pin_table(path: Path, project: Path, ledger: str) -> str:
    """Pin a table in the DVC ledger of benchmarks, in the project's folder `ledger`; return its md5.

    Raises:
        ConfigError: when `project` is in no DVC project.
        UnavailableError: when the cache or the folder cannot be used.
    """
    payload = path.read_bytes()
    with closing(Ledger(project, ledger, LEDGER_NAME, kept=False)) as book:
        return book.append(f"{path.stem}/{digest_bytes(payload)[:16]}.json", payload)


def _write(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
