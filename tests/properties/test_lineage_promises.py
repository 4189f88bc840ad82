"""Promise of the lineage: one bit altered anywhere in store, ledger or DVC cache is found and named."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.lineage.ledger.verify import (
    Findings,
    RunCheck,
    ShardCheck,
    Verification,
    identity,
    verify_run,
    verify_store,
)
from tests.support.artifacts import RecordedRun
from tests.support.damage import files_of_run, flipped

SEED = 20261121
FLIPS = 100


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A recorded run of every kind of artifact."""
    run = RecordedRun(tmp_path_factory.mktemp("lineage") / "home")
    run.complete(3)
    return run


def cached(run: RecordedRun) -> Callable[[str], Path]:
    """Tell where DVC's cache keeps an object, without opening the project each time."""
    cache = run.home / ".dvc" / "cache" / "files" / "md5"
    return lambda md5: cache / md5[:2] / md5[2:]


def check(run: RecordedRun) -> Verification:
    return RunCheck(run.run_dir, run.store.root).check(run.ledger, cached(run))


def test_every_flipped_bit_is_found_and_named(run: RecordedRun) -> None:
    print(f"seed {SEED}")
    sound = verify_run(run.run_dir, run.store.root, run.home, "ledger")
    assert sound.findings == () == check(run).findings and sound.files > 30
    assert verify_store(run.store.root).findings == ()
    chance = random.Random(SEED)
    files = files_of_run(run.home, run.run_id)
    weights = [path.stat().st_size for path in files]
    named = 0
    for number in range(FLIPS):
        # Half of them anywhere among the bytes, half in any file, so that small ones get their share.
        path = chance.choices(files, weights)[0] if number % 2 else chance.choice(files)
        position, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        with flipped(path, position, bit):
            place = identity(path)
            findings = check(run).findings
            found = [f for f in findings if any(p.exists() and identity(p) == place for p in f.paths)]
            assert found, f"seed {SEED}, flip {number}: bit {bit} of byte {position} of {path} was not named"
            assert all(finding.fix and finding.artifact for finding in found)
            named += 1
    assert named == FLIPS
    assert check(run).findings == ()


def test_no_byte_of_the_pointer_slips_through(run: RecordedRun) -> None:
    """The pointer has no digest of its own and is compared field by field."""
    pointer = run.ledger / f"{run.run_id}.dvc"
    for position in range(pointer.stat().st_size):
        bit = position % 8
        with flipped(pointer, position, bit):
            findings = Findings()
            ShardCheck(run.ledger / run.run_id, cached(run), findings).check()
            named = any(pointer in finding.paths for finding in findings.result().findings)
            assert named, f"bit {bit} of byte {position}"


def test_every_deleted_file_is_found_and_named(run: RecordedRun) -> None:
    aside = run.home / "aside"
    for path in files_of_run(run.home, run.run_id):
        folders = (run.store.root, run.ledger, run.home / ".dvc" / "cache")
        names = [p for folder in folders for p in folder.rglob("*")]
        same = [p for p in names if p.is_file() and identity(p) == identity(path)]
        for name in same:
            os.rename(name, aside)
            findings = check(run).findings
            os.rename(aside, name)
            told = any(name in f.paths or str(name) in f.problem for f in findings)
            assert told, f"{name} was missing, and nobody said so: {[f.sentence for f in findings]}"
