"""The learner as a client's door asks it: calls by file, weights saved and loaded, scores, over the wire."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.core.client_records import AdamParameters, LoadOrder, SavedWeights, TrainingCall
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.loop.assembly import SealPlan
from antiphon.core.loop.group_state import Tally
from antiphon.lineage.client_steps import decode_result, encode_call, encode_step
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.saved_weights import read_note, saved_folder
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.services.coordinator.sealing import seal_batch
from antiphon.services.learner.client import LearnerClient
from antiphon.services.learner.server import open_learner, register_learner
from antiphon.services.learner.service import LearnerService
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from tests.services.learner.test_learner import RecordedCoordinator
from tests.support.client_calls import chunks, client_config, make_call
from tests.support.replay_artifacts import save_model

pytestmark = pytest.mark.engine
ADAM = AdamParameters(learning_rate=1e-2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


class SkippingCoordinator(RecordedCoordinator):
    """Puts an empty batch in the place of one that cannot be trained on."""

    def __init__(self, store: ArtifactStore) -> None:
        super().__init__()
        self._store = store

    async def skip_step(self, step: int, reason: str, operator: str) -> None:
        assert step == len(self.commits_made) and operator == "learner"
        self.batches[step] = self._store.put(encode_batch([]))


class Bench:
    """One run of a client, over which learners come and go; runs of one home share `root`."""

    def __init__(self, root: Path, config: RunConfig, run_id: str = "run") -> None:
        self.config, self.run_id, self.run_dir = config, run_id, root / run_id
        self.store = ArtifactStore(root / "store")
        self.coordinator: Any = SkippingCoordinator(self.store)
        (self.run_dir / "calls").mkdir(parents=True)

    async def learner(self) -> LearnerService:
        payloads = PayloadStore(self.run_dir / PAYLOADS)
        service = open_learner(self.config, self.run_id, self.run_dir, self.store, payloads, self.coordinator)
        service.origin = "127.0.0.1:1"
        await service.restore()
        await service.publish_again()
        return service

    def write(self, call: TrainingCall) -> str:
        payload = encode_call(call)
        digest = digest_bytes(payload)
        (self.run_dir / "calls" / digest).write_bytes(payload)
        return digest

    async def give(self, learner: Any, calls: Sequence[TrainingCall], first: int = 0) -> list[Any]:
        """Have calls done at their places; return their results."""
        found = []
        step = len(self.coordinator.commits_made)
        for place, call in enumerate(calls, first):
            digest = self.write(call)
            while not (reply := await learner.await_call(step, place, digest, call.forward_only, 5.0)).done:
                assert reply.held >= place, "it asks for earlier calls"
            found.append(decode_result((self.run_dir / "calls" / f"{digest}.out").read_bytes()))
        return found

    async def step(self, learner: Any, calls: Sequence[TrainingCall], order: Any = ADAM) -> str:
        """Seal a step and have it made; return the digest of its weights."""
        step = len(self.coordinator.commits_made)
        self.coordinator.batches[step] = self.store.put(encode_step(calls, order))
        while (reply := await learner.await_step(step, 5.0)).result is None:
            pass
        await learner.await_snapshot(step + 1, 5.0)
        return str(reply.result.commit.weights_digest)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 280))


def test_calls_over_the_wire_and_a_learner_killed_between_backward_and_step(
    model: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, client_config(model))
        learner = await bench.learner()
        server, port = await start_server("127.0.0.1", 0, lambda s: register_learner(s, learner), [])
        client = LearnerClient(f"127.0.0.1:{port}")
        parts = chunks(make_call(1, 20, "ppo"), 4)
        looked = await bench.give(client, [replace(parts[0], forward_only=True)])
        answered = await bench.give(client, parts)
        for own, other in zip(looked[0].logprobs, answered[0].logprobs, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-5)
        digest = bench.write(parts[1])
        assert (await client.await_call(0, 1, digest, False, 5.0)).done  # again: nothing is added
        other = await client.await_call(0, 1, bench.write(make_call(9)), False, 5.0)
        assert (other.held, other.done) == (0, False)  # one that failed was held: all are given again
        await bench.give(client, parts)
        with pytest.raises(ContractError, match=r"a call since version 3 cannot be done; .* version 0"):
            await client.await_call(3, 0, digest, False, 5.0)
        with pytest.raises(ContractError, match="datum 0 has no logprobs, which ppo needs"):
            await client.await_call(0, 4, bench.write(TrainingCall("ppo", {}, make_call().data)), False, 5.0)
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
        first = await bench.step(client, parts)
        second = await bench.step(client, parts[:1])
        await client.close()
        await stop_server(server)
        await learner.close()

        again = Bench(tmp_path / "other", client_config(model))
        shutil.copytree(tmp_path / "killed", again.run_dir, dirs_exist_ok=True)
        learner = await again.learner()
        reply = await learner.await_call(0, 3, again.write(parts[3]), False, 5.0)
        assert (reply.held, reply.done) == (0, False)  # they are to be given again
        await again.give(learner, parts[:2])
        assert await again.step(learner, parts) == first
        await learner.close()
        learner = await again.learner()  # no checkpoint of version 1: its step is repeated
        assert await again.step(learner, parts[:1]) == second
        await learner.close()

    run(body)


def test_a_gradient_that_is_no_number_pauses_no_client_and_an_empty_batch_makes_the_version(
    model: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, client_config(model))
        learner = await bench.learner()
        before = await bench.step(learner, chunks(make_call(1, 4), 1))
        good = make_call(2, 4)
        huge = replace(good, data=tuple(replace(one, inputs={"weights": one.inputs["weights"] * 1e30})
                                        for one in good.data))  # fmt: skip
        await bench.give(learner, [huge])
        with pytest.raises(IntegrityError, match="step 1 was not made: the norm of the gradient is inf"):
            await bench.step(learner, [huge])
        assert not bench.coordinator.paused
        plan = SealPlan(1, (), ())  # what the coordinator puts in the place of a skipped batch
        bench.coordinator.batches[1] = seal_batch(plan, {}, Tally(), bench.config, bench.store).digest
        made = await learner.await_step(1, 20.0)
        assert made.result is not None and made.result.commit.weights_digest == before
        await bench.give(learner, [good])
        after = await bench.step(learner, [good])
        assert after != before and len(bench.coordinator.commits_made) == 3
        await learner.close()
        again = await bench.learner()  # what was skipped is repeated as it was
        assert (await again.status()).version == 3
        await again.close()

    run(body)


def test_what_is_saved_is_loaded_by_another_run_and_stays_stored(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        config = client_config(model, broadcast__snapshots_kept=2, loop__max_staleness=0)
        bench = Bench(tmp_path, config, "one")
        learner, call = await bench.learner(), make_call()
        base = (await learner.await_saved("weights", "base", 0, 5.0)).digest
        first = await bench.step(learner, [call])
        for kind in ("weights", "sampler_weights"):
            while (saved := await learner.await_saved(kind, "a", 1, 5.0, 9.0)).digest is None:
                pass
            note = read_note(saved_folder(bench.run_dir, kind, "a"))
            assert note is not None and (note.version, note.expires_at) == (1, 9.0)
            assert saved.digest == first and (saved.bytes > 0) == (kind == "weights")
            again = await learner.await_saved(kind, "a", 1, 5.0)
            assert (again.digest, again.bytes) == (saved.digest, saved.bytes)
            note = read_note(saved_folder(bench.run_dir, kind, "a"))
            assert note is not None and (note.version, note.expires_at) == (1, None)
        for kind, name, version, words in (
            ("weights", "../a", 1, "cannot be a name"),
            ("all", "a", 1, "'all' cannot be saved"),
            ("weights", "b", 0, "version 0 cannot be saved; the learner holds version 1"),
            ("sampler_weights", "b", 7, "version 7 is not stored"),
        ):
            with pytest.raises(ContractError, match=words):
                await learner.await_saved(kind, name, version, 5.0)
        second = await bench.step(learner, [call])
        for _ in range(3):
            await bench.step(learner, [call])
        await learner.close()
        learner = await bench.learner()
        stored = PayloadStore(bench.run_dir / PAYLOADS).weights()
        assert (
            set(stored) == {0, 1, 4, 5}
            and stored[1] == first
            and bench.coordinator.manifests.keys() >= {0, 1, 5}
        )
        await learner.drop_saved("sampler_weights", "a")
        await learner.drop_saved("sampler_weights", "a")
        await bench.step(learner, [call])
        assert set(PayloadStore(bench.run_dir / PAYLOADS).weights()) == {0, 5, 6}
        await learner.close()

        other = Bench(tmp_path, client_config(model, run__seed=3), "two")
        learner = await other.learner()
        order = LoadOrder(SavedWeights("one", "weights", "a"), True, first)
        assert await other.step(learner, [], order) == first
        await learner.close()
        again = await bench.learner()
        await again.drop_saved("weights", "a")  # a checkpoint has what was loaded
        await again.close()
        learner = await other.learner()
        assert await other.step(learner, [call]) == second
        lost = LoadOrder(SavedWeights("one", "weights", "base"), True, first)
        with pytest.raises(IntegrityError, match=f"tinker://one/weights/base are {str(base)[:12]}"):
            await other.step(learner, [], lost)
        await learner.close()

    run(body)


def test_a_step_that_cannot_be_made_is_skipped_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    """A gradient that is no number, weights that it makes infinite, a checkpoint that is not there."""

    async def body() -> None:
        bench = Bench(tmp_path, client_config(model, learner__checkpoint_interval=1))
        learner, call = await bench.learner(), make_call()
        first = await bench.step(learner, [call])
        far = replace(call, data=tuple(replace(one, inputs=_times(one.inputs, 1e30)) for one in call.data))
        for calls, order, words in (
            ([far], ADAM, r"step 1 was not made: the norm of the gradient is inf; .* is version 1 again"),
            (
                [call],
                AdamParameters(learning_rate=1e38, weight_decay=1e3),
                r"step 2 was not made: .*learning_rate=1e\+38 cannot be",
            ),
            (
                [],
                LoadOrder(SavedWeights("run", "weights", "a"), True, first),
                "step 3 was not made: .*not there",
            ),
        ):
            with pytest.raises(IntegrityError, match=words):
                await bench.step(learner, calls, order)
            step = len(bench.coordinator.commits_made)
            while (reply := await learner.await_step(step, 5.0)).result is None:
                pass
            assert reply.result.commit.weights_digest == first and not bench.coordinator.paused
        assert await bench.step(learner, [call]) != first
        await learner.close()

    run(body)


def _times(inputs: Any, factor: float) -> dict[str, Any]:
    return {name: values * np.float32(factor) for name, values in inputs.items()}


def test_scores_are_those_of_the_version_asked_for(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, client_config(model))
        learner = await bench.learner()
        await bench.step(learner, [make_call()])
        ids = np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype=np.int32)
        server, port = await start_server("127.0.0.1", 0, lambda s: register_learner(s, learner), [])
        client = LearnerClient(f"127.0.0.1:{port}")
        found = [await client.score(version, ids, 3) for version in (0, 1, 0)]
        plain = AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            expected = plain(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)[:-1]
        for scores in (found[0], found[2]):
            assert np.isnan(scores.logprobs[0]) and (scores.top_ids[0] == -1).all()
            own = expected.gather(1, torch.from_numpy(ids[1:, None].astype(np.int64)))[:, 0]
            np.testing.assert_allclose(scores.logprobs[1:], own, atol=1e-5)
            np.testing.assert_array_equal(scores.top_ids[1:], expected.topk(3).indices)
            np.testing.assert_allclose(scores.top_logprobs[1:], expected.topk(3).values, atol=1e-5)
        assert np.abs(found[1].logprobs[1:] - found[0].logprobs[1:]).max() > 1e-3
        (one,) = (await client.score(1, ids[:1], 0)).logprobs
        assert np.isnan(one)
        for version, given, top, words in (
            (9, ids, 0, "version 9 are not kept"),
            (1, ids[:0], 0, "0 tokens cannot be scored"),
            (1, ids + 30, 0, "token 33 at place 0"),
            (1, ids, 99, "ask for 0 to 32"),
        ):
            with pytest.raises(ContractError, match=words):
                await client.score(version, given, top)
        await client.close()
        await stop_server(server)
        await learner.close()

    run(body)


def test_a_run_of_another_environment_does_nothing_for_clients(model: Path, tmp_path: Path) -> None:
    async def body() -> None:
        config = client_config(model, environment__name="reasoning/chain_sum")
        bench = Bench(tmp_path, config)
        learner = await bench.learner()
        with pytest.raises(ContractError, match=r"environment.name=client"):
            await learner.await_call(0, 0, bench.write(make_call()), False, 1.0)
        await learner.close()

    run(body)


def test_what_is_saved_after_a_commit_went_astray_is_the_committed_version(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        bench = Bench(tmp_path, client_config(model))
        learner = await bench.learner()
        base = learner._held_digest()

        async def away(commit: Any) -> None:
            raise ContractError("the coordinator is away")

        with monkeypatch.context() as patched:
            patched.setattr(bench.coordinator, "commit_step", away)
            with pytest.raises(ContractError, match="away"):
                await bench.step(learner, [make_call(1, 4)])
        note = saved_folder(bench.run_dir, "weights", "a") / "saved.json"
        for expires_at in (None, 7.0, 9.0):
            assert (await learner.await_saved("weights", "a", 0, 5.0, expires_at)).digest == base
            held = read_note(note.parent)
            assert held is not None and (held.version, held.expires_at) == (0, expires_at)
            assert (note.parent / "v00000000").is_dir()
        note.write_text('{"version": 0')  # half of it: saving again mends it
        assert (await learner.await_saved("weights", "a", 0, 5.0)).digest == base
        assert read_note(note.parent) is not None
        await learner.close()

    run(body)
