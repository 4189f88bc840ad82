"""The lineage graph: parents by digest, selectors in words, and the verb that shows and checks them."""

import json
import os
import shutil
from pathlib import Path

import pytest

from antiphon.cli.app import execute
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.records import StepCommit
from antiphon.lineage.documents.graph import (
    LineageGraph,
    all_documents,
    build_document,
    build_graph,
    parents_by_rule,
    read_documents,
)
from antiphon.lineage.ledger.verify import verify_run
from antiphon.lineage.log_fold import LogFold
from antiphon.lineage.names import batch_entry, version_entry
from antiphon.lineage.run_log import RunLog
from antiphon.runs.directory import choose_run
from tests.support.artifacts import RecordedRun
from tests.support.dvc import dvc
from tests.support.made_log import MadeLog

STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A recorded run that nobody alters."""
    run = RecordedRun(tmp_path_factory.mktemp("graph") / "home")
    run.complete(STEPS)
    return run


@pytest.fixture(scope="module")
def graph(run: RecordedRun) -> LineageGraph:
    return build_graph(read_documents(run.ledger, run.run_id))


@pytest.fixture
def at_home(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    monkeypatch.setenv("ANTIPHON_HOME", str(run.home))
    return run


def test_from_the_last_version_one_gets_to_everything_it_came_from(graph: LineageGraph) -> None:
    assert graph.missing() == []
    names = {node.name for node in graph.ancestors(graph.find(f"v{STEPS}"))}
    assert names == {
        *(f"policy v{version}" for version in range(STEPS)),
        *(f"batch t{step}" for step in range(STEPS)),
        *("run", "base model", "code", "machine", "train split", "held-out split"),
    }
    assert {node.name for node in graph.ancestors(graph.find("evaluation 0"))} >= {"policy v0", "base model"}


def test_a_batch_names_every_version_that_sampled_it(graph: LineageGraph) -> None:
    batch = graph.find("batch 2")
    assert set(graph.parents(batch)) == {"policy v1", "policy v2", "run", "train split"}
    assert [node.name for node in graph.children(batch)] == ["policy v3"]
    assert [node.name for node in graph.children(graph.find("v1"))] == ["policy v2", "batch t1", "batch t2"]


def test_documents_are_objects_of_the_store_under_their_digest(run: RecordedRun, graph: LineageGraph) -> None:
    for rel, body in read_documents(run.ledger, run.run_id).items():
        assert run.store.get(graph.nodes[rel].digest) == body


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("v2", "policy v2"),
        ("version 2", "policy v2"),
        ("Policy V2", "policy v2"),
        ("t1", "batch t1"),
        ("batch 1", "batch t1"),
        ("evaluation of v0", "evaluation of v0"),
        ("model", "base model"),
        ("held-out split", "held-out split"),
        ("run", "run"),
    ],
)
def test_artifacts_are_found_by_words(graph: LineageGraph, words: str, name: str) -> None:
    assert graph.find(words).name == name


def test_artifacts_are_found_by_the_start_of_a_digest(run: RecordedRun, graph: LineageGraph) -> None:
    batch = graph.find("batch 1")
    assert graph.find(batch.digest[:12]) is batch
    assert graph.find(run.batch(1).digest[:12].upper()) is batch
    assert graph.find(run.snapshot(2).weights_digest).name == "policy v2"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("v9", "no v9; it has versions v0-v3, batches t0-t2, evaluations v0, v3"),
        ("ffffffffffffff", "no artifact of the run has a digest that begins with"),
        ("nonsense", "names no run and no artifact; write v12, batch 7"),
    ],
)
def test_what_is_not_there_is_said_in_words(graph: LineageGraph, words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        graph.find(words)


def test_a_parent_that_nobody_has_is_told(graph: LineageGraph) -> None:
    without = LineageGraph(node for rel, node in graph.nodes.items() if rel != batch_entry(1))
    assert [(node.name, role) for node, role, _ in without.missing()] == [("policy v2", "batch t1")]
    assert without.parents(without.find("v2"))["batch t1"] is None


def test_an_altered_document_is_named(run: RecordedRun) -> None:
    documents = read_documents(run.ledger, run.run_id)
    documents[version_entry(1)] = documents[version_entry(1)][:-1]
    with pytest.raises(IntegrityError, match="manifest of version 1"):
        build_graph(documents)


def test_documents_do_not_depend_on_the_clock(tmp_path: Path) -> None:
    """A clock that was set back between two processes changes no digest and no order."""
    told = []
    for name, seconds in (("a", (5000.0, 100.0, 3000.0)), ("b", (1.0, 2.0, 3.0))):
        run = RecordedRun(tmp_path / name)
        run.log = MadeLog(iter((0.0, *(at for at in seconds for _ in range(2)))).__next__)
        run.log.announce(run.snapshot(0))
        for step in range(3):
            run.log.commit(run.commit(step, run.batch(step)), run.batch(step))
        fold, log = LogFold(), RunLog(run.run_dir)
        log.write([record for event in run.log.events if (record := fold.take(event))])
        (run.run_dir / "manifest.json").write_bytes(b'{"config":{},"run_id":"demo-1"}')
        told.append(all_documents(run.run_dir, None))
    assert told[0] == told[1]
    assert build_graph(told[0]).summary() == "versions v0-v3, batches t0-t2, no evaluations"


def test_a_run_without_a_ledger_is_drawn_from_its_run_log(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "home", record={"mlflow": False, "dvc": False})
    run.complete(STEPS)
    assert not run.ledger.exists()
    graph = build_graph(all_documents(run.run_dir, None))
    assert (
        graph.missing() == [] and graph.find("v3").facts["weights_digest"] == run.snapshot(3).weights_digest
    )
    assert "base model" in {node.name for node in graph.ancestors(graph.find("v3"))}
    assert verify_run(run.run_dir, run.store.root, None, "ledger").findings == ()
    run.store.path(run.batch(1).digest).unlink()
    (finding,) = verify_run(run.run_dir, run.store.root, None, "ledger").findings
    assert finding.artifact == "batch 1" and "missing from the store" in finding.problem


def test_another_process_finds_everything_pinned_and_goes_on(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "home")
    run.tell(range(3))
    assert run.records().close(60.0).complete
    graph = build_graph(read_documents(run.ledger, run.run_id))
    assert graph.missing() == [] and set(graph.find("v2").parents) == {"run", "policy v1", "batch t1"}
    run.log.commit(StepCommit(3, 4, "0" * 64, run.batch(3).digest, {}, False))
    assert run.records().close(60.0).complete
    assert set(build_graph(read_documents(run.ledger, run.run_id)).find("v4").parents) == {"run", "policy v3"}


def test_a_place_that_is_no_document_is_refused() -> None:
    assert parents_by_rule("batches/t000001.parquet") == {}
    with pytest.raises(IntegrityError, match="no place of a document"):
        build_document("batches/t000001.parquet", {}, lambda _: None)


def test_the_verb_shows_parents_and_children(
    at_home: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["lineage", at_home.run_id, "batch", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("batch t1 of run demo-1") and at_home.batch(1).digest in said
    above, below = said.split("led to")
    assert "policy v0" in above and "train split" in above and "policy v2" in below
    assert execute(["lineage"]) == 0
    assert capsys.readouterr().out.startswith("run demo-1\n")
    assert execute(["lineage", "v2", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["kind"] == "version" and set(plain["parents"]) == {"run", "policy v1", "batch t1"}
    assert {child["name"] for child in plain["children"]} == {"policy v3", "batch t2"}
    assert digest_bytes((at_home.ledger / "demo-1" / plain["manifest"]).read_bytes()) == plain["digest"]
    assert execute(["lineage", "nobody-s0-1"]) == 2
    assert execute(["lineage", at_home.run_id, "v77"]) == 2


def test_the_verb_checks_and_names_what_was_altered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RecordedRun(tmp_path / "home")
    run.complete(2)
    monkeypatch.setenv("ANTIPHON_HOME", str(run.home))
    assert execute(["lineage", run.run_id, "--verify"]) == 0
    assert "are as recorded" in capsys.readouterr().out
    altered = run.ledger / run.run_id / "batches" / "t000001.parquet"
    body = altered.read_bytes()
    altered.unlink()  # a copy of its own, so that the cache's and the store's stay
    altered.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert execute(["lineage", run.run_id, "--verify"]) == IntegrityError.exit_code
    told = capsys.readouterr()
    assert told.out.startswith(f"batch 1: {altered} was altered") and "dvc checkout --force" in told.out
    assert "1 artifact of run demo-1 is not as recorded: batch 1" in told.err
    dvc(run.home, "checkout", "--force", "ledger/demo-1.dvc")
    assert execute(["lineage", "--verify"]) == 0  # every run and the whole store
    capsys.readouterr()
    run.store.path(run.store.put(b"nobody's")).chmod(0o644)
    run.store.path(digest_bytes(b"nobody's")).write_bytes(b"nobody'S")
    assert execute(["lineage", "--verify", "--json"]) == 1
    (*_, store) = json.loads(capsys.readouterr().out)
    assert store["checked"] == "the store" and len(store["findings"]) == 1


def test_a_ledger_without_its_run_can_be_shown(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "elsewhere"
    shutil.copytree(run.home / ".dvc", home / ".dvc")
    shutil.copytree(run.ledger, home / "ledger")
    monkeypatch.setenv("ANTIPHON_HOME", str(home))
    assert execute(["lineage", run.run_id, "v1"]) == 0
    assert capsys.readouterr().out.startswith("policy v1 of run demo-1")


def test_a_new_run_takes_no_name_that_is_in_the_ledger(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "home")
    first = choose_run(run.config, None, run.home, fresh=False)
    assert first.run_id.endswith("-1")
    os.makedirs(run.ledger)
    (run.ledger / f"{first.run_id}.dvc").write_text("outs: []\n")  # came with git, from somebody else
    second = choose_run(run.config, None, run.home, fresh=False)
    assert second.run_id.endswith("-2") and not second.resumed
