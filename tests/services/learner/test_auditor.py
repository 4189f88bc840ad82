"""The auditor on its own: bounded memory, versions that are gone, cuts that rounding moves."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.benchmarks.parts.trust import dishonest_workers as workers
from antiphon.core.errors import UnavailableError
from antiphon.core.records import GroupSubmission, GroupToAudit, Lease, SamplingParameters, VersionSpan
from antiphon.core.seeds import branch_seed
from antiphon.core.spans import Branch
from antiphon.core.trust.audit import AuthoredSpan, Band, Sums, audit_group
from antiphon.services.learner import scoring
from antiphon.services.learner.audits import auditor as auditor_module
from antiphon.services.learner.audits.audit_loop import TokenScores
from antiphon.services.learner.audits.auditor import Auditor, score_tokens
from antiphon.weights.payload_store import PayloadStore
from tests.support.audited import CONFIG, ScoringAuditor


@pytest.fixture(scope="module")
def sampler() -> workers.TinySampler:
    torch.set_num_threads(1)
    return workers.load_sampler()


def to_audit(lease: Lease, made: workers.Group, *authors: AuthoredSpan) -> GroupToAudit:
    submission = GroupSubmission(lease.lease_id, lease.group_id, "w-1", made, 0.1)
    return GroupToAudit(submission, lease.prompt_token_ids, lease.sampling, authors=authors)


def test_no_more_than_the_bound_is_in_memory(
    sampler: workers.TinySampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of one row and three tokens each it finds the same as at once."""
    (lease,) = workers.trust_leases(1)
    (made,) = workers.cherry_picked(sampler, 1)([lease])
    auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
    whole = auditor.examine(to_audit(lease, made))
    sizes, score = [], auditor_module.score_tokens

    def seen(into: TokenScores, logits: torch.Tensor, *rest: object) -> None:
        sizes.append(logits.shape[0])
        score(into, logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(auditor_module, "score_tokens", seen)
    monkeypatch.setattr(scoring, "PASS_TOKENS", 1)
    monkeypatch.setattr(auditor_module, "LOGITS_AT_ONCE", 3 * sampler.vocabulary)
    parts = auditor.examine(to_audit(lease, made))
    assert max(sizes) == 3 and sum(sizes) == sum(one.token_ids.size for one in made)
    assert Sums.of(parts) == Sums.of(whole) and Sums.of(whole).missed
    assert [s.drift for s in parts] == pytest.approx([s.drift for s in whole], abs=1e-5)


def test_tokens_count_for_those_who_sampled_them(sampler: workers.TinySampler) -> None:
    (lease,) = workers.trust_leases(1)
    (made,) = workers.honest(sampler)([lease])
    auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
    spans = (AuthoredSpan(0, "a-1", 0, 4), AuthoredSpan(0, "b-1", 4, 6), AuthoredSpan(1, "a-1", 0, 2))
    found = auditor.examine(to_audit(lease, made, *spans))
    sizes = {(s.sample_index, s.author): s.tokens for s in found}
    assert (sizes[0, "a-1"], sizes[0, "b-1"], sizes[0, ""]) == (4, 2, made[0].token_ids.size - 6)
    assert sizes[1, "a-1"] == 2 and sizes[2, ""] == made[2].token_ids.size
    assert sum(sizes.values()) == sum(one.token_ids.size for one in made)


def test_tokens_over_a_kept_cache_are_left_out_and_counted(sampler: workers.TinySampler) -> None:
    (lease,) = workers.trust_leases(1)
    (made,) = workers.honest(sampler)([lease])
    size = made[0].token_ids.size
    spans = (VersionSpan(0, 0, 4), VersionSpan(1, 4, size, True))
    wrong = made[0].logprobs - 5.0  # as any clean pass would find those of a cache of other weights
    wrong[:4] = made[0].logprobs[:4]
    kept = dataclasses.replace(made[0], spans=spans, logprobs=wrong)
    auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
    authors = (AuthoredSpan(0, "a-1", 2, 6),)
    found = auditor.examine(to_audit(lease, (kept, *made[1:]), *authors))
    first, other = [s for s in found if s.sample_index == 0]
    assert (first.tokens, first.kept_cache, first.gross) == (2, size - 6, 0)
    assert (other.author, other.tokens, other.kept_cache) == ("a-1", 2, 2)
    assert all(s.kept_cache == 0 and s.tokens for s in found if s.sample_index)
    assert not audit_group(found, Band())


def test_a_branch_is_scored_in_its_own_context_and_by_its_own_seed(sampler: workers.TinySampler) -> None:
    first, second = workers.trust_leases(2)
    second = dataclasses.replace(second, seeds=tuple(branch_seed(seed, 1) for seed in first.seeds))
    made, parts = workers.honest(sampler)([first, second]), []
    for one, other in zip(*made, strict=True):
        prompts = [np.array(lease.prompt_token_ids, dtype=np.int32) for lease in (first, second)]
        sizes = [prompts[0].size, one.token_ids.size, prompts[1].size, other.token_ids.size]
        ends = np.cumsum(sizes).tolist()
        silence = [np.zeros(prompt.size, dtype=np.float32) for prompt in prompts]
        parts.append(
            dataclasses.replace(
                one,
                token_ids=np.concatenate([prompts[0], one.token_ids, prompts[1], other.token_ids]),
                logprobs=np.concatenate([silence[0], one.logprobs, silence[1], other.logprobs]),
                spans=(VersionSpan(0, ends[0], ends[1]), VersionSpan(0, ends[2], ends[3])),
                observed=((0, ends[0]), (ends[1], ends[2])),
                breaks=(ends[1],),
            )
        )
    hosted = dataclasses.replace(first, prompt_token_ids=())
    auditor = ScoringAuditor(CONFIG, None, sampler.model)  # type: ignore[arg-type]
    found = auditor.examine(to_audit(hosted, tuple(parts)))
    assert Sums.of(found).tokens == sum(part.sampled_tokens for part in parts)
    assert not Sums.of(found).missed and not audit_group(found, Band())
    unbroken = tuple(dataclasses.replace(part, breaks=()) for part in parts)
    assert Sums.of(auditor.examine(to_audit(hosted, unbroken))).missed


def test_a_version_that_is_gone_is_a_reason_and_no_end(tmp_path: Path, sampler: workers.TinySampler) -> None:
    (lease,) = workers.trust_leases(1)
    (made,) = workers.honest(sampler)([lease])
    auditor = Auditor(CONFIG, PayloadStore(tmp_path), sampler.model)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="version 0 is not kept any more"):
            auditor.examine(to_audit(lease, made))


def test_a_manifest_that_is_pruned_while_it_is_read_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = PayloadStore(tmp_path)
    monkeypatch.setattr(PayloadStore, "versions", lambda self: [3])  # as listed a moment before
    with pytest.raises(UnavailableError, match="version 3 was pruned"):
        payloads.manifest(3)


def test_a_cut_that_rounding_moves_is_no_proof() -> None:
    """Two tokens at the edge of top-k: the engine kept the one that the auditor's last bits cut off."""
    logits = torch.tensor([[2.0, 1.0, 1.0 - 1e-6, -3.0]])
    sampling = SamplingParameters(top_k=2)
    model = workers.load_sampler()
    (lease,) = workers.trust_leases(1)
    (made,) = workers.honest(model)([lease])
    grosses = []
    for token, seed in ((2, seed) for seed in range(40)):
        one = dataclasses.replace(
            made[0], token_ids=np.array([token]), logprobs=np.array([-1.3], dtype=np.float32), seed=seed
        )
        scores = TokenScores.of(dataclasses.replace(one, spans=()))
        branch = Branch(0, np.zeros(5, dtype=np.int32), 0, 1)
        score_tokens(scores, logits, one, np.array([0]), branch, sampling, "inverse_cdf", "float32")
        assert scores.cut[0]
        grosses.append(bool(scores.gross[0]))
    # Only where no cut explains the token: most uniforms lie in the first token's interval.
    assert 0 < sum(grosses) < len(grosses)
