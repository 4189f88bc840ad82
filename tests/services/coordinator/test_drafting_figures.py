"""Figures of drafting over real gRPC: from a worker's hand-in to the learner's batch."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.drafting.statistics import drafting_rates
from antiphon.core.records import DraftingStatistics, GroupSubmission, Lease
from antiphon.lineage.rollout_table import decode_timings
from tests.support import light_parties
from tests.support.light_parties import run_parties, sample_lease, served
from tests.support.loop_model import make_config


def drafted_lease(lease: Lease, worker_id: str, version: int) -> GroupSubmission:
    """Hand in a group with figures that are honest for even groups, and NaN or too large for the others."""
    plain = sample_lease(lease, worker_id, version)
    tokens = sum(t.token_ids.size for t in plain.trajectories)
    seed = lease.seeds[0] % 4
    figures = DraftingStatistics(
        tokens, tokens, 3, 2, 1, len(lease.seeds), 0.5, 0.25, 2.0, completions=len(lease.seeds)
    )
    if seed == 1:
        figures = replace(figures, sampler_s=math.nan)
    if seed == 3:
        figures = replace(figures, accepted=tokens + 7)
    return replace(plain, drafting=figures)


def test_a_run_sums_what_can_be_true_and_its_batches_stay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(mode="fixed", filter_="none", steps=4)

    async def batches(name: str) -> tuple[list[str], list[DraftingStatistics | None], list[int]]:
        (tmp_path / name).mkdir()
        async with served(config, tmp_path / name) as site:
            refs, _ = await run_parties(site.client(), config, seed=1, store=site.store)
            counted = [
                sum(t.passes is not None for t in decode_timings(site.store.get(ref.timings_digest)))
                for ref in refs
            ]
            return [ref.digest for ref in refs], [ref.drafting for ref in refs], counted

    async def run() -> None:
        plain, none, _ = await batches("plain")
        assert none == [None] * 4
        monkeypatch.setattr(light_parties, "sample_lease", drafted_lease)
        drafted, figures, counted = await batches("drafted")
        assert drafted == plain
        assert 0 < sum(counted) < 4 * 6, "some workers lied, and only their figures are missing"
        for whole, rows in zip(figures, counted, strict=True):
            assert (whole is None) == (rows == 0)
            if whole is not None:
                assert whole.completions == whole.with_history == rows
                rates = drafting_rates(whole)
                assert np.isfinite(list(rates.values())).all() and rates["history_share"] == 1.0

    asyncio.run(run())
