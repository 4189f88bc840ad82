"""Samples section of the report: completions of the first and of the last version side by side."""

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from markupsafe import Markup

from antiphon.core.errors import AntiphonError
from antiphon.lineage.samples import Explain, Sample, SampleFiles, first_and_last
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.report.render import render

SPLITS = {"heldout": "Held-out answers", "train": "Completions of training groups"}
LONGEST = 4000
"""Characters of a prompt or an answer on the page; `antiphon evaluate --samples` has all."""

Pair = tuple[Sample | None, Sample | None]


def samples_section(
    run_dir: Path, store: ArtifactStore, explain: Explain | None = None, ledgers: Path | None = None
) -> Markup:
    """Return the section as HTML; empty for a run of which no completion is recorded yet.

    What keeps completions from being read is said there: the rest of the page does not depend on them.
    """
    if not (run_dir / "config.yaml").is_file():
        return Markup()
    problem, parts = "", []
    try:
        files = SampleFiles(run_dir, store, ledgers)
        for split, title in SPLITS.items():
            first, last = first_and_last(files, split, 1, explain)
            if first:
                parts.append((title, first[0].version, last[0].version, list(_pairs(first, last))))
    except AntiphonError as error:
        problem = f"They cannot all be shown: {error}."
    if not (parts or problem):
        return Markup()
    return render("samples.html", parts=parts, longest=LONGEST, run=run_dir.name, problem=problem)


def _pairs(first: list[Sample], last: list[Sample]) -> Iterator[Pair]:
    """Yield best beside best, worst beside worst and random beside random."""
    for kind in ("best", "worst", "random"):
        yield from zip_longest(
            [sample for sample in first if sample.kept_as == kind],
            [] if first[0].version == last[0].version else [s for s in last if s.kept_as == kind],
        )
