"""Benchmark tables: one JSON file for each commit that was measured, kept, compared and pinned.

`<folder>/<commit>.json` is what was measured of a commit, `metrics.json` the medians of the
newest table in the form that `dvc metrics` reads, `history.json` the medians of all of them in
the form that `dvc plots` reads. A commit that is measured again replaces its table; the ledger
keeps both, because its entries are named after their content.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from antiphon.benchmarks.parts.nightly.regressions import Comparison, Direction, Verdict, compare, measure_for
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.lineage.documents.manifest import code_revision, flatten_config, hardware
from antiphon.lineage.ledger.pins import Ledger
from antiphon.system.files import write_atomically

FORMAT = 1
"""Raised when a field changes its meaning."""

COMMIT_DIGITS = 12
"""Digits of a commit in file names and tables."""

PLACES = frozenset(
    {
        "coordinator.journal_url",
        *(f"record.{name}" for name in ("artifact_url", "artifact_endpoint", "ledger")),
        *(
            f"services.{name}"
            for name in ("host", "address", "credentials", "coordinator_port", "metrics_port")
        ),
    }
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
        found = {}
        for case in self.cases.keys() & other.cases.keys():
            here, there = self.settings.get(case, {}), other.settings.get(case, {})
            if here and there:
                pairs = {
                    name: (there.get(name, ""), here.get(name, "")) for name in here.keys() | there.keys()
                }
                fields = {name: pairs[name] for name in sorted(pairs) if pairs[name][0] != pairs[name][1]}
            else:  # a table of a time when they were not recorded, or a script, which has none
                fields = {} if here == there else {"configuration": ("not recorded", "recorded")}
            if fields:
                found[case] = fields
        return dict(sorted(found.items()))

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
