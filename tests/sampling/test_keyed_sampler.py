"""Keyed sampling: the distribution, the rounding edges, and independence of everything but the key."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.sampling import keyed_sampler as ks
from antiphon.sampling.keyed_sampler import PLAIN, RowSampling, draw, verify_chain

LARGEST_U = 1.0 - 2.0**-53
uint64 = st.integers(0, 2**64 - 1)


def keys_of(seeds: list[int]) -> np.ndarray:
    return np.array([ks.request_key(s) for s in seeds], dtype=np.uint64)


def reference(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Return the processed distribution of one row, by the textbook."""
    z = logits.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: top_k or len(p)]
    mass = np.cumsum(p[kept]) / p[kept].sum()
    kept = kept[: int(np.searchsorted(mass, top_p)) + 1]
    q = np.zeros_like(p)
    q[kept] = p[kept]
    return q / q.sum()


def rows(
    n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, vocabulary: int = 0
) -> RowSampling:
    return RowSampling(
        temperature=torch.full((n,), temperature, dtype=torch.float64),
        top_k=torch.full((n,), top_k or vocabulary) if top_k else None,
        top_p=torch.full((n,), top_p, dtype=torch.float64) if top_p < 1 else None,
    )


def chi_square_z(counts: np.ndarray, p: np.ndarray) -> float:
    n = counts.sum()
    common = p * n >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common] * n, p[~common].sum() * n)
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
    degrees = len(observed) - 1
    return float((((observed - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * max(degrees, 1)))


# --- the hash -----------------------------------------------------------------------------------


def test_hash_has_not_changed():
    # A change would make recorded runs irreproducible.
    assert ks.mix64(0) == 0xE220A8397B1DCDAF  # first output of splitmix64 seeded with 0
    seeds, positions = [0, 1, 2**64 - 1], [0, 7, 511]
    golden = [0.6524484863740322, 0.4120349818416186, 0.3310321492033077]
    scalar = [
        (ks.mix64(ks.mix64(s) ^ (p * 0xD1342543DE82EF95 & (2**64 - 1))) >> 11) * 2.0**-53
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert scalar == golden
    assert ks.uniforms(keys_of(seeds), np.array(positions)).tolist() == golden


def test_numbers_are_uniform_along_positions_and_across_seeds():
    along = ks.uniforms(np.repeat(keys_of([5]), 50_000), np.arange(50_000))
    across = ks.uniforms(keys_of(list(range(50_000))), np.full(50_000, 3))
    for u in (along, across):
        counts = np.bincount((u * 100).astype(int), minlength=100)
        assert abs(chi_square_z(counts, np.full(100, 0.01))) < 4
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(along, across)[0, 1]) < 0.02


# --- the distribution ---------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch):
    """Let 600 tokens count as a large vocabulary."""
    monkeypatch.setattr(ks, "FLAT_VOCABULARY", 100)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("vocabulary", [64, 600], ids=["flat", "blocks"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (0.7, 9, 0.9)],
)
def test_law_and_processed_logprobs(vocabulary, temperature, top_k, top_p):
    n = 4000
    generator = torch.Generator().manual_seed(vocabulary + top_k)
    logits = 2.0 * torch.randn(vocabulary, generator=generator)
    logits[: vocabulary // 2] -= 6.0
    p = reference(logits.numpy(), temperature, top_k, top_p)
    u = torch.from_numpy(ks.uniforms(keys_of(list(range(n))), np.full(n, 11)))
    tokens, logprobs = draw(logits.expand(n, -1), u, rows(n, temperature, top_k, top_p, vocabulary))
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    assert counts[p == 0].sum() == 0
    assert abs(chi_square_z(counts, p)) < 4
    np.testing.assert_allclose(logprobs.numpy(), np.log(p[tokens.numpy()]), atol=1e-5)


def test_inverse_cdf_by_hand():
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]])).expand(5, -1)
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501], dtype=torch.float64)
    assert draw(logits, u, PLAIN)[0].tolist() == [0, 0, 1, 1, 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 700), st.sampled_from([torch.float32, torch.bfloat16]))
def test_two_levels_agree_with_one(seed, vocabulary, dtype):
    generator = torch.Generator().manual_seed(seed)
    weights = (3 * torch.randn(4, vocabulary, generator=generator)).to(dtype).float().exp()
    u = torch.rand(4, dtype=torch.float64, generator=generator)
    flat, flat_total = ks._invert_flat(weights.double(), u)
    blocks, blocks_total = ks._invert_blocks(weights, u)
    assert torch.equal(flat, blocks)
    torch.testing.assert_close(flat_total, blocks_total)


def test_logprobs_of_bfloat16_logits_are_those_of_the_logits_as_they_are():
    # Subtracting the maximum in bfloat16 rounds once more, by up to 0.03 nats (seen with p > 1e-4).
    generator = torch.Generator().manual_seed(3)
    logits = (3.0 * torch.randn(400, 4000, generator=generator)).to(torch.bfloat16)
    u = torch.rand(400, dtype=torch.float64, generator=generator)
    tokens, logprobs = draw(logits, u, PLAIN)
    exact = logits.double().log_softmax(-1)
    chosen = exact.gather(-1, tokens[:, None])[:, 0]
    assert (logprobs.double() - chosen).abs().max() < 1e-4
    assert (ks.score(logits, tokens, PLAIN).double() - chosen).abs().max() < 1e-4
    assert torch.equal(tokens, draw(logits.float(), u, PLAIN)[0])
    low, high = ks.intervals(logits, tokens, PLAIN)
    assert ((low <= u + 1e-9) & (u <= high + 1e-9)).all()


# --- the edges ----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [64, 9000], ids=["flat", "blocks"])
@pytest.mark.parametrize("top_k", [1, 2, 7])
def test_extreme_uniforms_stay_inside_the_top_k(vocabulary, top_k):
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(200, vocabulary, generator=generator)
    best = logits.topk(top_k).indices
    for u in (0.0, LARGEST_U):
        tokens, logprobs = draw(
            logits, torch.full((200,), u, dtype=torch.float64), rows(200, 1.0, top_k, vocabulary=vocabulary)
        )
        edge = best.min(-1).values if u == 0.0 else best.max(-1).values
        assert torch.equal(tokens, edge)
        assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("vocabulary", [64, 9000], ids=["flat", "blocks"])
def test_tokens_of_probability_zero_are_never_drawn(vocabulary):
    logits = torch.full((2, vocabulary), -float("inf"))
    logits[:, 3] = 0.0
    logits[:, 5] = 1.0
    tokens, _ = draw(logits, torch.tensor([0.0, LARGEST_U], dtype=torch.float64), PLAIN)
    assert tokens.tolist() == [3, 5]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_the_largest_are_kept_and_of_those_tied_the_first(seed, values):
    random = np.random.default_rng(seed)
    weights = torch.from_numpy(random.integers(0, values, (6, 48)) / 7).float()
    k = torch.from_numpy(random.integers(1, 49, 6))
    expected = torch.zeros_like(weights)
    for row, count in enumerate(k.tolist()):
        kept = np.argsort(-weights[row].numpy(), kind="stable")[:count].copy()
        expected[row, kept] = weights[row, kept]
    assert torch.equal(ks._cut(weights, ks.RowSampling(top_k=k)), expected)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 8, 30, 40, 512]), st.sampled_from([0.1, 0.5, 0.9]))
def test_a_set_that_is_cut_by_mass_is_the_one_that_sorting_everything_finds(seed, left, top_p):
    """Bit for bit, with ties, beside rows that keep all and rows with fewer tokens left."""
    random = np.random.default_rng(seed)
    weights = torch.zeros(6, 512)
    for row in range(6):
        count = random.integers(0, left + 1) if row else left
        places = torch.from_numpy(random.permutation(512)[:count])
        weights[row, places] = torch.from_numpy(random.integers(1, 6, count) / 7).float()
    shares = torch.tensor([top_p, 1.0, top_p, 0.3, 1.0, top_p], dtype=torch.float64)
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    running = ordered.cumsum(-1, dtype=torch.float64)
    cut = ((running - ordered) >= shares[:, None] * running[:, -1:]) & (shares < 1.0)[:, None]
    expected = torch.zeros_like(weights).scatter_(-1, order, ordered.masked_fill(cut, 0.0))
    assert torch.equal(ks._cut(weights, ks.RowSampling(top_p=shares)), expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_both_cuts_leave_what_sorting_everything_finds(seed, most, top_p):
    """Bit for bit, with ties at both edges, where few are kept of a large vocabulary and where many are."""
    random = np.random.default_rng(seed)
    weights = torch.from_numpy(random.integers(0, 40, (5, 640)) / 7).float()
    k = torch.tensor([most, 640, 1, most, 640])
    shares = torch.tensor([top_p, top_p, 0.3, 1.0, 1.0], dtype=torch.float64)
    for some in (slice(None), slice(2, 4), slice(4, 5)):
        ordered, order = weights[some].sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(torch.arange(640) >= k[some, None], 0.0)
        running = ordered.cumsum(-1, dtype=torch.float64)
        share = shares[some, None]
        cut = ((running - ordered) >= share * running[:, -1:]) & (share < 1.0)
        expected = torch.zeros_like(weights[some]).scatter_(-1, order, ordered.masked_fill(cut, 0.0))
        assert torch.equal(
            ks._cut(weights[some], ks.RowSampling(top_k=k[some], top_p=shares[some])), expected
        )


@given(st.integers(0, 2**32 - 1), st.floats(0, LARGEST_U), st.integers(1, 64), st.floats(0.01, 1.0))
def test_drawn_token_is_possible(seed, u, top_k, top_p):
    logits = 5 * torch.randn(1, 64, generator=torch.Generator().manual_seed(seed))
    token, logprob = draw(logits, torch.tensor([u], dtype=torch.float64), rows(1, 0.8, top_k, top_p, 64))
    p = reference(logits[0].numpy(), 0.8, top_k, top_p)
    # At the very edge of the top-p set the reference may round the other way.
    assert p[token] > 0 or np.isclose(np.sort(p[p > 0])[::-1][:-1].sum(), top_p, atol=1e-6)
    assert logprob <= 1e-6


def test_ties_at_the_edge_keep_exactly_k_smaller_ids():
    logits = torch.zeros(500, 64)
    u = torch.linspace(0, LARGEST_U, 500, dtype=torch.float64)
    tokens, logprobs = draw(logits, u, rows(500, 1.0, 10, vocabulary=64))
    assert sorted(set(tokens.tolist())) == list(range(10))
    np.testing.assert_allclose(logprobs.numpy(), np.log(0.1), atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(1, 12))
def test_top_k_keeps_k_of_the_largest(seed, vocabulary, top_k):
    values = torch.randint(0, 8, (3, vocabulary), generator=torch.Generator().manual_seed(seed)).double() + 1
    kept = ks._cut(values, ks.RowSampling(top_k=torch.tensor([top_k, vocabulary, 1])))
    for row, k in enumerate((min(top_k, vocabulary), vocabulary, 1)):
        assert int((kept[row] > 0).sum()) == k
        assert torch.equal(kept[row].sort().values[-k:], values[row].sort().values[-k:])


def test_nan_is_reported_not_hidden():
    logits = torch.zeros(2, 64)
    logits[0, 9] = float("nan")
    tokens, logprobs = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), PLAIN)
    assert torch.isnan(logprobs[0]) and torch.isfinite(logprobs[1])
    assert ((tokens >= 0) & (tokens < 64)).all()


def test_greedy_rows_report_the_unprocessed_distribution():
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    greedy = RowSampling(greedy=torch.tensor([True, False, True]))
    tokens, logprobs = draw(logits, torch.full((3,), 0.5, dtype=torch.float64), greedy)
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)


# --- what a token does not depend on ------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.permutations(range(12)), st.integers(1, 12))
def test_batch_and_order_play_no_part(seed, order, size):
    logits = 2 * torch.randn(12, 64, generator=torch.Generator().manual_seed(seed))
    keys, positions = keys_of(list(range(seed, seed + 12))), np.arange(12) * 7
    together, logprobs = draw(logits, torch.from_numpy(ks.uniforms(keys, positions)), PLAIN)
    some = list(order)[:size]
    u = torch.from_numpy(ks.uniforms(keys[some], positions[some]))
    apart, logprobs_apart = draw(logits[some], u, PLAIN)
    assert torch.equal(apart, together[some])
    assert torch.equal(logprobs_apart, logprobs[some])


def test_rows_drawn_one_by_one_are_spared_what_only_greedy_ones_need(monkeypatch):
    """Above a chunk each row stands alone, where those beside it ask for nothing."""
    logits, u = torch.randn(4, 2048), torch.full((4,), 0.5, dtype=torch.float64)
    rows = RowSampling(greedy=torch.tensor([True, False, False, True]))
    together = draw(logits, u, rows)
    monkeypatch.setattr(ks, "CHUNK", 2048)
    taken, picked = [], []
    take, invert = ks._take_most_probable, ks._invert
    monkeypatch.setattr(ks, "_take_most_probable", lambda x: taken.append(len(x)) or take(x))
    monkeypatch.setattr(ks, "_invert", lambda w, n: picked.append(len(w)) or invert(w, n))
    apart = draw(logits, u, rows)
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
    assert len(taken) == len(picked) == 2


def test_off_the_cpu_memory_is_bounded_whatever_the_number_of_rows():
    worked_on = []

    def pick(weights, numbers):
        worked_on.append(weights.numel())
        return numbers, numbers.to(torch.float64)

    logits = torch.empty(9, ks.CHUNK_GPU // 4, device="meta")  # what is asked of a GPU, without one
    tokens, _ = ks.draw_by(pick, logits, torch.empty(9, dtype=torch.int64, device="meta"), PLAIN)
    assert worked_on == [ks.CHUNK_GPU, ks.CHUNK_GPU, ks.CHUNK_GPU // 4] and len(tokens) == 9


# --- chains of drafts ---------------------------------------------------------------------------


@given(st.data())
def test_chain_emits_what_would_have_been_drawn_without_drafts(data):
    requests = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=6))
    truths = [
        data.draw(st.lists(st.integers(0, 3), min_size=len(d) + 1, max_size=len(d) + 1)) for d in requests
    ]
    # Rows after a wrong draft see a wrong context: their tokens are arbitrary and must be ignored.
    tokens = []
    expected = []
    for drafts, truth in zip(requests, truths, strict=True):
        run = next((j for j, d in enumerate(drafts) if d != truth[j]), len(drafts))
        junk = data.draw(st.lists(st.integers(0, 3), min_size=len(drafts) - run, max_size=len(drafts) - run))
        tokens += truth[: run + 1] + junk
        expected.append(truth[: run + 1])
    accepted, emitted = verify_chain(
        np.array(tokens, dtype=np.int64),
        np.array([t for d in requests for t in d], dtype=np.int64),
        np.array([len(d) for d in requests], dtype=np.int64),
    )
    assert accepted.tolist() == [len(e) - 1 for e in expected]
    for row, want in zip(emitted.tolist(), expected, strict=True):
        assert row[: len(want)] == want and set(row[len(want) :]) <= {-1}
