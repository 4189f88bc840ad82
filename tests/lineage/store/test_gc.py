"""Garbage collection: nothing that a run, a ledger or an upload needs goes; everything else may."""

import asyncio
import fcntl
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cli.app import execute
from antiphon.core.config import RunConfig, dump_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.core.loop.events import RunPaused, StepCommitted
from antiphon.lineage.ledger.pins import Ledger
from antiphon.lineage.saved_weights import MODEL
from antiphon.lineage.store import artifact_store as store_module
from antiphon.lineage.store.artifact_store import ArtifactStore, Outbox
from antiphon.lineage.store.gc import alone, pinned, survey, sweep
from antiphon.runs import directory as run_directory
from antiphon.services.coordinator.journal.journal import Journal

RECORD = {"record": {"dvc": False, "mlflow": False}}


def put(home: Path, payload: bytes) -> str:
    return ArtifactStore(run_directory.store_directory(home)).put(payload)


def make_run(home: Path, name: str, *, finished: bool = False, dvc: bool = False) -> Path:
    directory = home / "runs" / name
    directory.mkdir(parents=True)
    config = RunConfig.model_validate(RECORD if not dvc else {})
    (directory / "config.yaml").write_text(dump_config(config))
    if finished:
        run_directory.write_outcome(directory, {})
    return directory


def journal_names(directory: Path, *digests: str, step: int | None = None) -> None:
    async def write() -> None:
        journal = Journal(directory / "journal.db", directory.name)
        # Longer than a page of the database, which cuts texts into pieces.
        await journal.enqueue([RunPaused("-" * 5000 + " ".join(digests))])
        if step is not None:
            await journal.enqueue([StepCommitted(step, step + 1, "0" * 64, "1" * 64, {}, True)])
        await journal.close()

    asyncio.run(write())


def collect(home: Path, *arguments: str) -> int:
    return execute(["gc", "--home", str(home), *arguments])


def objects(home: Path) -> set[str]:
    return {path.name for path in (home / "store" / "objects").glob("*/*")}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_only_what_nobody_names_goes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished, finished = make_run(home, "one"), make_run(home, "two", finished=True)
    logged, sealed, told = put(home, b"logged"), put(home, b"sealed"), put(home, b"told")
    manifest = put(home, json.dumps({"batch": told}).encode())
    listed, unneeded = put(home, b"on its way"), put(home, b"unneeded" * 1000)
    (finished / "metrics.jsonl").write_text(json.dumps({"batch_digest": logged}) + "\n")
    (finished / "lineage.json").write_text(json.dumps({"manifest": manifest}))
    journal_names(unfinished, sealed)
    Outbox(home / "store", "/somewhere").add(listed)
    leftover = home / "store/objects" / unneeded[:2] / ".incoming-123"
    leftover.write_bytes(b"half")
    needed = {logged, sealed, told, manifest, listed}

    assert collect(home, "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"would free store/objects/{unneeded[:2]}/{unneeded}" in said
    assert "would free 2 objects, 0.0 MiB; 5 objects are needed" in said
    assert objects(home) == needed | {unneeded, leftover.name}
    assert collect(home) == 0
    assert "freed 2 objects" in capsys.readouterr().out
    assert objects(home) == needed
    assert collect(home) == 0
    assert objects(home) == needed


@pytest.mark.parametrize("log", ["closed", "left by a crash"])
def test_looking_changes_no_journal(home: Path, log: str) -> None:
    """Opening it for writing would raise its epoch, and bring an older schema forward."""
    named, other = put(home, b"named in the journal"), put(home, b"named nowhere")
    run = make_run(home, "run-1")

    async def write() -> None:
        journal = Journal(run / "journal.db", "run-1")
        await journal.enqueue([RunPaused(f"see {named}")])
        if log == "closed":
            await journal.close()
        else:  # what is there when the process is killed now
            for path in sorted(run.glob("journal.db*")):
                shutil.copy(path, path.with_name(f"kept-{path.name}"))
            await journal.close()
            for path in sorted(run.glob("kept-*")):
                path.replace(path.with_name(path.name.removeprefix("kept-")))

    asyncio.run(write())
    journals = {path: path.read_bytes() for path in run.glob("journal*") if not path.name.endswith("-shm")}
    assert execute(["gc", "--dry-run", "--home", str(home)]) == 0
    assert {path: path.read_bytes() for path in journals} == journals
    assert execute(["gc", "--home", str(home)]) == 0
    assert {path: path.read_bytes() for path in journals} == journals
    objects = ArtifactStore(run_directory.store_directory(home))
    assert objects.has(named) and not objects.has(other)


def test_a_journal_that_a_coordinator_has_open_is_not_read(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(home, "run-1")
    journal = Journal(run / "journal.db", "run-1")
    assert execute(["gc", "--dry-run", "--home", str(home)]) == 2
    assert "already has a coordinator" in capsys.readouterr().err
    asyncio.run(journal.close())


def test_a_finished_run_can_be_given_up(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, other = make_run(home, "old", finished=True), make_run(home, "other", finished=True)
    mine, shared, theirs = put(home, b"mine"), put(home, b"shared"), put(home, b"theirs")
    journal_names(old, mine, shared)
    journal_names(other, shared, theirs)
    assert collect(home, "--run", "old", "--dry-run") == 0
    assert "would free run old" in capsys.readouterr().out
    assert old.exists()
    assert collect(home, "--run", "old") == 0
    assert not old.exists()
    assert other.exists()
    assert objects(home) == {shared, theirs}


def test_an_unfinished_run_is_never_given_up(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(home, "going")
    digest = put(home, b"needed")
    journal_names(run, digest, step=0)
    assert collect(home, "--run", "going") == 2
    assert "run going is unfinished after 1 steps" in capsys.readouterr().err
    assert collect(home, "--run", "absent") == 2
    assert collect(home) == 0
    assert run.exists()
    assert objects(home) == {digest}


def test_nothing_is_removed_beside_a_running_job(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(home, "going", finished=True)
    digest = put(home, b"not named yet")
    with run_directory.lock(run):
        assert collect(home) == 2
    assert "already running" in capsys.readouterr().err
    writer = ArtifactStore(home / "store")
    writer.put(b"by a service that was started by hand")
    assert collect(home) == 2
    assert "is in use by a run" in capsys.readouterr().err
    assert digest in objects(home)
    del writer
    assert collect(home) == 0
    assert objects(home) == set()


def test_a_writer_waits_while_the_store_is_cleaned(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CLEANING_TIMEOUT_S", 0.05)
    store = ArtifactStore(home / "store")
    with alone(home / "store"), pytest.raises(UnavailableError, match="antiphon gc"):
        store.put(b"payload")
    assert store.put(b"payload") == digest_bytes(b"payload")
    with pytest.raises(ConfigError, match="in use"), alone(home / "store"):
        raise AssertionError("two hold it")


def test_what_a_ledger_pins_stays(home: Path, tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n no_scm = true\n")
    make_run(home, "kept", finished=True, dvc=True)
    store = ArtifactStore(home / "store")
    published, appended, free = store.put(b"published"), store.put(b"appended"), store.put(b"free")
    ledger = Ledger(tmp_path, "ledger", "kept")
    ledger.append("versions/v000001.safetensors", store.path(published))
    ledger.close()
    ledger = Ledger(tmp_path, "ledger", "kept")
    ledger.append("versions/v000002.safetensors", store.path(appended))
    del store
    assert collect(home) == 0
    assert objects(home) == {published, appended}
    assert free not in objects(home)
    assert len(pinned(tmp_path / "ledger", tmp_path / ".dvc/cache")) == 2
    assert pinned(tmp_path / "ledger", tmp_path / ".dvc/cache", frozenset({"kept"})) == set()
    ledger.close()
    shutil.rmtree(tmp_path / "ledger/kept")
    assert len(pinned(tmp_path / "ledger", tmp_path / ".dvc/cache")) == 2
    with pytest.raises(UnavailableError, match="dvc pull"):
        pinned(tmp_path / "ledger", tmp_path / "elsewhere")


def test_without_the_ledgers_project_nothing_is_guessed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(home, "kept", finished=True, dvc=True)
    digest = put(home, b"perhaps pinned")
    monkeypatch.chdir(home)
    assert collect(home) == 2
    assert "DVC project" in capsys.readouterr().err
    assert objects(home) == {digest}


@settings(max_examples=30)
@given(
    links=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=8),
    roots=st.sets(st.integers(0, 7), max_size=3),
)
def test_exactly_the_reachable_stays(
    tmp_path_factory: pytest.TempPathFactory, links: list[list[int]], roots: set[int]
) -> None:
    root = tmp_path_factory.mktemp("store")
    store = ArtifactStore(root)
    names: list[str] = []
    for number, targets in enumerate(links):  # a document names earlier ones only
        known = [names[t % number] for t in targets if number]
        names.append(store.put(json.dumps({"number": number, "parents": known}).encode()))
    wanted = {number % len(links) for number in roots}
    reachable: set[int] = set()
    while wanted:
        number = wanted.pop()
        reachable.add(number)
        if number:
            wanted |= {t % number for t in links[number]} - reachable
    found = survey(root, [names[number % len(links)] for number in roots], frozenset())
    sweep(found)
    assert {path.name for path in (root / "objects").glob("*/*")} == {names[number] for number in reachable}
    assert found.kept == len(reachable)


def test_the_lock_is_the_kernels(home: Path) -> None:
    """Left behind by a dead process, it locks nobody out."""
    put(home, b"payload")
    with (home / "store/lock").open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_that_a_client_drove_can_be_given_up_and_its_checkpoints_are_not_searched(
    tmp_path: Path,
) -> None:
    """It is never finished; its saved weights and calls are large, and name nothing of the store."""
    directory, needed = make_run(tmp_path, "one"), put(tmp_path, b"needed")
    journal_names(directory, needed, step=0)
    for folder in ("saved/weights/a/v00000001", "calls"):
        (directory / folder).mkdir(parents=True)
        (directory / folder / "file").write_text(put(tmp_path, folder.encode()))
    assert collect(tmp_path) == 0 and objects(tmp_path) == {needed}
    assert collect(tmp_path, "--run", "one") != 0
    (directory / MODEL).write_text("{}")
    assert collect(tmp_path, "--run", "one") == 0 and not objects(tmp_path)
