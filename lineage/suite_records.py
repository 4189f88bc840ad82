"""Suite records: what versions of a run scored on suites, a file for each result in the run's folder.

The ledger keeps them too, so the report of a run shows them on any machine. What was found again is the same
file.
"""

from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.core.reporting.suite_scores import SuiteResult
from antiphon.system.files import write_atomically

PATTERN = "suite-*.json"
_RESULT = TypeAdapter(SuiteResult)


def write_result(run_dir: Path, result: SuiteResult) -> None:
    """Keep a result of a run.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    body = _RESULT.dump_json(replace(result, sampled=0, cached=0))
    name = PATTERN.replace("*", f"{result.suite}-v{result.version}-{digest_bytes(body)[:12]}")
    write_atomically(run_dir / name, body)


def read_results(run_dir: Path) -> list[SuiteResult]:
    """Return the results of a run by suite and version.

    Raises:
        IntegrityError: for a file that is none.
    """
    found = []
    for path in run_dir.glob(PATTERN):
        try:
            found.append(_RESULT.validate_json(path.read_bytes()))
        except ValidationError as error:
            raise IntegrityError(f"{path} is no result of a suite; move it elsewhere") from error
    return sorted(found, key=lambda one: (one.suite, one.version or 0, one.samples, one.file_digest))
