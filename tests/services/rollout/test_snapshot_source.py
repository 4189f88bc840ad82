"""A worker's snapshots come from the origin that the manifest names, and its engine from the run's config."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
import torch

from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.records import SnapshotManifest
from antiphon.net.rpc.serving import start_server, stop_server
from antiphon.services.rollout.engine import environment
from antiphon.services.rollout.process import engine_settings
from antiphon.services.rollout.snapshot_source import SnapshotSource
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.rpc import SERVICE_NAME, register_broadcast
from antiphon.weights.service import BroadcastService
from antiphon.weights.snapshot import weights_digest
from tests.support import snapshots


def publish(store: PayloadStore, version: int, port: int) -> SnapshotManifest:
    tensors = {"a": torch.full((700,), float(version)), "b": torch.arange(300, dtype=torch.float32)}
    return snapshots.publish(store, tensors, version, chunk_bytes=1024, origin=f"127.0.0.1:{port}")


def test_fetched_snapshots_are_opened_and_pruned(tmp_path: Path) -> None:
    async def story() -> None:
        origin = PayloadStore(tmp_path / "origin")
        server, port = await start_server(
            "127.0.0.1", 0, lambda s: register_broadcast(s, BroadcastService(origin)), [SERVICE_NAME]
        )
        source = SnapshotSource(PayloadStore(tmp_path / "w0"), RunConfig())
        manifests = [publish(origin, version, port) for version in range(3)]
        for manifest in manifests:
            await source.fetch(manifest)
            assert weights_digest(source.open(manifest)) == manifest.weights_digest
        source.prune(manifests[1:])
        with pytest.raises(UnavailableError):
            source.open(manifests[0])
        assert source.open(manifests[2])["a"][0] == 2.0
        await stop_server(server)
        with pytest.raises(UnavailableError):
            await source.fetch(manifests[0])

    asyncio.run(story())


def test_a_payload_altered_on_disk_is_not_loaded_and_can_be_fetched_again(tmp_path: Path) -> None:
    async def story() -> None:
        origin = PayloadStore(tmp_path / "origin")
        server, port = await start_server(
            "127.0.0.1", 0, lambda s: register_broadcast(s, BroadcastService(origin)), [SERVICE_NAME]
        )
        source = SnapshotSource(PayloadStore(tmp_path / "w0"), RunConfig())
        manifest = publish(origin, 1, port)
        await source.fetch(manifest)
        victim = PayloadStore(tmp_path / "w0").path(manifest.payloads[0].digest)
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.unlink()  # a name of its own, so that the origin's file stays as it is
        victim.write_bytes(data)
        with pytest.raises(IntegrityError):
            source.open(manifest)
        await source.fetch(manifest)
        assert weights_digest(source.open(manifest)) == manifest.weights_digest
        await stop_server(server)

    asyncio.run(story())


def test_engine_settings_follow_the_config(tmp_path: Path) -> None:
    config = build_config(
        {
            "model": {"dtype": "bfloat16"},
            "loop": {"group_size": 4},
            "rollout": {"concurrent_groups": 3, "kv_cache_mib": 32, "max_model_tokens": 300, "threads": 2},
            "sampling": {"sampler": "native"},
        }
    )
    settings = engine_settings(config, str(tmp_path))
    assert (settings.max_num_seqs, settings.max_model_len, settings.kv_cache_bytes) == (12, 300, 32 << 20)
    assert (settings.dtype, settings.threads, settings.sampler) == ("bfloat16", 2, "native")
    assert settings.rule == "inverse_cdf" and not settings.batch_invariant


def test_fixed_mode_asks_for_batch_invariance_where_vllm_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config({"loop": {"mode": "fixed"}, "sampling": {"rule": "gumbel"}})
    settings = engine_settings(config, str(tmp_path))
    assert settings.batch_invariant and settings.rule == "gumbel"
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for capability, asked in (((9, 0), "1"), ((8, 0), None), (None, None)):
        monkeypatch.setattr(environment, "_compute_capability", lambda seen=capability: seen)
        os.environ.pop("VLLM_BATCH_INVARIANT", None)
        environment.prepare_environment(settings)
        assert os.environ.get("VLLM_BATCH_INVARIANT") == asked


def test_a_hub_name_is_no_model_for_the_engine() -> None:
    with pytest.raises(ConfigError, match=r"model\.path='owner/model'"):
        engine_settings(RunConfig(), "owner/model")


def test_a_machine_that_cannot_compile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = build_config({"rollout": {"compiled": True}})
    with pytest.raises(ConfigError, match=r"rollout\.compiled=true needs a C\+\+ compiler.*no-such-compiler"):
        engine_settings(config, str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(sys, "prefix", "/usr")  # the path of an environment must have no blank
    assert not engine_settings(config, str(tmp_path)).eager
