"""Completions are found by the run log and the store, or by the ledger alone, and always the same ones."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.documents.graph import all_documents, build_graph
from antiphon.lineage.ledger.verify import verify_run
from antiphon.lineage.names import name_of
from antiphon.lineage.samples import Sample, SampleFiles, choose, read_samples
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.report.page import samples_section
from tests.support import artifacts
from tests.support.artifacts import RecordedRun

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    made = RecordedRun(tmp_path_factory.mktemp("home"), record={"mlflow": False, "samples": 2})
    made.complete(STEPS)
    return made


def shown(
    run_dir: Path, store: ArtifactStore, version: int | None = None, ledgers: Path | None = None, **more: Any
) -> list[Sample]:
    files = SampleFiles(run_dir, store, ledgers)
    return read_samples(files, reversed(files.versions()) if version is None else [version], **more)


@pytest.fixture
def read(run: RecordedRun) -> Callable[..., list[Sample]]:
    return lambda **more: shown(run.run_dir, run.store, **more)


def test_a_version_shows_its_answers_and_what_it_sampled_for_training(
    read: Callable[..., list[Sample]],
) -> None:
    found = read(version=0, count=1)
    heldout = [sample for sample in found if sample.split == "heldout"]
    assert {(s.kept_as, s.reward) for s in heldout} >= {("best", 1.0), ("worst", 0.0)}
    assert all(s.step is None and not s.trained for s in heldout)
    training = read(version=0, split="train", count=8)
    assert {s.split for s in training} == {"train"} and {s.version for s in training} == {0}
    # Batch 0 and batch 1 begin with tokens of version 0, and so do the filtered groups of step 0.
    assert {(s.step, s.trained) for s in training} == {(0, True), (1, True), (0, False)}


def test_each_completion_is_shown_once_and_the_choice_is_always_the_same(
    read: Callable[..., list[Sample]],
) -> None:
    found = read(version=1, count=8)
    assert len({(s.step, s.key, s.answer, s.trained) for s in found}) == len(found)
    assert found == read(version=1, count=8)


def test_by_default_it_is_the_newest_version(read: Callable[..., list[Sample]]) -> None:
    assert {s.version for s in read()} == {STEPS}
    assert {s.version for s in read(split="train")} == {STEPS - 1}
    assert read(version=99) == []


def test_reasons_name_what_cut_an_answer_and_what_the_environment_says(
    read: Callable[..., list[Sample]],
) -> None:
    asked: list[tuple[str, float]] = []

    def explain(key: str, answer: str, reward: float) -> str:
        asked.append((key, reward))
        return "because"

    found = read(version=0, split="heldout", count=3, explain=explain)
    assert {s.reason for s in found if s.reward == 1.0} == {"cut at 6 tokens; because"}
    assert {s.reason for s in found if s.reward < 1.0} == {"because"}
    assert sorted(asked) == sorted((s.key, s.reward) for s in found)


def test_what_an_environment_said_at_the_end_is_a_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in (("tiny_timing", "won; moves 3"), ("kept_row", "gave up")):
        made = getattr(artifacts, name)
        monkeypatch.setattr(
            artifacts, name, lambda *where, made=made, said=said: replace(made(*where), said=said)
        )
    run = RecordedRun(tmp_path, record={"mlflow": False, "samples": 2})
    run.complete(2)
    found = shown(run.run_dir, run.store, version=0, split="train", count=8)
    assert {(s.reason, s.trained) for s in found} == {
        ("won; moves 3", True),
        ("gave up", False),
        ("cut at 6 tokens; gave up", False),
    }


def test_the_ledger_alone_shows_the_same(run: RecordedRun, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    shutil.copytree(run.ledger, ledger)
    elsewhere, empty = tmp_path / "runs" / run.run_id, ArtifactStore(tmp_path / "store")
    for version in (0, 2, STEPS):
        pulled = shown(elsewhere, empty, version=version, ledgers=ledger)
        assert pulled == shown(run.run_dir, run.store, version=version) != []
    with pytest.raises(ConfigError, match="there is no run demo-1"):
        shown(elsewhere, empty)


def test_a_run_without_kept_completions_shows_what_its_batches_hold(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.complete(2)
    assert {s.trained for s in shown(run.run_dir, run.store)} == {True}
    assert SampleFiles(run.run_dir, run.store).versions() == [0, 1]


def test_kept_completions_are_in_the_ledger_and_verified(run: RecordedRun, tmp_path: Path) -> None:
    sound = verify_run(run.run_dir, run.store.root, run.home, "ledger")
    assert sound.findings == ()
    graph = build_graph(all_documents(run.run_dir, run.ledger))
    contents = graph.find("evaluation 0").contents
    assert graph.find(contents["samples_digest"][:12]).name == "evaluation of v0"
    path = run.ledger / run.run_id / "batches" / "t000001.samples.parquet"
    body = path.read_bytes()
    path.chmod(0o644)
    try:
        path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
        (finding, *_) = verify_run(run.run_dir, run.store.root, run.home, "ledger").findings
        assert finding.artifact == name_of("batches/t000001.samples.parquet")
    finally:
        path.write_bytes(body)


@pytest.mark.parametrize(
    ("split", "name"), [("heldout", "evaluation 1"), ("train", "filtered groups of step 1")]
)
def test_without_a_ledger_the_run_log_knows_what_is_missing(tmp_path: Path, split: str, name: str) -> None:
    run = RecordedRun(tmp_path, record={"mlflow": False, "dvc": False, "samples": 2})
    run.tell(range(2))
    run.log.evaluate(EvaluationRecord(1, 8, 8, 0.5, 6.0, run.samples("heldout", 1)))
    run.records().close(30.0)
    assert verify_run(run.run_dir, run.store.root, None, "ledger").findings == ()
    run.store.path(run.samples(split, 1)).unlink()
    (finding,) = verify_run(run.run_dir, run.store.root, None, "ledger").findings
    assert finding.artifact == f"samples of {name}" and "missing from the store" in finding.sentence


def test_an_altered_file_is_an_error_and_a_sentence_on_the_page(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, record={"mlflow": False, "samples": 2})
    run.complete(2)
    path = run.store.path(run.samples("heldout", 0))
    body = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(IntegrityError):
        shown(run.run_dir, run.store, version=0)
    assert "They cannot all be shown" in samples_section(run.run_dir, run.store)


def test_the_report_puts_the_first_version_beside_the_last(run: RecordedRun) -> None:
    page = str(samples_section(run.run_dir, run.store, lambda key, answer, reward: "<why>"))
    assert "&lt;why&gt;" in page and "<why>" not in page
    assert page.index("Held-out answers") < page.index("version 0") < page.index(f"version {STEPS}")
    heldout, _, training = page.partition("Completions of training groups")
    assert heldout.count("best, reward 1") == heldout.count("worst, reward 0") == 2
    assert training.count("worst, reward 0") == 2
    assert "version 3" in page  # the last one that sampled for training
    assert "antiphon evaluate demo-1 v12 --samples" in page


def test_a_run_that_recorded_nothing_has_no_section(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    assert samples_section(run.run_dir, run.store) == ""
    assert samples_section(tmp_path / "runs" / "other", run.store) == ""


REWARDS = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2**64 - 1)), max_size=40)


@given(REWARDS.filter(bool), st.integers(1, 4), st.randoms())
def test_the_choice_does_not_depend_on_the_order_and_shows_nothing_twice(completions, count, chance):
    completions = list({bits % 2**32: (reward, bits) for reward, bits in completions}.values())
    rewards = [reward for reward, _ in completions]
    order = list(range(len(completions)))
    chance.shuffle(order)
    chosen = choose(completions, count)
    assert len({place for _, place in chosen}) == len(chosen) == min(3 * count, len(completions))
    best = [rewards[place] for kind, place in chosen if kind == "best"]
    assert best == sorted(rewards, reverse=True)[:count]
    if len({bits >> 32 for _, bits in completions}) == len(completions):
        again = choose([completions[place] for place in order], count)
        assert [(kind, order[place]) for kind, place in again] == chosen
