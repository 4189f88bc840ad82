"""Retention while a run goes on: what is superseded leaves everywhere, and no kill spoils the ledger."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cli.app import execute
from antiphon.core.config import RunConfig, build_config
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.documents.graph import all_documents, build_graph
from antiphon.lineage.documents.replay_copy import find_copy
from antiphon.lineage.ledger.pins import Ledger
from antiphon.lineage.ledger.verify import RunCheck, Verification, verify_run
from antiphon.lineage.names import version_of_weights
from antiphon.lineage.retention import is_anchor, keeps_weights
from antiphon.lineage.store.gc import pinned
from antiphon.weights.payload_store import PAYLOADS
from tests.support.artifacts import RecordedRun
from tests.support.dvc import dvc

STEPS = 12
ANCHORS = {"weights": "anchors", "anchor_every": 4, "mlflow": False, "samples": 0}


def recorded(folder: Path, scores: dict[int, float] | None = None, **record: object) -> RecordedRun:
    """Record a run of 12 steps, evaluations among them."""
    run = RecordedRun(
        folder,
        run={"name": "demo", "steps": STEPS},
        loop={"max_staleness": 1},
        evaluation={"interval": 3},
        record={**ANCHORS, **record},
    )
    run.log.announce(run.snapshot(0))
    for step in range(STEPS):
        batch = run.batch(step)
        run.log.commit(run.commit(step, batch), batch)
        run.log.announce(run.snapshot(step + 1))
        if step - 1 in (scores or {}):
            run.log.evaluate(EvaluationRecord(step - 1, 8, 8, (scores or {})[step - 1], 6.0))
    report = run.records().close(120.0)
    assert report.complete, report
    return run


def kept(run: RecordedRun) -> list[int]:
    return find_copy(run.ledger, run.run_id).published()


def findings(run: RecordedRun) -> list[str]:
    found = verify_run(run.run_dir, run.store.root, run.home, "ledger")
    return [finding.sentence for finding in found.findings]


def test_anchors_the_window_and_the_best_stay_and_everything_verifies(tmp_path: Path) -> None:
    run = recorded(tmp_path / "home", {0: 0.25, 3: 0.75, 6: 0.75, 9: 0.5})
    assert kept(run) == [0, 3, 4, 8, 11, 12]
    assert findings(run) == []
    assert find_copy(run.ledger, run.run_id).recorded_by_digest() == [1, 2, 5, 6, 7, 9, 10]


def test_last_keeps_the_base_the_newest_and_the_best(tmp_path: Path) -> None:
    run = recorded(tmp_path / "home", {0: 0.75, 3: 0.5, 6: 0.8, 9: 0.5}, weights="last", anchor_every=None)
    assert kept(run) == [0, 6, 11, 12]
    assert findings(run) == []


def test_an_evaluated_version_stays_until_its_score_is_known(tmp_path: Path) -> None:
    run = recorded(tmp_path / "home", {0: 0.25})
    assert kept(run) == [0, 3, 4, 6, 8, 9, 11, 12]
    for version, reward in ((9, 0.5), (3, 0.75), (6, 0.25)):
        run.log.evaluate(EvaluationRecord(version, 8, 8, reward, 6.0))
    assert run.records().close(120.0).complete
    assert kept(run) == [0, 3, 4, 8, 11, 12]


def test_the_bytes_are_gone_from_ledger_cache_and_store(tmp_path: Path) -> None:
    run = recorded(tmp_path / "home", {version: 0.5 for version in (0, 3, 6, 9)})
    files = [path for path in run.home.rglob("*") if path.is_file() and PAYLOADS not in path.parts]
    held = {path.read_bytes() for path in files}
    assert len([body for body in held if b'"F32"' in body]) == len(kept(run)) == 5


def test_dvc_agrees_after_versions_left(tmp_path: Path) -> None:
    run = recorded(tmp_path / "home", keep_ledger=True)
    assert "up to date" in dvc(run.home, "status")


def test_a_continued_run_does_not_pin_again_what_it_superseded(tmp_path: Path) -> None:
    run = recorded(tmp_path / "home", {0: 0.25, 3: 0.75, 6: 0.5, 9: 0.5})
    before = kept(run)
    for version in (5, 6, 7, 8):
        run.log.announce(run.snapshot(version))
    assert run.records().close(120.0).complete
    assert kept(run) == before and findings(run) == []


def test_a_version_says_what_it_is_made_anew_from(tmp_path: Path) -> None:
    run = recorded(tmp_path / "home")
    graph = build_graph(all_documents(run.run_dir, run.ledger))
    assert graph.find("v7").facts["recompute"] == {"from_version": 0, "batches": [0, 6]}
    assert "recompute" not in graph.find("v8").facts


def test_what_another_run_may_hold_leaves_the_ledger_alone(tmp_path: Path) -> None:
    """A file that does not say it is this run's keeps its bytes in cache and store."""
    run = RecordedRun(tmp_path / "home", run={"name": "demo", "steps": STEPS}, record=ANCHORS)
    ledger = Ledger(run.home, "ledger", run.run_id)
    from antiphon.lineage.ledger.sink import remove_superseded

    digest = run.store.put((8).to_bytes(8, "little") + b"{}      ")
    for version in range(6):
        ledger.append(f"versions/v{version:06d}.safetensors", run.store.path(digest))
    remove_superseded(ledger, run.store, run.run_id, {}, run.config)
    assert [v for rel in ledger if (v := version_of_weights(rel)) is not None] == [0, 3, 4, 5]
    assert run.store.has(digest)
    ledger.close()


def test_bytes_that_another_entry_has_too_stay(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "home", record=ANCHORS)
    ledger = Ledger(run.home, "ledger", run.run_id)
    asked: list[Path] = []
    md5 = ledger.append("versions/v000001.safetensors", b"same")
    assert ledger.append("versions/v000002.safetensors", b"same") == md5
    ledger.remove(["versions/v000001.safetensors"], lambda path: bool(asked.append(path)))
    assert asked == [] and list(ledger) == ["versions/v000002.safetensors"]
    assert ledger.append("versions/v000001.safetensors", b"again") != md5
    ledger.close()
    checked_again = verify_run(run.run_dir, run.store.root, run.home, "ledger")
    assert not [found for found in checked_again.findings if "ledger" in found.artifact]


KILLED = """
import os, shutil, sys
from pathlib import Path

from antiphon.lineage.ledger.sink import remove_superseded
from antiphon.lineage.ledger.pins import Ledger
from tests.lineage.ledger.test_superseded import KILLED_CONFIG, weights_file
from antiphon.lineage.store.artifact_store import ArtifactStore

WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.chmod", "os.truncate"}


def fill(project):
    (project / ".dvc").mkdir(parents=True)
    (project / ".dvc" / "config").write_text("[core]\\n    no_scm = true\\n    analytics = false\\n")
    store = ArtifactStore(project / "store")
    ledger = Ledger(project, "ledger", "demo-1")
    for version in range(5):
        ledger.append(f"versions/v{version:06d}.safetensors", store.path(store.put(weights_file(version))))
    ledger.close()


def main(root):
    calls = 0
    fill(root / "whole")
    while True:
        project = root / f"p{calls}"
        shutil.copytree(root / "whole", project)
        child = os.fork()
        if child == 0:
            ledger = Ledger(project, "ledger", "demo-1")
            store = ArtifactStore(project / "store")
            left = [calls]

            def watch(event, arguments):
                where = str(arguments[:2])
                if event in WATCHED and str(project) in where and "/.dvc/tmp" not in where:
                    left[0] -= 1
                    if left[0] < 0:
                        os._exit(9)

            sys.addaudithook(watch)
            remove_superseded(ledger, store, "demo-1", {}, KILLED_CONFIG)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 9), status
        if code == 0:
            return
        calls += 1


main(Path(sys.argv[1]))
"""
KILLED_CONFIG: RunConfig = build_config({"record": ANCHORS, "loop": {"max_staleness": 1}})


def weights_file(version: int) -> bytes:
    """Return the file of a version as far as retention looks at it."""
    header = b'{"__metadata__":{"antiphon":"{\\"run\\": \\"demo-1\\", \\"version\\": %d}"}}' % version
    return len(header).to_bytes(8, "little") + header


def test_a_kill_at_any_point_leaves_a_ledger_that_verifies(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    places = sorted(tmp_path.iterdir())
    assert len(places) > 10
    for project in places:
        before = checked(project)
        assert before.findings == () and before.files, (project.name, before.findings)
        pinned(project / "ledger", project / ".dvc" / "cache")  # gc can tell, too
        finish(project)
        after = checked(project)
        assert after.findings == (), (project.name, after.findings)
        left = {path.name for path in (project / "ledger").rglob("*.safetensors")}
        assert left == {f"v{version:06d}.safetensors" for version in (0, 3, 4)}
        assert len(list((project / "store/objects").glob("*/*"))) == 3


def checked(project: Path) -> Verification:
    """Verify a ledger without opening the DVC project, which would take longer than the rest."""
    cache = project / ".dvc" / "cache" / "files" / "md5"
    run_dir = project / "runs" / "demo-1"
    check = RunCheck(run_dir, project / "store")
    return check.check(project / "ledger", lambda md5: cache / md5[:2] / md5[2:])


def finish(project: Path) -> None:
    from antiphon.lineage.ledger.sink import remove_superseded
    from antiphon.lineage.store.artifact_store import ArtifactStore

    ledger = Ledger(project, "ledger", "demo-1")
    remove_superseded(ledger, ArtifactStore(project / "store"), "demo-1", {}, KILLED_CONFIG)
    ledger.close()


@settings(deadline=None)
@given(
    weights=st.sampled_from(["anchors", "last"]),
    staleness=st.integers(0, 4),
    every=st.integers(1, 20),
    scores=st.dictionaries(st.integers(0, 60), st.floats(0, 1)),
    newest=st.integers(0, 60),
)
def test_what_left_never_comes_back_and_what_counts_never_leaves(
    weights: str, staleness: int, every: int, scores: dict[int, float], newest: int
) -> None:
    record = {"weights": weights} | ({"anchor_every": every} if weights == "anchors" else {})
    config = build_config({"record": record, "loop": {"max_staleness": staleness}})
    held = {v for v in range(newest + 1) if keeps_weights(v, newest, scores, config)}
    later = {v for v in range(newest + 1) if keeps_weights(v, newest + 1, scores, config)}
    assert later <= held
    assert {v for v in range(newest + 1) if is_anchor(v, config) or v >= newest - staleness} <= held
    best = max(scores, key=lambda v: (scores[v], -v), default=0)
    assert best in held or best > newest


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["record.anchor_every=5"], "record.anchor_every=5 has no effect with record.weights=all"),
        (
            ["record.weights=anchors", "record.anchor_every=5", "loop.publish_interval=2"],
            "no multiple of loop.publish_interval=2",
        ),
        (["record.weights=anchors", "record.checkpoint_stride=0"], "record.checkpoint_stride=0 pins none"),
        (["record.weights=last", "record.dvc=false"], "has no effect with record.dvc=false"),
        (["record.weights=some"], "record.weights"),
        (["record.free_mib=-1"], "record.free_mib"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["config", "examples/quickstart.yaml", *overrides]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said
