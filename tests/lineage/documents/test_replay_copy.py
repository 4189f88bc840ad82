"""Replay copies: found where they are, read-only, and what is missing or altered is named."""

import json
from pathlib import Path

import pytest

from antiphon.core.config import build_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.lineage.documents.manifest import build_manifest, canonical_json, manifest_digest
from antiphon.lineage.documents.replay_copy import ReplayCopy, find_copy
from antiphon.lineage.ledger.sink import pin_checkpoint
from antiphon.runs.finding import find_artifacts

STEPS = 3


def write_copy(folder: Path, run_id: str = "demo-1") -> Path:
    """Write artifacts whose batches are just bytes."""
    config = build_config({"run": {"name": "demo", "steps": STEPS}})
    manifest = build_manifest(config, run_id, folder)
    place = folder / run_id
    for name in ("batches", "versions"):
        (place / name).mkdir(parents=True)
    (place / "manifest.json").write_bytes(canonical_json({**manifest, "digest": manifest_digest(manifest)}))
    write_version(place, run_id, 0, {})
    for step in range(STEPS):
        payload = f"batch {step}".encode()
        (place / f"batches/t{step:06d}.parquet").write_bytes(payload)
        write_version(
            place,
            run_id,
            step + 1,
            {
                "batch_digest": digest_bytes(payload),
                "step": step,
                "metrics": {"loss": 0.5, "train_s": 3.0, "reward_mean": 0.1},
            },
        )
    return place


def write_version(place: Path, run_id: str, version: int, more: dict[str, object]) -> None:
    facts = {"run_id": run_id, "version": version, "weights_digest": f"{version:064x}", **more}
    (place / f"versions/v{version:06d}.json").write_text(json.dumps(facts))


def test_a_copy_says_what_was_recorded(tmp_path: Path) -> None:
    copy = ReplayCopy(write_copy(tmp_path))
    assert (copy.run_id, len(copy.steps), copy.config.run.steps) == ("demo-1", STEPS, STEPS)
    assert copy.batch(1) == b"batch 1" and copy.weights_digest(0) == "0" * 64
    assert copy.weights(0) is None and copy.checkpoints == []
    # Clocks and what only the coordinator knows are nothing a replay could repeat.
    assert copy.steps[1].metrics == {"loss": 0.5}


@pytest.mark.parametrize("inside", ["demo-1", ".", "..", "ledger"])
def test_a_copy_is_found_where_people_put_it(tmp_path: Path, inside: str) -> None:
    place = write_copy(tmp_path / "ledger")
    given = {"demo-1": place, ".": place.parent, "..": tmp_path, "ledger": tmp_path / "ledger"}[inside]
    assert find_copy(given, None).run_id == find_copy(given, "demo-1").run_id == "demo-1"


def test_shards_of_a_long_run_are_read_as_one(tmp_path: Path) -> None:
    place = write_copy(tmp_path)
    shard = tmp_path / "demo-1.s001"
    for name in ("batches/t000002.parquet", "versions/v000003.json"):
        (shard / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).rename(shard / name)
    copy = ReplayCopy(place)
    assert len(copy.steps) == STEPS and copy.batch(2) == b"batch 2"


def test_unknown_runs_are_refused_and_the_known_ones_named(tmp_path: Path) -> None:
    write_copy(tmp_path, "demo-1")
    with pytest.raises(ConfigError, match=r"run demo-9 are not in .*; there are: demo-1"):
        find_copy(tmp_path, "demo-9")
    with pytest.raises(ConfigError, match="holds the artifacts of run demo-1, not of demo-2"):
        find_copy(tmp_path / "demo-1", "demo-2")
    write_copy(tmp_path, "demo-2")
    with pytest.raises(ConfigError, match=r"one run are not in .*; there are: demo-1, demo-2"):
        find_copy(tmp_path, None)
    with pytest.raises(ConfigError, match="there are: no run at all"):
        find_copy(tmp_path / "demo-1" / "batches", None)


def test_runs_of_this_home_are_named_or_the_newest_finished_one(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()  # a project of its own, without the ledgers of the one around
    with pytest.raises(ConfigError, match="there is no run demo-9"):
        find_artifacts(tmp_path, "demo-9", None)
    with pytest.raises(ConfigError, match=r"no run under .* is finished"):
        find_artifacts(tmp_path, None, None)


def test_a_run_that_was_not_recorded_has_no_artifacts(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    run = tmp_path / "runs" / "demo-1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: demo}\n")
    (run / "outcome.json").write_text("{}")
    for named in ("demo-1", None):
        with pytest.raises(ConfigError, match=r"run demo-1 has no artifacts in .*antiphon keep demo-1"):
            find_artifacts(tmp_path, named, None)


def test_a_missing_batch_is_named_before_anything_starts(tmp_path: Path) -> None:
    place = write_copy(tmp_path)
    (place / "batches/t000001.parquet").unlink()
    copy = ReplayCopy(place)
    copy.require(range(2, 3))
    with pytest.raises(IntegrityError, match=r"batch of step 1 is missing: .*copy the artifacts again"):
        copy.require(range(STEPS))
    (tmp_path / "demo-1.dvc").write_text("outs: []\n")
    with pytest.raises(IntegrityError, match=r"`dvc pull .*demo-1.dvc`"):
        copy.batch(1)


def test_an_altered_batch_is_named(tmp_path: Path) -> None:
    place = write_copy(tmp_path)
    (place / "batches/t000001.parquet").write_bytes(b"batch 2")
    with pytest.raises(IntegrityError, match=r"t000001.parquet has digest .* but step 1 used"):
        ReplayCopy(place).batch(1)


def test_an_altered_manifest_is_refused(tmp_path: Path) -> None:
    manifest = write_copy(tmp_path) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed":0', '"seed":1'))
    with pytest.raises(IntegrityError, match="does not match the digest it holds"):
        ReplayCopy(manifest.parent)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda versions: (versions / "v000002.json").unlink(), r"v000002.json is missing"),
        (lambda versions: (versions / "v000002.json").write_text("{"), "cannot read .*v000002.json"),
        (lambda versions: (versions / "v000002.json").write_text("[]"), "v000002.json holds no record"),
        (
            lambda versions: (versions / "v000001.json").replace(versions / "v000003.json"),
            "v000003.json says it is of version 1",
        ),
        (lambda versions: write_version(versions.parent, "other-1", 2, {}), "belongs to run 'other-1'"),
    ],
)
def test_pointers_that_do_not_fit_are_refused(tmp_path: Path, spoil, sentence: str) -> None:
    place = write_copy(tmp_path)
    spoil(place / "versions")
    with pytest.raises(IntegrityError, match=sentence):
        ReplayCopy(place)


def test_an_unfinished_run_has_the_steps_it_made(tmp_path: Path) -> None:
    place = write_copy(tmp_path)
    (place / "versions/v000003.json").unlink()
    assert len(ReplayCopy(place).steps) == STEPS - 1


class ListLedger:
    """As much of a ledger as pinning asks."""

    def __init__(self) -> None:
        self.pinned: list[str] = []

    def md5(self, rel: str) -> str | None:
        return "md5" if rel in self.pinned else None

    def append(self, rel: str, payload: Path | bytes) -> str:
        self.pinned.append(rel)
        return "md5"


def test_a_checkpoint_is_pinned_once_and_its_list_last(tmp_path: Path) -> None:
    folder = tmp_path / "v00000002"
    (folder / "state").mkdir(parents=True)
    for name in ("contents.json", "state/model.pt", "zz.pt"):
        (folder / name).write_text(name)
    ledger = ListLedger()
    assert pin_checkpoint(ledger, tmp_path, 2) == "md5"
    assert ledger.pinned[-1] == "checkpoints/v00000002/contents.json" and len(ledger.pinned) == 3
    assert pin_checkpoint(ledger, tmp_path, 2) == "md5" and len(ledger.pinned) == 3
    assert pin_checkpoint(ledger, tmp_path, 4) == ""
