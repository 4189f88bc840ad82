"""The learner on the real DeepSpeed engine: the same bits again, nothing committed that is no number."""

import asyncio
import dataclasses
import os
import re
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from antiphon.api.manifest import full_payload
from antiphon.core.broadcast.probe import probe_problem
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import BlockedError, ConfigError, ContractError, IntegrityError, UnavailableError
from antiphon.core.metrics import BATCH_METRICS, LEARNER_METRICS, find_metric
from antiphon.core.records import (
    BatchRef,
    BatchRow,
    FinishReason,
    FloatArray,
    IntArray,
    SnapshotManifest,
    StepCommit,
    VersionSpan,
)
from antiphon.core.requests import StageReply
from antiphon.lineage.rollout_table import LeftOut, encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.services.learner import policy as policy_module
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.client import LearnerClient
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, Done, pin_numerics
from antiphon.services.learner.objective import TokenMetrics, UpdateTotals
from antiphon.services.learner.packing import MicroBatch, make_micro_batches
from antiphon.services.learner.policy import Policy, load_causal_model
from antiphon.services.learner.progress import ProgressCounter
from antiphon.services.learner.server import open_learner, register_learner
from antiphon.services.learner.service import LearnerService
from antiphon.services.learner.step import Trainer
from antiphon.services.learner.training import TrainedStep
from antiphon.weights.payload_store import PAYLOADS, OutgoingPayload, PayloadStore
from antiphon.weights.rpc import BroadcastClient, register_broadcast
from antiphon.weights.service import BroadcastService
from antiphon.weights.snapshot import open_snapshot, weights_digest, weights_of, write_snapshot
from tests.support.snapshots import fetch_snapshot

pytestmark = pytest.mark.engine
VOCABULARY = 32


class RecordedCoordinator:
    """As much of a coordinator as a learner asks: batches by step, commits in order."""

    def __init__(self, batches: dict[int, str] | None = None) -> None:
        self.batches = batches or {}
        self.commits_made: list[StepCommit] = []
        self.manifests: dict[int, SnapshotManifest] = {}
        self.paused = ""
        self.asked = 0
        self.failing_commits = 0

    async def await_stage(self, stage: str, step: int, wait_s: float) -> StageReply:
        self.asked += 1
        if step not in self.batches:
            if self.paused:  # answered at once, as by the coordinator
                return StageReply(False, f"groups of step {step}", 0.25, f"the run is paused: {self.paused}")
            await asyncio.sleep(0.01)
            return StageReply(False, f"groups of step {step}", 0.25)
        ref = BatchRef(step, self.batches[step], "0" * 64, 8, 2, 0, 0, 40, 0.5, {0: 8}, 5.0)
        return StageReply(True, batch=ref)

    async def commit_step(self, commit: StepCommit) -> None:
        if self.failing_commits:
            self.failing_commits -= 1
            raise UnavailableError("the coordinator is restarting")
        assert commit.step == len(self.commits_made)
        self.commits_made.append(commit)

    async def commits(self, after_step: int) -> Sequence[StepCommit]:
        return [commit for commit in self.commits_made if commit.step > after_step]

    async def announce_snapshot(self, manifest: SnapshotManifest) -> None:
        self.manifests[manifest.version] = manifest

    async def pause(self, reason: str) -> None:
        self.paused = reason


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(shape).save_pretrained(path)
    return path


def make_config(model_path: Path, **changes: Any) -> RunConfig:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_path)},
        "learner": {
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "micro_batch_tokens": 64,
            "checkpoint_interval": 2,
        },
        "services": {"stall_timeout_s": 0.3},
    }
    for key, value in changes.items():
        section, field = key.split("__")
        tree.setdefault(section, {})[field] = value
    return build_config(tree)


def make_rows(seed: int, advantage: float | None = None) -> list[BatchRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for place in range(8):
        length = int(rng.integers(2, 12))
        rows.append(
            BatchRow(
                group_id=f"s{seed}-g{place // 4}",
                prompt_key="p",
                sample_index=place % 4,
                prompt_token_ids=rng.integers(0, VOCABULARY, 4).astype(np.int32),
                token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                logprobs=np.full(length, -3.5, np.float32),
                spans=(VersionSpan(max(0, seed - 1), 0, length),),
                finish_reason=FinishReason.STOP,
                reward=1.0,
                advantage=float(rng.standard_normal()) if advantage is None else advantage,
            )
        )
    return rows


class Bench:
    """One run's folders and batches, over which learners come and go."""

    def __init__(self, root: Path, config: RunConfig, steps: int = 4) -> None:
        self.root, self.config = root, config
        self.store = ArtifactStore(root / "store")
        self.coordinator = RecordedCoordinator(
            {step: self.store.put(encode_batch(make_rows(step))) for step in range(steps)}
        )

    def payloads(self) -> PayloadStore:
        return PayloadStore(self.root / "run" / PAYLOADS)

    async def learner(self, store: ArtifactStore | None = None) -> LearnerService:
        service = open_learner(
            self.config, "run", self.root / "run", store or self.store, self.payloads(), self.coordinator
        )
        service.origin = "127.0.0.1:1"
        try:
            await service.restore()
        except BaseException:
            await service.close()
            raise
        return service


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 280))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"learner__zero_stage": 1},
        {"learner__zero_stage": 2},
        {"learner__zero_stage": 3},
        *({"learner__zero_stage": stage, "learner__dtype": "bfloat16"} for stage in range(4)),
        {"algorithm__updates_per_step": 2},
        {"model__dtype": "bfloat16", "learner__gradient_checkpointing": True},
    ],
    ids=[
        *(f"stage{stage}" for stage in range(4)),
        *(f"stage{stage}-bf16" for stage in range(4)),
        "two-updates",
        "bf16-snapshots",
    ],
)
def test_a_killed_learner_goes_on_bit_for_bit(model_path: Path, tmp_path: Path, changes: dict) -> None:
    async def body() -> None:
        config = make_config(model_path, **changes)
        unbroken = Bench(tmp_path / "a", config)
        learner = await unbroken.learner()
        for step in range(3):
            await learner.step(step)
        # Version 3 is committed, the checkpoint holds version 2: step 2 is repeated from its record.
        assert CheckpointStore(tmp_path / "a" / "run" / "checkpoints", 2).versions() == [2]
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # what a kill at this moment leaves
        broken = Bench(tmp_path / "b", config)
        broken.coordinator.commits_made = [*unbroken.coordinator.commits_made]
        await learner.step(3)
        await learner.close()
        expected = [commit.weights_digest for commit in unbroken.coordinator.commits_made]
        assert len(set(expected)) == 4

        learner = await broken.learner()
        assert (await learner.status()).version == 3
        last = await learner.step(3)
        await learner.close()
        assert [commit.weights_digest for commit in broken.coordinator.commits_made] == expected
        assert last.commit.weights_digest == expected[-1]

    run(body)


def test_other_digests_than_the_committed_ones_are_refused(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        await learner.step(0)
        await learner.close()
        commit = bench.coordinator.commits_made[0]
        bench.coordinator.commits_made[0] = dataclasses.replace(commit, weights_digest="0" * 64)
        with pytest.raises(IntegrityError, match=f"version 1 was committed with weights {'0' * 64}"):
            await bench.learner()

    run(body)


def test_an_altered_checkpoint_is_never_opened(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        digests = [(await learner.step(step)).commit.weights_digest for step in range(4)]
        await learner.close()
        checkpoints = CheckpointStore(tmp_path / "run" / "checkpoints", 2)
        assert checkpoints.versions() == [2, 4]
        spoiled = next(checkpoints.folder(4).rglob("*.pt"))
        # A pickle that would raise when opened: it is refused before.
        spoiled.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        problem = checkpoints.problem(4)
        assert problem is not None and "altered file" in problem and spoiled.name in problem
        assert checkpoints.newest_sound(4) == 2
        learner = await bench.learner()
        assert (await learner.status()).version == 4
        manifest = await learner.publish(4)
        assert manifest.weights_digest == digests[-1]
        await learner.close()

    run(body)


def test_a_checkpoint_of_other_settings_is_refused(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        await learner.step(0)
        await learner.step(1)
        await learner.close()
        bench.config = make_config(model_path, learner__learning_rate=5e-4)
        with pytest.raises(ConfigError, match="checkpoint of version 2 was made with other"):
            await bench.learner()

    run(body)


def test_a_loss_that_is_no_number_pauses_the_run_and_leaves_the_weights(
    model_path: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        clean, bench = (
            Bench(tmp_path / "a", make_config(model_path)),
            Bench(tmp_path, make_config(model_path)),
        )
        learner = await clean.learner()
        expected = [(await learner.step(step)).commit.weights_digest for step in range(2)]
        await learner.close()

        learner = await bench.learner()
        await learner.step(0)
        good = bench.coordinator.batches[1]
        bench.coordinator.batches[1] = bench.store.put(encode_batch(make_rows(1, advantage=float("nan"))))
        with pytest.raises(IntegrityError, match=r"step 1 on batch .* was not committed: the loss is nan"):
            await learner.step(1)
        assert re.search(
            r"the loss is nan at micro-batch 1: the advantage of sample \d of group s1-g",
            bench.coordinator.paused,
        )
        assert len(bench.coordinator.commits_made) == 1
        with pytest.raises(ContractError, match="version 2 cannot be published"):
            await learner.publish(2)
        assert (await learner.publish(1)).weights_digest == expected[0]
        bench.coordinator.batches[1] = good
        assert (await learner.step(1)).commit.weights_digest == expected[1]
        await learner.close()

    run(body)


class RestlessPolicy(Policy):
    """Computes something whose order torch does not fix."""

    def forward(self, batch: MicroBatch, *others: Any, **named: Any) -> Any:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.rand(2))
        return super().forward(batch, *others, **named)


def test_what_has_no_deterministic_kernel_is_refused_by_name(model_path: Path) -> None:
    engine = DeepSpeedEngine(make_config(model_path), RestlessPolicy)
    batches = make_micro_batches(make_rows(0), 0, 64)
    totals = UpdateTotals(len(batches), sum(batch.completion_tokens for batch in batches))
    for work in (lambda: engine.update(batches, totals), lambda: engine.logprobs(batches[0])):
        with pytest.raises(ConfigError, match=r"computes put_.*, which on this device gives other bits"):
            work()
    engine.close()


def test_a_gpu_gets_no_leave_to_work_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention's backward pass has no order then
    pin_numerics(torch.get_num_threads())
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_batch_that_is_voided_while_its_step_fails_is_dropped_and_the_next_one_trained(
    model_path: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        await learner.step(0)
        coordinator, good = bench.coordinator, bench.coordinator.batches.pop(1)
        poison = bench.store.put(encode_batch(make_rows(1, advantage=float("nan"))))
        real = coordinator.await_stage

        async def await_stage(stage: str, step: int, wait_s: float) -> StageReply:
            # The learner is given the batch once; when it asks again, that is voided and replaced.
            given, coordinator.batches[1] = coordinator.batches.get(1), good
            if given is None:
                ref = BatchRef(step, poison, "0" * 64, 8, 2, 0, 0, 40, 0.5, {0: 8}, 5.0)
                return StageReply(True, batch=ref)
            return await real(stage, step, wait_s)

        coordinator.await_stage = await_stage  # type: ignore[method-assign]
        commit = (await learner.step(1)).commit
        assert commit.batch_digest == good and commit.version == 2 and not coordinator.paused
        await learner.close()

        clean = Bench(tmp_path / "clean", make_config(model_path))
        learner = await clean.learner()
        assert [(await learner.step(s)).commit.weights_digest for s in (0, 1)][1] == commit.weights_digest
        await learner.close()

    run(body)


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "unheard"])
def test_a_step_that_was_trained_on_a_voided_batch_is_not_committed(
    model_path: Path, tmp_path: Path, lost: bool
) -> None:
    """`lost`: the commit did not reach the coordinator at first, so the learner asks for the batch again."""

    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        await learner.step(0)
        coordinator, good = bench.coordinator, bench.coordinator.batches[1]
        voided = coordinator.batches[1] = bench.store.put(encode_batch(make_rows(7)))
        real = coordinator.commit_step

        async def commit_step(commit: StepCommit) -> None:
            coordinator.batches[1] = good  # voided and replaced in this moment
            if commit.batch_digest == voided:
                raise UnavailableError("gone") if lost else IntegrityError("its batch is another one")
            await real(commit)

        coordinator.commit_step = commit_step  # type: ignore[method-assign]
        if lost:
            with pytest.raises(UnavailableError):
                await learner.step(1)
        commit = (await learner.step(1)).commit
        assert commit.batch_digest == good and not coordinator.paused
        await learner.close()

        clean = Bench(tmp_path / "clean", make_config(model_path))
        learner = await clean.learner()
        assert [(await learner.step(s)).commit.weights_digest for s in (0, 1)][1] == commit.weights_digest
        await learner.close()

    run(body)


def test_an_altered_batch_pauses_the_run(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        path = bench.store.path(bench.coordinator.batches[0])
        whole = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(whole[:-1])
        with pytest.raises(IntegrityError, match=f"step 0 .* not committed: object {path.name}"):
            await learner.step(0)
        assert path.name in bench.coordinator.paused and not bench.coordinator.commits_made
        path.write_bytes(whole)
        assert (await learner.step(0)).commit.version == 1
        await learner.close()

    run(body)


class GatedStore(ArtifactStore):
    """Holds the training thread at the door of a batch until it is told to go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def get(self, digest: str) -> bytes:
        self.entered.set()
        assert self.go_on.wait(60)
        return super().get(digest)


def test_a_version_is_published_while_the_next_step_trains(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        gated = GatedStore(tmp_path / "store")
        gated.go_on.set()
        learner = await bench.learner(gated)
        first = (await learner.step(0)).commit
        gated.entered.clear()
        gated.go_on.clear()
        training = asyncio.create_task(learner.step(1))
        assert await asyncio.to_thread(gated.entered.wait, 60)
        try:
            manifest = await learner.publish(1)
            assert (await learner.status()).state == "training" and not training.done()
        finally:
            gated.go_on.set()
        assert manifest == bench.coordinator.manifests[1]
        assert manifest.weights_digest == first.weights_digest
        weights = open_snapshot(manifest, bench.payloads())
        assert weights_digest(weights) == first.weights_digest
        assert "lm_head.weight" not in weights and "model.embed_tokens.weight" in weights
        assert (await training).commit.weights_digest != first.weights_digest
        await learner.close()

    run(body)


def test_a_learner_that_dies_after_a_commit_has_the_version_on_its_disk(
    model_path: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path, learner__checkpoint_interval=1))
        learner = await bench.learner()
        commit = (await learner.step(0)).commit
        assert 1 not in bench.coordinator.manifests  # nobody had asked for it yet
        await learner.close()
        manifest = bench.payloads().manifest(1)
        assert open_snapshot(manifest, bench.payloads()).digest == commit.weights_digest
        file = bench.payloads().path(full_payload(manifest).digest)
        written = file.stat().st_ino
        learner = await bench.learner()
        assert bench.coordinator.manifests[1].weights_digest == commit.weights_digest
        assert (await learner.publish(1)).weights_digest == commit.weights_digest
        assert file.stat().st_ino == written  # not written again
        await learner.close()

    run(body)


def test_what_a_learner_left_behind_in_the_middle_of_a_step_is_not_announced(
    model_path: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        await learner.close()
        bench.payloads().make(1 << 20).write(b"half")
        # A version that was written and whose batch was voided before the commit.
        bench.payloads().put_manifest(
            write_snapshot(bench.payloads(), "run", 1, weights_of({"a": torch.zeros(3)}))
        )
        learner = await bench.learner()
        assert list(bench.coordinator.manifests) == [0]
        commit = (await learner.step(0)).commit
        assert (await learner.publish(1)).weights_digest == commit.weights_digest
        assert open_snapshot(bench.coordinator.manifests[1], bench.payloads()).digest == commit.weights_digest
        await learner.close()
        # The same one, left by a machine whose disk was put back to an earlier day.
        bench.payloads().put_manifest(
            write_snapshot(bench.payloads(), "run", 1, weights_of({"a": torch.zeros(3)}))
        )
        bench.coordinator.manifests.clear()
        learner = await bench.learner()
        assert (await learner.publish(1)).weights_digest == commit.weights_digest
        await learner.close()

    run(body)


def test_a_full_disk_holds_a_step_up_and_repeats_nothing(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        trained: list[int] = []
        train = learner._trainer.train

        def noted(step: int, batch: bytes) -> TrainedStep:
            trained.append(step)
            return train(step, batch)

        monkeypatch.setattr(learner._trainer, "train", noted)

        def full(self: OutgoingPayload, data: memoryview) -> None:
            raise UnavailableError("no space is left")

        with monkeypatch.context() as patch:
            patch.setattr(OutgoingPayload, "write", full)
            with pytest.raises(UnavailableError, match="no space is left"):
                await learner.step(0)
        assert not bench.coordinator.commits_made and bench.payloads().versions() == [0]
        commit = (await learner.step(0)).commit
        assert trained == [0] and bench.coordinator.commits_made == [commit]
        assert bench.payloads().manifest(1).weights_digest == commit.weights_digest
        await learner.close()

    run(body)


def test_a_repeated_step_is_trained_and_committed_once(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        with pytest.raises(ContractError, match="step 1 is not the next one; the learner holds version 0"):
            await learner.step(1)
        both = await asyncio.gather(learner.step(0), learner.step(0))
        assert both[0] == both[1]
        assert (await learner.step(0)).commit == both[0].commit
        # A commit that went astray is sent again; the step is not trained again.
        bench.coordinator.failing_commits = 100
        with pytest.raises(UnavailableError, match="committing step 1"):
            await learner.step(1)
        bench.coordinator.failing_commits = 0
        del bench.coordinator.batches[0]
        again = await learner.step(1)
        await learner.step(2)
        await learner.close()
        assert [commit.step for commit in bench.coordinator.commits_made] == [0, 1, 2]
        learner = await Bench(tmp_path / "other", make_config(model_path)).learner()
        await learner.step(0)
        assert (await learner.step(1)).commit.weights_digest == again.commit.weights_digest
        await learner.close()

    run(body)


def test_the_flow_hears_that_the_coordinator_is_blocked(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, so that it can wait with the patience for outages; the step is not trained again."""

    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        trained: list[int] = []
        train = learner._trainer.train

        def noted(step: int, batch: bytes) -> TrainedStep:
            trained.append(step)
            return train(step, batch)

        async def blocked(commit: StepCommit) -> None:
            raise BlockedError("no space is left for the journal")

        monkeypatch.setattr(learner._trainer, "train", noted)
        with monkeypatch.context() as patch:
            patch.setattr(bench.coordinator, "commit_step", blocked)
            for _ in range(2):
                with pytest.raises(BlockedError, match="no space is left"):
                    await learner.step(0)
        assert (await learner.step(0)).commit == bench.coordinator.commits_made[0]
        assert trained == [0]
        await learner.close()

    run(body)


def test_a_caller_that_gives_up_does_not_stop_the_step(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        gated = GatedStore(tmp_path / "store")
        learner = await bench.learner(gated)
        impatient = asyncio.create_task(learner.step(0))
        assert await asyncio.to_thread(gated.entered.wait, 60)
        impatient.cancel()
        gated.go_on.set()
        result = await learner.step(0)
        assert bench.coordinator.commits_made == [result.commit]
        await learner.close()

    run(body)


def test_a_learner_that_restores_answers_with_what_it_does_and_announces_what_is_stored(
    model_path: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        few = {"loop__max_staleness": 0, "broadcast__snapshots_kept": 2}
        config = make_config(model_path, learner__checkpoint_interval=10, **few)
        bench = Bench(tmp_path, config)
        learner = await bench.learner()
        for step in range(2):
            await learner.step(step)
            await learner.publish(step)
        await learner.close()

        bench.coordinator.manifests.clear()
        (tmp_path / "run" / PAYLOADS / "2.manifest").unlink()  # as if a kill had come before it
        gated = GatedStore(tmp_path / "store")
        again = open_learner(
            bench.config, "run", bench.root / "run", gated, bench.payloads(), bench.coordinator
        )
        again.origin = "127.0.0.1:2"
        restoring = asyncio.create_task(again.restore())
        assert await asyncio.to_thread(gated.entered.wait, 60)
        # Workers have their snapshots again before the first step is repeated.
        assert {v: m.origin for v, m in bench.coordinator.manifests.items()} == dict.fromkeys(
            range(2), "127.0.0.1:2"
        )
        for progress in (
            (await again.await_step(2, 0.0)).progress,
            (await again.await_snapshot(2, 0.0)).progress,
        ):
            assert (progress.doing, progress.counted) == ("restoring: step 0 of 2", "micro-batch")
        status = await again.status()
        assert status.state == "restoring" and status.progress == progress
        gated.go_on.set()
        assert await restoring == 2
        # The version whose file was missing is written by repeating its step, and the oldest snapshot goes.
        await again.publish_again()
        assert bench.coordinator.manifests[2].origin == "127.0.0.1:2" and bench.payloads().versions() == [
            1,
            2,
        ]
        result = await again.step(2)  # joins the one that was asked for meanwhile
        assert result.commit.step == 2 and (await again.status()).progress.counter > progress.counter
        assert (await again.publish(2)).version == 2
        await again.close()

    run(body)


def test_a_step_counts_micro_batches_and_bytes_as_they_are_done(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, str, int]] = []
    counting = ProgressCounter.counting

    def note(self: ProgressCounter, counted: str, *look: Callable[[], int]) -> None:
        counting(self, counted, *look)
        progress = self.read()
        begun.append((progress.doing, progress.counted, progress.counter))

    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path, learner__checkpoint_interval=1))
        learner = await bench.learner()
        begun.clear()
        monkeypatch.setattr(ProgressCounter, "counting", note)
        metrics = (await learner.step(0)).commit.metrics
        manifest = await learner.publish(1)
        await learner.close()
        found = dict.fromkeys(entry[:2] for entry in begun)
        assert list(found) == [
            ("training step 0", "micro-batch"),
            ("training step 0", "byte of the weights"),
            ("committing step 0", "answer of the coordinator"),
            ("saving version 1", "byte"),
            ("idle", "step"),
            ("publishing version 1", "byte"),
            ("announcing version 1", "answer of the coordinator"),
        ]
        at = {entry[:2]: entry[2] for entry in begun}
        trained, gathered = at["training step 0", "micro-batch"], at["training step 0", "byte of the weights"]
        assert gathered - trained == metrics["micro_batches"]
        assert at["committing step 0", "answer of the coordinator"] - gathered == manifest.full_bytes
        folder = tmp_path / "run" / "checkpoints" / "v00000001"
        written = sum(path.stat().st_size for path in (folder / "state").rglob("*"))
        assert at["idle", "step"] - at["saving version 1", "byte"] >= written

    run(body)


def test_an_empty_batch_still_makes_a_version(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        bench.coordinator.batches[1] = bench.store.put(encode_batch([]))
        learner = await bench.learner()
        first, second = (await learner.step(0)).commit, (await learner.step(1)).commit
        assert (second.version, second.weights_digest) == (2, first.weights_digest)
        assert set(second.metrics) == {metric.name for metric in (*LEARNER_METRICS, *BATCH_METRICS)}
        await learner.close()

    run(body)


def test_a_batch_that_never_comes_names_what_it_waits_for(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path), steps=0)
        learner = await bench.learner()
        with pytest.raises(
            UnavailableError,
            match=r"reward 0: no token, group or reward for 0\.3\d* s; it waits for groups of step 0",
        ):
            await learner.step(0)
        await learner.close()

    run(body)


def test_a_step_of_a_paused_run_ends_with_the_reason_instead_of_asking_again(
    model_path: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path), steps=0)
        learner = await bench.learner()
        await bench.coordinator.pause("two digests of one step")
        with pytest.raises(IntegrityError, match="the run is paused: two digests of one step"):
            await learner.step(0)
        assert bench.coordinator.asked == 1
        await learner.close()

    run(body)


def test_every_metric_is_in_the_catalogue_and_staleness_is_split(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        learner = await bench.learner()
        await learner.step(0)
        metrics = (await learner.step(1)).commit.metrics
        assert [name for name in metrics if find_metric(name) is None] == []
        assert {metric.name for metric in LEARNER_METRICS} <= set(metrics)
        assert metrics["tokens.staleness_1"] == metrics["completion_tokens"]
        assert metrics["kl_k3.staleness_1"] == pytest.approx(metrics["kl_k3"])
        assert metrics["kl_k3"] >= 0 and 0 < metrics["effective_sample_share"] <= 1
        assert metrics["learning_rate"] == pytest.approx(1e-3)
        assert all(np.isfinite(value) for value in metrics.values())
        await learner.close()

    run(body)


@pytest.mark.parametrize("objective", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_the_rewarded_completion_becomes_more_probable(
    model_path: Path, tmp_path: Path, objective: str
) -> None:
    async def body() -> None:
        config = make_config(model_path, algorithm__objective=objective, learner__warmup_steps=0)
        bench = Bench(tmp_path, config, steps=0)
        learner = await bench.learner()
        prompt = (1, 2, 3)
        good, bad = np.array([4, 5, 6, 7], np.int32), np.array([8, 9, 10, 11], np.int32)

        async def logprobs(version: int, tokens: IntArray) -> FloatArray:
            """Return those of the published weights, computed by transformers alone."""
            weights = open_snapshot(await learner.publish(version), bench.payloads())
            model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
            ids = torch.tensor([[*prompt, *tokens.tolist()]])
            with torch.no_grad():
                found = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            return found.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()

        before = [await logprobs(0, tokens) for tokens in (good, bad)]
        for step in range(4):
            rows = []
            for place, (tokens, advantage) in enumerate([(good, 1.0), (bad, -1.0)]):
                found = await logprobs(step, tokens)
                rows.append(
                    BatchRow(
                        tokens, found, (VersionSpan(step, 0, 4),), FinishReason.STOP,
                        group_id="g", prompt_key="p", sample_index=place,
                        prompt_token_ids=np.array(prompt, np.int32),
                        reward=max(advantage, 0.0), advantage=advantage,
                    )
                )  # fmt: skip
            bench.coordinator.batches[step] = bench.store.put(encode_batch(rows))
            metrics = (await learner.step(step)).commit.metrics
            assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        after = [await logprobs(4, tokens) for tokens in (good, bad)]
        assert after[0].sum() > before[0].sum() + 0.05 and after[1].sum() < before[1].sum() - 0.05
        await learner.close()

    run(body)


@pytest.mark.parametrize(
    "changes",
    [{}, {"sampling__temperature": 0.7}, {"learner__zero_stage": 3}, {"rollout__max_model_tokens": 40}],
)
def test_a_manifest_says_what_the_version_computes(
    model_path: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """At temperature 1, in as many tokens as an engine can score, and the same when it is made again."""

    async def body() -> None:
        changes.setdefault("sampling__max_tokens", 16)
        found = []
        for name in ("once", "again"):
            bench = Bench(tmp_path / name, make_config(model_path, **changes))
            learner = await bench.learner()
            await learner.step(0)
            found.append([await learner.publish(version) for version in (0, 1)])
            await learner.close()
        assert [manifest.probe for manifest in found[0]] == [manifest.probe for manifest in found[1]]
        tensors = open_snapshot(found[1][1], bench.payloads())
        assert tensors.probe == found[0][1].probe != found[0][0].probe
        probe = found[0][1].probe
        assert probe is not None and len(probe.logprobs) == min(
            64, changes.get("rollout__max_model_tokens", 512) - 2
        )
        model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
        ids = torch.tensor([probe.tokens])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(probe.logprobs, scores.numpy(), atol=1e-5)
        assert not probe_problem(probe, scores.numpy(), "float32")

    run(body)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_gradient_is_clipped(model_path: Path, tmp_path: Path, stage: int) -> None:
    async def body() -> None:
        # AdamW forgets the gradient's scale unless it falls far below its epsilon of 1e-8.
        moved = []
        for clip in (1.0, 1e-12):
            config = make_config(model_path, learner__gradient_clip=clip, learner__zero_stage=stage)
            bench = Bench(tmp_path / str(clip), config)
            learner = await bench.learner()
            base = open_snapshot(await learner.publish(0), bench.payloads())
            metrics = (await learner.step(0)).commit.metrics
            trained = open_snapshot(await learner.publish(1), bench.payloads())
            moved.append(max(float((trained[name] - base[name]).abs().max()) for name in base))
            assert metrics["gradient_norm"] > 1e-3  # as it was before clipping
            await learner.close()
        assert moved[0] > 1e-4 and moved[1] < 1e-6

    run(body)


def test_budgets_train_to_nearly_the_same_weights(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        found = []
        for place, budget in enumerate([64, 4096]):
            config = make_config(model_path, learner__micro_batch_tokens=budget)
            learner = await Bench(tmp_path / str(place), config).learner()
            found.append((await learner.step(0)).commit.metrics)
            await learner.close()
        assert found[0]["micro_batches"] > 1 == found[1]["micro_batches"]
        for metrics in found[1:]:
            for name in ("loss", "gradient_norm", "kl_k1", "ratio_mean"):
                assert metrics[name] == pytest.approx(found[0][name], rel=1e-3, abs=1e-6)

    run(body)


def test_everything_works_over_grpc(model_path: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, make_config(model_path))
        service = await bench.learner()

        def register(server: Any) -> None:
            register_learner(server, service)
            register_broadcast(server, BroadcastService(bench.payloads()))

        server, port = await start_server("127.0.0.1", 0, register, ["antiphon.Learner"])
        service.origin = f"127.0.0.1:{port}"
        learner, origin = LearnerClient(service.origin), BroadcastClient(service.origin)
        await service.publish_again()
        assert bench.coordinator.manifests[0].origin == service.origin
        result, counters = None, [0]
        while result is None:
            reply = await learner.await_step(0, 0.05)
            result = reply.result
            counters.append(reply.progress.counter)
        assert result.commit == bench.coordinator.commits_made[0]
        assert counters == sorted(counters) and counters[-1] > 0
        while (manifest := (await learner.await_snapshot(1, 0.05)).manifest) is None:
            pass
        mine = PayloadStore(tmp_path / "mine")
        await fetch_snapshot(manifest, origin, mine, 30.0)
        assert weights_digest(open_snapshot(manifest, mine)) == result.commit.weights_digest
        assert await service.restore() == 1
        status = await learner.status()
        assert status.version == 1 and status.state == "idle"
        with pytest.raises(ContractError, match="step 7 is not the next one"):
            await learner.await_step(7, 5.0)
        await learner.close()
        await origin.close()
        await stop_server(server, 0.1)
        await service.close()

    run(body)


def test_a_model_with_dropout_trains_without_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    ).save_pretrained(tmp_path / "gpt2")
    tokens = torch.arange(16)[None]
    model = load_causal_model(str(tmp_path / "gpt2"), torch.float32, False)
    assert model.training
    once, again, sampled = model(tokens).logits, model(tokens).logits, model.eval()(tokens).logits
    assert torch.equal(once, again) and torch.equal(once, sampled)


def test_a_model_that_adds_noise_while_it_trains_is_refused(tmp_path: Path, model_path: Path) -> None:
    torch.manual_seed(0)
    shape = Qwen3Config.from_pretrained(model_path)
    shape.attention_dropout = 0.5
    Qwen3ForCausalLM(shape).save_pretrained(tmp_path)
    load_causal_model(str(tmp_path), torch.float32, False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(policy_module, "_silence_dropout", lambda model: None)
        with pytest.raises(ConfigError, match="computes with noise while it trains"):
            load_causal_model(str(tmp_path), torch.float32, False)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):

        async def body(path: Path = path) -> None:
            with pytest.raises(ConfigError, match=r"model\.path"):
                await Bench(tmp_path, make_config(path)).learner()

        run(body)


@pytest.mark.parametrize("objective", ["dapo", "grpo", "dr_grpo", "cispo"])
def test_what_the_filter_leaves_out_changes_the_work_and_not_the_update(
    model_path: Path, tmp_path: Path, objective: str
) -> None:
    config = make_config(model_path, algorithm__objective=objective)
    rows = [replace(row, advantage=0.0) if row.group_id.endswith("g1") else row for row in make_rows(0)]
    kept = [row for row in rows if row.advantage]
    tokens = sum(len(row.token_ids) for row in rows if not row.advantage)
    left_out = [LeftOut("s0-g1", len(rows) - len(kept), tokens)]
    whole = trained_norm(config, tmp_path / "a", encode_batch(rows))
    assert trained_norm(config, tmp_path / "b", encode_batch(kept, left_out)) == pytest.approx(
        whole, rel=1e-5
    )
    alone = make_config(model_path, algorithm__objective=objective, algorithm__divisor="trained")
    found = trained_norm(alone, tmp_path / "c", encode_batch(kept, left_out))
    assert found > 1.5 * whole  # half of the groups are in it
    assert trained_norm(config, tmp_path / "d", encode_batch(kept)) == found


def trained_weights(config: RunConfig, folder: Path, batches: list[bytes]) -> tuple[str, list[float]]:
    """Return the digest of the weights after some steps, and the learning rate of each."""
    trainer = Trainer(config, CheckpointStore(folder, 1))
    trainer.start(0)
    try:
        done = [trainer.train(step, payload) for step, payload in enumerate(batches)]
        return done[-1].weights.digest(), [step.metrics["learning_rate"] for step in done]
    finally:
        trainer.stop()


class Noting:
    """An engine that notes what the updates of a step are made from."""

    learning_rate = 1e-3

    def __init__(self) -> None:
        self.updates: list[tuple[set[str], float, UpdateTotals]] = []
        """Groups, their completion tokens, and what is divided by."""

    def weights(self) -> None:
        """There are none."""

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        return torch.zeros_like(batch.mask)

    def update(
        self, given: Iterable[MicroBatch], totals: UpdateTotals, proximal: object, share: float, done: Done
    ) -> float:
        batches = list(given)
        groups = {group for batch in batches for group, _ in batch.rows}
        self.updates.append((groups, sum(batch.completion_tokens for batch in batches), totals))
        for batch in batches:
            zero = torch.zeros_like(batch.mask)
            done(batch, 0.0, TokenMetrics(zero, zero.bool(), zero.bool(), zero))
        return 0.0


def updates_of(config: RunConfig, folder: Path, payload: bytes) -> list[tuple[set[str], float, UpdateTotals]]:
    engine = Noting()
    trainer = Trainer(config, CheckpointStore(folder, 1), lambda _: engine)  # type: ignore[arg-type]
    trainer.start(0)
    trainer.train(0, payload)
    return engine.updates


def test_a_filter_deals_no_group_to_another_update(model_path: Path, tmp_path: Path) -> None:
    """Four groups, two updates; the first group has no variance. Its update has the third group alone."""
    rows = [
        replace(row, group_id=f"g{2 * seed + place // 4}", advantage=row.advantage * (seed + place // 4 > 0))
        for seed in (0, 1)
        for place, row in enumerate(make_rows(seed))
    ]
    kept = [row for row in rows if row.advantage]
    assert {row.group_id for row in kept} == {"g1", "g2", "g3"}
    left_out = [LeftOut("g0", 4, sum(len(row.token_ids) for row in rows if row.group_id == "g0"))]
    config = make_config(model_path, algorithm__updates_per_step=2)
    parts = [
        updates_of(config, tmp_path, payload)
        for payload in (encode_batch(rows), encode_batch(kept, left_out))
    ]
    for of_all, of_kept in zip(*parts, strict=True):
        assert of_all[0] - {"g0"} == of_kept[0] - {"g0"}
        assert of_all[2].tokens == of_kept[2].tokens


def test_a_batch_of_an_earlier_version_is_dealt_as_it_was_then(model_path: Path, tmp_path: Path) -> None:
    rows = [
        replace(row, group_id=f"g{2 * seed + place // 4 + 1}")
        for seed in (0, 1)
        for place, row in enumerate(make_rows(seed))
    ]
    config = make_config(model_path, algorithm__updates_per_step=2)
    first, second = updates_of(config, tmp_path, encode_batch(rows, [LeftOut("", 4, 22)]))
    assert [first[2].tokens - first[1], second[2].tokens - second[1]] == [11.0, 11.0]
    assert [first[0], second[0]] == [{"g1", "g3"}, {"g2", "g4"}]


@pytest.mark.parametrize("updates", [1, 3])
def test_the_learning_rate_is_that_of_the_step_whatever_was_trained_before(
    model_path: Path, tmp_path: Path, updates: int
) -> None:
    choice = {"run__steps": 4, "learner__schedule": "cosine", "learner__final_rate_share": 0.1}
    config = make_config(model_path, **choice, algorithm__updates_per_step=updates)
    full = [encode_batch(make_rows(step)) for step in range(4)]
    with_empty = [full[0], encode_batch([]), encode_batch(make_rows(2)[:4]), full[3]]
    _, rates = trained_weights(config, tmp_path / "a", full)
    digest, again = trained_weights(config, tmp_path / "b", with_empty)
    assert again == rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    # And it is what the update was made with: the last step alone, from the same weights, says so.
    flat = make_config(model_path, **choice | {"learner__schedule": "constant"})
    assert digest != trained_weights(flat, tmp_path / "c", with_empty)[0]


def trained_norm(config: RunConfig, folder: Path, payload: bytes) -> float:
    """Return the norm of the gradient of one step, before clipping."""
    trainer = Trainer(config, CheckpointStore(folder, 1))
    trainer.start(0)
    try:
        return trainer.train(0, payload).metrics["gradient_norm"]
    finally:
        trainer.stop()


def test_completions_that_were_cut_off_or_not_scored_are_in_neither_update_nor_divisor(
    model_path: Path, tmp_path: Path
) -> None:
    rows = [
        replace(row, finish_reason=FinishReason.LENGTH) if row.sample_index == 1 else row
        for row in make_rows(0)
    ]
    config = make_config(model_path, algorithm__truncated_completions="mask")
    ended = [row for row in rows if row.finish_reason is FinishReason.STOP]
    masked = trained_norm(config, tmp_path / "a", encode_batch(rows))
    assert masked == trained_norm(config, tmp_path / "b", encode_batch(ended))
    assert masked != trained_norm(make_config(model_path), tmp_path / "c", encode_batch(rows))
    # Masked in the loss alone they stay in the divisor, as what the filter left out does.
    loss_alone = make_config(model_path, algorithm__truncated_completions="mask_loss")
    cut = sum(len(row.token_ids) for row in rows if row.finish_reason is FinishReason.LENGTH)
    whole = sum(len(row.token_ids) for row in rows)
    found = trained_norm(loss_alone, tmp_path / "e", encode_batch(rows))
    assert found == pytest.approx(masked * (whole - cut) / whole, rel=1e-5)
    failed = [replace(row, failure="it hung") if row.sample_index == 1 else row for row in make_rows(0)]
    assert masked == trained_norm(make_config(model_path), tmp_path / "d", encode_batch(failed))


def test_dr_grpo_divides_by_what_all_turns_of_a_trajectory_may_sample(
    model_path: Path, tmp_path: Path
) -> None:
    few = {"algorithm__objective": "dr_grpo", "sampling__max_tokens": 64, "environment__max_turns": 3}
    config = make_config(model_path, **few)
    rows = make_rows(0)
    ended = [replace(row, finish_reason=FinishReason.ENVIRONMENT) for row in rows]
    one_turn = trained_norm(config, tmp_path / "a", encode_batch(rows))
    assert trained_norm(config, tmp_path / "b", encode_batch(ended)) == pytest.approx(one_turn / 3, rel=1e-5)
    most = config.sampling.max_tokens + 1
    cut = make_config(model_path, **few, environment__max_trajectory_tokens=most)
    expected = one_turn * config.sampling.max_tokens / most
    assert trained_norm(cut, tmp_path / "c", encode_batch(ended)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", range(4))
def test_bfloat16_gradients_are_summed_in_float32(model_path: Path, stage: int) -> None:
    """A sum in bfloat16 stands still once it is 256 times as large as what is added."""
    config = make_config(model_path, learner__zero_stage=stage, learner__dtype="bfloat16")
    engine = DeepSpeedEngine(config)
    small, large = (make_micro_batches(make_rows(0, advantage)[:1], 0, 64) for advantage in (1.0, 1024.0))
    totals = UpdateTotals(32, 32.0)
    try:
        engine.sum_gradients(small, totals)
        once = {name: gradient.double() for name, gradient in engine.gradients().items()}
        engine.sum_gradients([*large, *small * 16], totals)
        for name, gradient in engine.gradients().items():
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient.double(), (1 + 1024 + 16) * once[name], rtol=1e-4, atol=0.0)
    finally:
        engine.close()


def test_an_engine_opens_again_after_another_library_has_left_the_process_group(model_path: Path) -> None:
    for _ in range(2):
        DeepSpeedEngine(make_config(model_path)).close()
        torch.distributed.destroy_process_group()
    DeepSpeedEngine(make_config(model_path)).close()
