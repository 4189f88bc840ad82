"""The objective: equal to a reference in six lines, whichever way the update is cut."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.records import BatchRow, FinishReason, VersionSpan
from antiphon.services.learner import objective as objective_module
from antiphon.services.learner.objective import Objective, UpdateTotals
from antiphon.services.learner.packing import MicroBatch, Packing, make_micro_batches

HIDDEN, VOCABULARY, MAX_TOKENS = 16, 24, 32
OBJECTIVES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")


def make_rows(count: int, seed: int = 0) -> list[BatchRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for place in range(count):
        length = int(rng.integers(2, 12))
        rows.append(
            BatchRow(
                group_id=f"g{place // 4}",
                prompt_key="p",
                sample_index=place % 4,
                prompt_token_ids=rng.integers(0, VOCABULARY, 3).astype(np.int32),
                token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                logprobs=(-3.0 + 0.5 * rng.standard_normal(length)).astype(np.float32),
                spans=(VersionSpan(0, 0, length),),
                finish_reason=FinishReason.STOP,
                reward=0.0,
                advantage=float(rng.standard_normal()),
            )
        )
    return rows


class Toy:
    """An embedding and a head: hidden states without a transformer."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.embedding = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
        self.head = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)

    def hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Return the states [P, H] of the batch's pairs."""
        return self.embedding[batch.input_ids][batch.pairs.index]

    def logprobs(self, batch: MicroBatch, temperature: float = 1.0) -> torch.Tensor:
        logits = (self.hidden(batch) @ self.head.T / temperature)[batch.token_index]
        ids = batch.pair_ids[batch.token_index]
        return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def totals_of(batches: list[MicroBatch]) -> UpdateTotals:
    return UpdateTotals(
        sum(len(batch.advantages) for batch in batches), sum(batch.completion_tokens for batch in batches)
    )


def gradients(toy: Toy, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(sum(losses), [toy.embedding, toy.head]))


def reference(toy: Toy, batch: MicroBatch, algorithm: AlgorithmSection, proximal, temperature=1.0):
    learner, mask = toy.logprobs(batch, temperature), batch.mask
    current = learner.detach() if proximal is None else proximal
    advantage = batch.advantages[:, None]
    old = current if algorithm.decoupled else batch.behaviour_logprobs
    weight = torch.ones_like(mask)
    if algorithm.decoupled and algorithm.correction != "none":
        gap = (current - batch.behaviour_logprobs) * mask
        if algorithm.weight_level == "sequence":
            gap = gap.sum(1, keepdim=True).expand_as(mask)
        if algorithm.weight_level == "geometric":
            gap = (gap.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(mask)
        weight = gap.exp()
        inside = (weight <= algorithm.correction_cap) & (weight >= algorithm.correction_floor)
        weight = (
            weight.clamp(max=algorithm.correction_cap)
            if algorithm.correction == "truncate"
            else weight * inside
        )
    ratio = (learner - old).exp()
    if algorithm.objective == "gspo":
        ratio = (((learner - old) * mask).sum(1) / mask.sum(1)).exp()[:, None]
    low, high = algorithm.clips
    if algorithm.objective == "cispo":
        loss = -ratio.clamp(max=1 + high).detach() * advantage * learner
    else:
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if algorithm.dual_clip is not None:
            bound = torch.where(advantage < 0, algorithm.dual_clip * advantage, -torch.inf)
            surrogate = torch.maximum(surrogate, bound)
        loss = -surrogate
    loss = loss * weight * mask
    if algorithm.objective in ("dapo", "cispo"):
        return loss.sum() / mask.sum()
    if algorithm.objective == "dr_grpo":
        return loss.sum() / (len(mask) * MAX_TOKENS)
    return (loss.sum(1) / mask.sum(1)).mean()


CASES = [
    *itertools.product(OBJECTIVES, (True, False), ("truncate",), (None,)),
    *itertools.product(("dapo",), (True,), ("mask", "none"), ("token", "sequence", "geometric")),
    *itertools.product(("gspo",), (True,), ("mask", "none"), ("sequence", "geometric")),
    *itertools.product(("grpo",), (True,), ("truncate",), ("sequence", "geometric")),
]


@pytest.mark.parametrize(("name", "decoupled", "correction", "level"), CASES)
@pytest.mark.parametrize("first_update", [True, False])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_loss_and_gradients_equal_the_reference(
    name, decoupled, correction, level, first_update, dual_clip
) -> None:
    if dual_clip and name == "cispo":
        dual_clip = None  # it has one cap
    algorithm = AlgorithmSection(
        objective=name,
        decoupled=decoupled,
        correction=correction,
        correction_level=level,
        dual_clip=dual_clip,
    )
    toy = Toy()
    (batch,) = make_micro_batches(make_rows(8), 0, 10_000)
    proximal = None if first_update else (toy.logprobs(batch) + 0.2 * torch.randn(batch.mask.shape)).detach()
    loss, _ = Objective(algorithm, MAX_TOKENS, 1.0).loss(
        toy.hidden(batch), toy.head, batch, totals_of([batch]), proximal
    )
    expected = reference(toy, batch, algorithm, proximal)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients(toy, [loss]), gradients(toy, [expected]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize(
    ("name", "correction"), [("dapo", "truncate"), ("grpo", "mask"), ("cispo", "none"), ("gspo", "truncate")]
)
def test_a_trajectory_is_left_out_whole_and_the_others_keep_their_token_weights(
    name: str, correction: str, level: str
) -> None:
    toy = Toy()
    (batch,) = make_micro_batches(make_rows(12), 0, 10_000)
    learner = toy.logprobs(batch).detach()
    apart = 0.2 * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    batch = dataclasses.replace(batch, behaviour_logprobs=(learner - apart) * batch.mask)
    own = {"objective": name, "correction": correction}
    filtered = AlgorithmSection(
        **own, sequence_filter=level, sequence_filter_low=0.9, sequence_filter_high=1.1
    )
    plain, found = (
        Objective(one, MAX_TOKENS, 1.0).importance_weights(learner, batch)
        for one in (AlgorithmSection(**own), filtered)
    )
    for row, count in enumerate(batch.mask.sum(1).int().tolist()):
        whole = float((apart[row, :count].mean() if level == "geometric" else apart[row, :count].sum()).exp())
        kept = 0.9 <= whole <= 1.1
        assert bool((found[0][row, :count] == (plain[0][row, :count] if kept else 0.0)).all())
        assert bool((found[1][row, :count] == (plain[1][row, :count] if kept else True)).all())
    assert 0 < int((found[0][:, 0] == 0).sum()) < 12
    assert bool((found[0][batch.mask == 0] == 1.0).all()) and not found[1][batch.mask == 0].any()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_entropy_bonus_is_the_mean_entropy_divided_as_the_loss_is(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective_module, "LOGITS_AT_ONCE", 5 * VOCABULARY)
    toy, found = Toy(), []
    (batch,) = make_micro_batches(make_rows(8), 0, 10_000)
    for bonus in (0.0, 0.5):
        objective = Objective(AlgorithmSection(objective=name, entropy_bonus=bonus), MAX_TOKENS, temperature)
        found.append(objective.loss(toy.hidden(batch), toy.head, batch, totals_of([batch]), None)[0])
    logprobs = ((toy.hidden(batch) @ toy.head.T) / temperature)[batch.token_index].log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1) * batch.mask
    mean = entropy.sum() / batch.mask.sum()
    if name in ("grpo", "gspo"):
        mean = (entropy.sum(1) / batch.mask.sum(1)).mean()
    if name == "dr_grpo":
        mean = entropy.sum() / (len(entropy) * MAX_TOKENS)
    torch.testing.assert_close(found[0] - found[1], 0.5 * mean)
    for ours, theirs in zip(gradients(toy, [found[0] - found[1]]), gradients(toy, [0.5 * mean]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_dummy_has_no_entropy_bonus() -> None:
    dummy, toy = Packing(make_rows(4), 1, 1000).make(None), Toy()
    objective = Objective(AlgorithmSection(entropy_bonus=1.0), MAX_TOKENS, 1.0)
    loss, _ = objective.loss(toy.hidden(dummy), toy.head, dummy, UpdateTotals(4, 9.0), None)
    assert float(loss.detach()) == 0.0 and not any(one.any() for one in gradients(toy, [loss]))


@pytest.mark.parametrize("bonus", [0.0, 0.1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_do_not_depend_on_the_micro_batch_split(name: str, bonus: float) -> None:
    toy = Toy()
    objective = Objective(AlgorithmSection(objective=name, entropy_bonus=bonus), MAX_TOKENS, 1.0)
    found = []
    for budget in (10_000, 40, 1):
        batches = make_micro_batches(make_rows(12), 0, budget)
        totals = totals_of(batches)
        losses = [objective.loss(toy.hidden(b), toy.head, b, totals, None)[0] for b in batches]
        found.append((sum(loss.item() for loss in losses), gradients(toy, losses)))
    assert len(batches) == 12
    for loss, parts in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-5)
        for ours, whole in zip(parts, found[0][1], strict=True):
            torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_made_in_parts_give_the_same_loss_and_gradients(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, objective = Toy(), Objective(AlgorithmSection(objective="dapo"), MAX_TOKENS, temperature)
    (batch,) = make_micro_batches(make_rows(8), 0, 10_000)
    found = []
    for at_once in (2**22, 0):
        monkeypatch.setattr(objective_module, "LOGITS_AT_ONCE", at_once)
        loss, _ = objective.loss(toy.hidden(batch), toy.head, batch, totals_of([batch]), None)
        found.append([loss.detach(), *gradients(toy, [loss])])
    for held, made_anew in zip(*found, strict=True):
        torch.testing.assert_close(held, made_anew, atol=1e-6, rtol=1e-5)


def test_temperature_of_the_behaviour_policy_divides_the_logits() -> None:
    toy = Toy()
    (batch,) = make_micro_batches(make_rows(4), 0, 10_000)
    algorithm = AlgorithmSection(objective="dapo")
    objective = Objective(algorithm, MAX_TOKENS, 0.7)
    found = objective.logprobs(toy.hidden(batch), toy.head, batch)
    torch.testing.assert_close(found, toy.logprobs(batch, 0.7).detach(), atol=1e-5, rtol=1e-5)
    loss, _ = objective.loss(toy.hidden(batch), toy.head, batch, totals_of([batch]), None)
    expected = reference(toy, batch, algorithm, None, temperature=0.7)
    for ours, theirs in zip(gradients(toy, [loss]), gradients(toy, [expected]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_altered_weights_and_clipped_tokens_are_counted() -> None:
    toy = Toy()
    (batch,) = make_micro_batches(make_rows(8), 0, 10_000)
    proximal = batch.behaviour_logprobs + torch.where(batch.mask.cumsum(1) == 1, 1.0, 0.0)
    objective = Objective(AlgorithmSection(correction="truncate", correction_cap=2.0), MAX_TOKENS, 1.0)
    weight, altered = objective.importance_weights(proximal, batch)
    assert weight is not None and float(weight.max()) == 2.0
    assert int(altered.sum()) == 8  # exp(1) > 2 at the first token of each trajectory
    # Against a far-off proximal policy every ratio is clipped one way or gives no gradient.
    far = toy.logprobs(batch).detach() - 1.0
    _, figures = objective.loss(toy.hidden(batch), toy.head, batch, totals_of([batch]), far)
    positive = batch.mask[batch.advantages > 0].sum() / batch.mask.sum()
    assert float(figures.clipped.sum() / batch.mask.sum()) == pytest.approx(float(positive))


def test_a_hopeless_ratio_is_masked_without_a_nan() -> None:
    (batch,) = make_micro_batches(make_rows(4), 0, 10_000)
    proximal = batch.behaviour_logprobs + 500.0
    algorithm = AlgorithmSection(correction="mask")
    weight, altered = Objective(algorithm, MAX_TOKENS, 1.0).importance_weights(proximal, batch)
    assert weight is not None and bool(torch.isfinite(weight).all())
    assert bool((weight[batch.mask > 0] == 0).all()) and bool((altered == (batch.mask > 0)).all())


@pytest.mark.parametrize(
    ("changes", "gaps"),
    [
        ({"objective": "dapo"}, (0.1, 0.4, -0.4)),
        ({"objective": "dapo", "dual_clip": 1.4}, (0.1, 0.4, -0.4)),
        ({"objective": "gspo"}, (1e-4, 1e-3, -1e-3)),
        ({"objective": "cispo", "clip_high": 0.2}, (0.1, 0.4, -0.4)),
        ({"objective": "grpo", "decoupled": False, "dual_clip": 1.4}, (0.1, 0.4, -0.4)),
        ({"objective": "dapo", "correction": "mask", "correction_cap": 1.1, "correction_floor": 0.9}, (0.3,)),
    ],
)
def test_applied_weights_are_those_of_the_gradient(changes: dict, gaps: tuple[float, ...]) -> None:
    """The gradient of the loss in a learner's logprob is -advantage x applied / divisor."""
    toy, algorithm = Toy(), AlgorithmSection(**changes)
    (batch,) = make_micro_batches(make_rows(8), 0, 10_000)
    current = toy.logprobs(batch).detach()
    apart = torch.tensor([gaps[place % len(gaps)] for place in range(len(current))])[:, None]
    batch = dataclasses.replace(batch, behaviour_logprobs=(current - apart) * batch.mask)
    proximal = current - apart if algorithm.decoupled else None
    _, found = Objective(algorithm, MAX_TOKENS, 1.0).loss(
        toy.hidden(batch),
        toy.head,
        batch,
        totals_of([batch]),
        current - apart if algorithm.decoupled else None,
    )
    learner = current.requires_grad_()
    with_logprobs = type("Given", (), {"logprobs": lambda self, batch, temperature: learner})()
    expected = reference(with_logprobs, batch, algorithm, proximal)
    (gradient,) = torch.autograd.grad(expected, learner)
    scale = (
        batch.mask.sum(1, keepdim=True) * len(batch.mask)
        if changes["objective"] in ("grpo", "gspo")
        else (batch.mask.sum())
    )
    ours = -batch.advantages[:, None] * found.applied / scale
    torch.testing.assert_close(ours, gradient, atol=1e-6, rtol=1e-4)
    assert bool((found.applied[found.clipped] == 0).all()) or changes["objective"] == "cispo"
    assert not bool((found.clipped & (batch.mask == 0)).any())


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_one_impossible_logprob_gives_a_finite_loss_and_no_gradient(name: str, decoupled: bool) -> None:
    toy = Toy()
    (batch,) = make_micro_batches(make_rows(8), 0, 10_000)
    objective = Objective(AlgorithmSection(objective=name, decoupled=decoupled), MAX_TOKENS, 1.0)
    for far in (-1e5, 1e5):
        behaviour = batch.behaviour_logprobs.clone()
        behaviour[:, 0] = far
        spoiled = dataclasses.replace(batch, behaviour_logprobs=behaviour)
        loss, found = objective.loss(toy.hidden(spoiled), toy.head, spoiled, totals_of([spoiled]), None)
        assert bool(torch.isfinite(loss))
        assert all(bool(torch.isfinite(part).all()) for part in gradients(toy, [loss]))
        if not decoupled:
            assert bool((found.applied[:, 0] == 0).all()) and bool(found.clipped[:, 0].all())
            assert bool((found.applied == 0).all()) == (name == "gspo")  # one ratio for the trajectory


@pytest.mark.parametrize(
    ("name", "correction", "level"),
    [
        *itertools.product(
            ("dapo", "grpo"), ("truncate", "mask", "none"), ("token", "sequence", "geometric")
        ),
        *itertools.product(("gspo",), ("truncate", "mask", "none"), ("sequence", "geometric")),
        ("cispo", "truncate", "token"),
        ("dr_grpo", "none", "token"),
    ],
)
def test_a_token_beyond_twenty_nats_gets_no_gradient(name: str, correction: str, level: str) -> None:
    """Its log-probability is wrong; the rest of its trajectory counts, unless one weight is of the whole."""
    toy = Toy()
    (batch,) = make_micro_batches(make_rows(8), 0, 10_000)
    algorithm = AlgorithmSection(objective=name, correction=correction, correction_level=level)
    learner = toy.logprobs(batch).detach()
    behaviour = learner.clone()
    behaviour[0, 0] -= 30.0
    spoiled = dataclasses.replace(batch, behaviour_logprobs=behaviour * batch.mask)
    for proximal in (None, learner.clone()):
        _, _, found = Objective(algorithm, MAX_TOKENS, 1.0).ingredients(learner, spoiled, proximal)
        assert float(found.applied[0, 0]) == 0.0 and bool(found.altered[0, 0])
        whole = level != "token" and correction != "none"
        assert bool((found.applied[0] == 0).all()) == whole
        assert bool((found.applied[1:][batch.mask[1:] > 0] > 0).all())


def test_a_trajectory_that_is_masked_by_its_weight_stays_in_the_divisor() -> None:
    """A weight of 0 is a value like others: if the divisor shrank, the rest would count for more."""
    toy = Toy()
    (batch,) = make_micro_batches(make_rows(8), 0, 10_000)
    behaviour = toy.logprobs(batch).detach() * batch.mask
    far = behaviour.clone()
    far[0] -= 2.0 * batch.mask[0]
    algorithm = AlgorithmSection(objective="dapo", correction="mask", correction_level="geometric")
    found = []
    for logprobs, advantages in ((far, batch.advantages), (behaviour, batch.advantages.clone())):
        if logprobs is behaviour:
            advantages[0] = 0.0
        made = dataclasses.replace(batch, behaviour_logprobs=logprobs, advantages=advantages)
        loss, _ = Objective(algorithm, MAX_TOKENS, 1.0).loss(
            toy.hidden(made), toy.head, made, totals_of([made]), None
        )
        found.append(gradients(toy, [loss]))
    for masked, without in zip(*found, strict=True):
        torch.testing.assert_close(masked, without, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("objective", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("budget", [12, 400])
def test_a_trajectory_counts_once_however_many_branches_it_has(objective: str, budget: int) -> None:
    """The toy sees one token back, so a context that begins afresh changes none of its log-probabilities."""
    toy, algorithm = Toy(), AlgorithmSection(objective=objective, entropy_bonus=0.1)
    loss = Objective(algorithm, MAX_TOKENS, 1.0)
    whole = []
    for row in make_rows(8, seed=5):
        logprobs, size = row.logprobs.copy(), len(row.token_ids)
        cut = size // 2
        logprobs[cut - 1 : cut] = 0
        spans = tuple(s for s in (VersionSpan(0, 0, cut - 1), VersionSpan(0, cut, size)) if s.start < s.stop)
        whole.append(dataclasses.replace(row, logprobs=logprobs, spans=spans, observed=((cut - 1, cut),)))
    broken = [
        dataclasses.replace(row, breaks=(row.observed[0][0],) if row.observed[0][0] else ()) for row in whole
    ]
    found = []
    for rows in (whole, broken):
        packing = Packing(rows, 0, budget)
        batches = list(packing.of_rank(0))
        totals = UpdateTotals(packing.trajectories, packing.completion_tokens)
        losses = [loss.loss(toy.hidden(batch), toy.head, batch, totals, None)[0] for batch in batches]
        found.append((float(sum(losses).detach()), *gradients(toy, losses)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for ours, plain in zip(found[1][1:], found[0][1:], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
