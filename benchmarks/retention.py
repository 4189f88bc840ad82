"""Retention: what a run keeps on the disk with anchors, and what it costs to make a middle version again.

The demo's model is trained for 60 steps by the real learner on batches of random tokens, and recorded with
`record.weights=anchors`; no engine samples. Every fifth version the weights on the disk are counted:
ledger, DVC's cache and store together, a file with several names once. Afterwards every file is verified,
and the middle one of the versions that are recorded by digest is made again from the ledger and exported.

The last line is one JSON object. `anchors_bytes_share` is the largest that the weights on the disk were, as
a share of anchors and window (the versions that may still be named, and one for the one that just came);
`all_bytes_share` compares the end with a run that keeps all; `remake_s` are the seconds from the first to the
last step repeated, the engine's start included. The exit status is 1 when more was kept than anchors
and window, a file is not as recorded, or the middle version comes out with another digest.

    .venv/bin/python benchmarks/retention.py
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.api.policy_file import copy_policy
from antiphon.benchmarks.parts.made_log import MadeLog
from antiphon.benchmarks.parts.measure import PROJECT, end_on_sigterm, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.config import RunConfig, build_config
from antiphon.core.metrics import batch_metrics
from antiphon.core.records import BatchRef, BatchRow, FinishReason, SnapshotManifest, StepCommit, VersionSpan
from antiphon.core.status import EvaluationRecord
from antiphon.lineage.documents.replay_copy import ReplayCopy, find_copy
from antiphon.lineage.export import export_version
from antiphon.lineage.ledger.verify import verify_run
from antiphon.lineage.records import Records
from antiphon.lineage.retention import is_anchor
from antiphon.lineage.rollout_table import encode_batch, encode_timings
from antiphon.lineage.store.artifact_store import ArtifactStore

RUN_ID = "retained-1"
MODEL = PROJECT / "examples" / "models" / "chain-sum"
ROWS, PROMPT_TOKENS, TOKENS = 8, 6, 16
LOOK = 5
"""Versions from one count to the next."""
FLUSH_S = 300.0
"""Longest wait for the records."""


def main() -> int:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--anchor-every", type=int, default=20)
    arguments = parser.parse_args()
    end_on_sigterm()
    with scratch_home() as home:
        # As in this repository: the ledger's files are links to those of the cache.
        with (home / ".dvc" / "config").open("a") as file:
            file.write('[cache]\n    type = "reflink,hardlink,copy"\n')
        result, violated = measure(home, arguments.steps, arguments.anchor_every)
    return finish(result, record=arguments.record, violated=violated)


def measure(home: Path, steps: int, anchor_every: int) -> tuple[dict[str, Any], list[str]]:
    """Train and record a run in `home`; return what it kept and what making a version again took."""
    config = build_config(
        {
            "run": {"name": "retained", "steps": steps},
            "model": {"path": str(MODEL)},
            "loop": {"max_staleness": 2},
            "learner": {"checkpoint_interval": 5, "threads": 1},
            "evaluation": {"interval": 10},
            "record": {"mlflow": False, "weights": "anchors", "anchor_every": anchor_every},
        }
    )
    run_dir = home / "runs" / RUN_ID
    run_dir.mkdir(parents=True)
    counts = train(config, run_dir, home)
    copy = find_copy(home / "ledger" / RUN_ID, RUN_ID)
    payload = weights_path(copy, 0).stat().st_size
    limits = [payload * limit for limit in counts["limits"]]
    share = max(held / limit for held, limit in zip(counts["bytes"], limits, strict=True))
    violated = [] if share <= 1.0 else [f"weights took {share:.3f} of anchors and window"]
    verified = verify_run(run_dir, home / "store", home, "ledger")
    violated += [finding.sentence for finding in verified.findings]
    middle = copy.recorded_by_digest()[len(copy.recorded_by_digest()) // 2]
    remade = remake(copy, middle, home / "made")
    if not remade["middle_equal"]:
        violated.append(f"version {middle} came out with another digest than the recorded one")
    result = {
        "versions": steps + 1,
        "payload_bytes": payload,
        "anchors": sum(is_anchor(version, config) for version in range(steps + 1)),
        "window": config.loop.max_staleness + 1,
        "kept_versions": len(copy.published()),
        "weights_bytes": counts["bytes"][-1],
        "anchors_bytes_share": round(share, 4),
        "all_bytes_share": round(counts["bytes"][-1] / (payload * (steps + 1)), 4),
        "checkpoint_bytes": size_of(path for folder in copy.checkpoints for path in folder.rglob("*")),
        "files_verified": verified.files,
        **remade,
    }
    return result, violated


def train(config: RunConfig, run_dir: Path, home: Path) -> dict[str, list[int]]:
    """Train and record the run; return the bytes of weights and the versions there may be, at each count."""
    from antiphon.services.learner.checkpoints import CheckpointStore
    from antiphon.services.learner.deepspeed_engine import pin_numerics
    from antiphon.services.learner.step import Trainer
    from antiphon.weights.payload_store import PAYLOADS, PayloadStore
    from antiphon.weights.snapshot import Weights, write_snapshot

    pin_numerics(config.learner.threads)
    store = ArtifactStore(home / "store")
    payloads = PayloadStore(run_dir / PAYLOADS)
    log = MadeLog()
    records = Records(
        *(RUN_ID, config, run_dir, home, store.root, log, home),
        weights_file=lambda version: payloads.checked(payloads.manifest(version)),
    )
    trainer = Trainer(config, CheckpointStore(run_dir / "checkpoints", config.learner.checkpoints_kept))
    chance = np.random.default_rng(0)

    def published(version: int, weights: Weights) -> SnapshotManifest:
        manifest = write_snapshot(payloads, RUN_ID, version, weights)
        payloads.put_manifest(manifest)
        return manifest

    log.announce(published(0, trainer.start(0).weights))
    counts: dict[str, list[int]] = {"bytes": [], "limits": []}
    for step in range(config.run.steps):
        batch = make_batch(step, chance, store)
        trained = trainer.train(step, store.get(batch.digest))
        if trained.version % config.learner.checkpoint_interval == 0:
            trainer.save()
        metrics = {**trained.metrics, **batch_metrics(batch)}
        manifest = published(trained.version, trained.weights)
        commit = StepCommit(step, trained.version, manifest.weights_digest, batch.digest, metrics, True)
        log.commit(commit, batch)
        log.announce(manifest)
        if trained.version % config.evaluation.interval == 0:
            # The first one stays the best, so that the champion is an anchor.
            log.evaluate(EvaluationRecord(trained.version, 8, 8, 1.0 / trained.version, 6.0))
        if trained.version % LOOK == 0:
            records.flush(FLUSH_S)
            payloads.prune_announced(trained.version, 1)
            counts["bytes"].append(weights_bytes(home))
            anchors = sum(is_anchor(version, config) for version in range(trained.version + 1))
            best = config.evaluation.interval
            champion = trained.version >= best and not is_anchor(best, config)
            counts["limits"].append(anchors + champion + config.loop.max_staleness + 1)
    trainer.stop()
    report = records.close(FLUSH_S)
    if not report.complete:
        raise SystemExit(f"the records are not complete: {report.writers}")
    return counts


def make_batch(step: int, chance: np.random.Generator, store: ArtifactStore) -> BatchRef:
    """Store a batch of random tokens whose halves have opposite advantages."""
    rows = [
        BatchRow(
            group_id=f"t{step:06d}-{place // 4:04d}",
            prompt_key=f"train/0/{place // 4}",
            sample_index=place % 4,
            prompt_token_ids=chance.integers(4, 20, PROMPT_TOKENS, dtype=np.int32),
            token_ids=chance.integers(4, 20, TOKENS, dtype=np.int32),
            logprobs=np.full(TOKENS, -2.8, dtype=np.float32),
            spans=(VersionSpan(step, 0, TOKENS),),
            finish_reason=FinishReason.STOP,
            reward=float(place % 2),
            advantage=1.0 if place % 2 else -1.0,
        )
        for place in range(ROWS)
    ]
    digest, timings = store.put(encode_batch(rows)), store.put(encode_timings([]))
    return BatchRef(
        step, digest, timings, ROWS, ROWS // 4, 0, 0, ROWS * TOKENS, 0.5, {0: ROWS}, float(TOKENS)
    )


def remake(copy: ReplayCopy, version: int, folder: Path) -> dict[str, Any]:
    """Make a version again and export it; return whether it is the recorded one, and what that took."""
    from antiphon.services.learner.replay.steps import make_version

    folder.mkdir()
    path = folder / "made.safetensors"
    begun = time.perf_counter()
    repeated = make_version(copy, version, path, None, lambda said: print(said, flush=True))
    took_s = time.perf_counter() - begun
    exported = export_version(copy, version, folder / "exported", weights=path)
    equal = copy_policy(path) == copy.weights_digest(version) == exported.weights_digest
    return {
        "middle_version": version,
        "middle_equal": equal,
        "steps_repeated": repeated,
        "remake_s": round(took_s, 2),
    }


def weights_path(copy: ReplayCopy, version: int) -> Path:
    """Return the file of a version that is kept."""
    path = copy.weights(version)
    assert path is not None
    return path


def weights_bytes(home: Path) -> int:
    """Return the bytes of all policy files in ledger, cache and store; one with several names counts once."""
    folders = (home / "ledger" / RUN_ID / "versions", home / ".dvc" / "cache", home / "store" / "objects")
    return size_of(path for folder in folders for path in folder.rglob("*") if is_policy(path))


def is_policy(path: Path) -> bool:
    """Return whether a file begins as a policy file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(24)[8:] == b'{"__metadata__":'


def size_of(paths: Any) -> int:
    """Return the bytes of files, each counted once."""
    found = {(status.st_dev, status.st_ino): status.st_size for path in paths if (status := path.stat())}
    return sum(found.values())


if __name__ == "__main__":
    sys.exit(main())
