"""The reference model in the loss: equal to a second implementation in float64, whichever way it is cut."""

import dataclasses

import numpy as np
import pytest
import torch

from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.records import BatchRow
from antiphon.core.reference_config import ReferenceSection
from antiphon.services.learner.figures import Figures
from antiphon.services.learner.objective import Objective
from antiphon.services.learner.packing import MicroBatch, Packing, make_micro_batches
from antiphon.services.learner.step import _metrics
from tests.services.learner.test_objective import (
    MAX_TOKENS,
    OBJECTIVES,
    Toy,
    gradients,
    make_rows,
    totals_of,
)

SECTIONS = {
    "k1": {"kl": 0.3, "kl_estimator": "k1"},
    "k3": {"kl": 0.3},
    "distillation": {"distillation": 0.5},
    "distillation alone": {"distillation": 0.5, "keep_reward": False},
    "both": {"distillation": 0.5, "kl": 0.1},
}


def small_toy() -> Toy:
    """Return one with logits of a usual size, so that rounding stays below the tolerance."""
    toy = Toy()
    with torch.no_grad():
        toy.embedding.mul_(0.3)
    return toy


def referred_rows(count: int) -> list[BatchRow]:
    rng = np.random.default_rng(5)
    return [
        dataclasses.replace(
            row,
            reference_logprobs=(row.logprobs + 0.6 * rng.standard_normal(row.logprobs.size)).astype(
                np.float32
            ),
        )
        for row in make_rows(count)
    ]


def second(
    toy: Toy,
    batch: MicroBatch,
    algorithm: AlgorithmSection,
    reference: ReferenceSection,
    proximal: torch.Tensor,
) -> torch.Tensor:
    """Return the loss of one micro-batch in float64, written for itself, row by row and token by token."""
    embedding, head = toy.embedding.double(), toy.head.double()
    low, high = algorithm.clips
    total, tokens = torch.zeros((), dtype=torch.float64), int(batch.mask.sum())
    hidden = embedding[batch.input_ids][batch.pairs.index]
    every = (hidden @ head.T).log_softmax(1)
    for row in range(len(batch.mask)):
        count = int(batch.mask[row].sum())
        pairs = batch.token_index[row, :count]
        learner = every[pairs, batch.pair_ids[pairs]]
        behaviour, given, old = (
            x[row, :count].double() for x in (batch.behaviour_logprobs, batch.reference_logprobs, proximal)
        )
        whole = (learner - old).mean()
        level = (old - behaviour).mean().exp().clamp(max=algorithm.correction_cap)
        for place in range(count):
            advantage = batch.advantages[row].double() if reference.keep_reward else torch.zeros(()).double()
            advantage = advantage + reference.distillation * (given[place] - behaviour[place])
            weight = (old[place] - behaviour[place]).exp().clamp(max=algorithm.correction_cap)
            ratio = (learner[place] - old[place]).exp()
            if algorithm.objective == "gspo":
                ratio, weight = whole.exp(), level
            if algorithm.objective == "cispo":
                loss = -weight * ratio.detach().clamp(max=1 + high) * advantage * learner[place]
            else:
                bounded = ratio.clamp(1 - low, 1 + high)
                loss = -weight * torch.minimum(ratio * advantage, bounded * advantage)
            gap = given[place] - learner[place]
            if reference.kl and reference.kl_estimator == "k3":
                loss = loss + reference.kl * (gap.exp() - 1 - gap)
            elif reference.kl:
                # The gradient of k2 is that of k1 by the score; the value is k1's.
                loss = loss + reference.kl * (gap**2 / 2 - (gap**2 / 2 + gap).detach())
            if algorithm.objective in ("dapo", "cispo"):
                total = total + loss / tokens
            elif algorithm.objective == "dr_grpo":
                total = total + loss / (len(batch.mask) * MAX_TOKENS)
            else:
                total = total + loss / (len(batch.mask) * count)
    return total


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("section", SECTIONS)
def test_loss_and_gradient_equal_a_second_implementation_in_float64(name: str, section: str) -> None:
    toy, algorithm = small_toy(), AlgorithmSection(objective=name)
    reference = ReferenceSection.model_validate(SECTIONS[section])
    (batch,) = make_micro_batches(referred_rows(8), 0, 10_000)
    proximal = (toy.logprobs(batch) + 0.2 * torch.randn(batch.mask.shape)).detach()
    objective = Objective(algorithm, MAX_TOKENS, 1.0, reference)
    loss, _ = objective.loss(toy.hidden(batch), toy.head, batch, totals_of([batch]), proximal)
    expected = second(toy, batch, algorithm, reference, proximal)
    assert abs(loss.item() - expected.item()) < 1e-6
    for ours, theirs in zip(gradients(toy, [loss]), gradients(toy, [expected]), strict=True):
        assert float((ours.double() - theirs.double()).abs().max()) < 1e-6


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_parts_of_a_cut_update_add_up_and_a_dummy_adds_nothing(name: str) -> None:
    toy, reference = small_toy(), ReferenceSection(kl=0.2, distillation=0.5)
    objective, found = Objective(AlgorithmSection(objective=name), MAX_TOKENS, 1.0, reference), []
    for budget in (10_000, 1):
        packing = Packing(referred_rows(8), 0, budget)
        batches = list(packing.of_rank(0))
        losses = [objective.loss(toy.hidden(b), toy.head, b, totals_of(batches), None)[0] for b in batches]
        found.append((sum(loss.item() for loss in losses), gradients(toy, losses)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    for ours, whole in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-4)
    dummy = packing.make(None)
    loss, _ = objective.loss(toy.hidden(dummy), toy.head, dummy, totals_of(batches), None)
    assert loss.item() == 0.0
    assert all(not part.any() for part in gradients(toy, [loss]))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_equal_advantages_in_a_row_give_the_loss_of_liger(name: str) -> None:
    toy, algorithm, rows = Toy(), AlgorithmSection(objective=name), make_rows(8)
    rows = [dataclasses.replace(row, reference_logprobs=row.logprobs) for row in rows]
    (batch,) = make_micro_batches(rows, 0, 10_000)
    losses = [
        Objective(algorithm, MAX_TOKENS, 1.0, section).loss(
            toy.hidden(batch), toy.head, batch, totals_of([batch]), None
        )[0]
        for section in (ReferenceSection(), ReferenceSection(distillation=1.0))
    ]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-6)


def test_a_step_reports_the_kl_to_its_reference() -> None:
    toy, reference = Toy(), ReferenceSection(kl=0.2)
    objective, figures = Objective(AlgorithmSection(), MAX_TOKENS, 1.0, reference), []
    batches = make_micro_batches(referred_rows(8), 0, 60)
    gaps = []
    for batch in batches:
        loss, found = objective.loss(toy.hidden(batch), toy.head, batch, totals_of(batches), None)
        figures.append(Figures.of(batch, loss.item(), found))
        gaps.append(
            (batch.reference_logprobs - found.learner_logprobs)[batch.mask > 0].double().clamp(-20, 20)
        )
    metrics, gap = _metrics([figures], [1.0]), torch.cat(gaps)
    assert metrics["reference_kl_k1"] == pytest.approx(float(-gap.mean()))
    assert metrics["reference_kl_k3"] == pytest.approx(float((gap.exp() - 1 - gap).mean()))
