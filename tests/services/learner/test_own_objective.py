"""Own objectives: the examples' formulas, whichever way an update is cut, and a sentence for what is none."""

import sys
from pathlib import Path

import pytest
import torch

from antiphon.core.algorithm import AlgorithmSection
from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.runs.preflight import check_methods
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine
from antiphon.services.learner.objective import Objective, UpdateTotals
from antiphon.services.learner.own_objective import own_objective
from antiphon.services.learner.packing import Packing, make_micro_batches
from antiphon.services.learner.replay.steps import Replayer, replay_run
from antiphon.services.learner.step import Trainer, config_digest
from antiphon.system.packages import Package
from tests.services.learner.test_objective import MAX_TOKENS, Toy, gradients, make_rows, totals_of
from tests.support.replay_artifacts import STEPS, TinyRun, make_config, save_model

EXAMPLES = Path(__file__).parents[3] / "examples" / "own-objective"
HEAD = "import torch\ndef loss(logprobs, behaviour_logprobs, advantages, mask):\n"
GOOD = "return -(logprobs - behaviour_logprobs).exp() * advantages[:, None]"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what writes a module with a body of `loss`, and names the function."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    own_objective.cache_clear()

    def write(body: str, name: str = "mine") -> str:
        (tmp_path / f"{name}.py").write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
        sys.modules.pop(name, None)
        return f"{name}:loss"

    yield write
    sys.modules.pop("mine", None)


def test_one_that_is_written_as_cispo_has_its_gradient_whichever_way_the_update_is_cut(written) -> None:
    name = written(
        "ratio = (logprobs - behaviour_logprobs).exp().clamp(max=5.0).detach()\n"
        "return -ratio * advantages[:, None] * logprobs"
    )
    builtin = AlgorithmSection(objective="cispo", decoupled=False)
    rows, toy, found = make_rows(10), Toy(), []
    for algorithm, budget in (
        (builtin, 1000),
        (AlgorithmSection(objective=name), 1000),
        (AlgorithmSection(objective=name), 64),
    ):
        batches = make_micro_batches(rows, 1, budget)
        totals, objective = totals_of(batches), Objective(algorithm, MAX_TOKENS, 1.0)
        losses, metrics = zip(
            *(objective.loss(toy.hidden(one), toy.head, one, totals, None) for one in batches), strict=True
        )
        applied = torch.cat(
            [metric.applied[batch.mask > 0] for metric, batch in zip(metrics, batches, strict=True)]
        )
        found.append((gradients(toy, list(losses)), float(sum(losses).detach()), applied.sort().values))
    for other in found[1:]:
        for ours, theirs in zip(other[0], found[0][0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        assert other[1] == pytest.approx(found[0][1], rel=1e-5)
        torch.testing.assert_close(other[2], found[0][2], rtol=1e-4, atol=1e-6)


def test_topr_learns_what_was_good_from_anyone_and_unlearns_only_what_it_would_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config = load_config(EXAMPLES / "topr.yaml")
    assert config.idle_keys() == () and config.run.name == "topr"
    objective, toy = Objective(config.algorithm, MAX_TOKENS, 1.0), Toy()
    (batch,) = make_micro_batches(make_rows(8), 1, 1000)
    loss, found = objective.loss(toy.hidden(batch), toy.head, batch, UpdateTotals(8, 50.0), None)
    learner = toy.logprobs(batch)
    ratio = (((learner - batch.behaviour_logprobs) * batch.mask).sum(1).exp()).clamp(max=1.0).detach()
    weight = torch.where(batch.advantages > 0, 1.0, ratio)[:, None]
    expected = (-weight * batch.advantages[:, None] * learner * batch.mask).sum() / 50.0
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(gradients(toy, [loss]), gradients(toy, [expected]), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found.applied, (weight * batch.mask), rtol=1e-5, atol=1e-6)


def test_the_examples_are_short_and_as_the_guide_has_them() -> None:
    guide = (EXAMPLES.parents[1] / "docs" / "guides" / "own-objective.md").read_text()
    for name in ("topr", "reinforce_pp"):
        code = (EXAMPLES / f"{name}.py").read_text()
        shown = code.partition('"""\n\n')[2]  # without its docstring
        assert len(code.splitlines()) < 40 and f"```python\n{shown}```" in guide


def test_a_token_that_no_policy_could_move_so_far_counts_for_nothing(written) -> None:
    algorithm, toy = AlgorithmSection(objective=written(GOOD)), Toy()
    (batch,) = make_micro_batches(make_rows(4), 1, 1000)
    batch.behaviour_logprobs[0, 0] = -60.0
    loss, found = Objective(algorithm, MAX_TOKENS, 1.0).loss(
        toy.hidden(batch), toy.head, batch, totals_of([batch]), None
    )
    assert torch.isfinite(loss) and found.altered.sum() == 1 and found.applied[0, 0] == 0.0


def test_a_dummy_trains_nothing_by_what_does_not_go_with_the_advantage(written) -> None:
    algorithm = AlgorithmSection(objective=written("return (logprobs - behaviour_logprobs).square()"))
    dummy, toy = Packing(make_rows(4), 1, 1000).make(None), Toy()
    loss, found = Objective(algorithm, MAX_TOKENS, 1.0).loss(
        toy.hidden(dummy), toy.head, dummy, UpdateTotals(4, 9.0), None
    )
    assert float(loss.detach()) == 0.0 and not any(one.any() for one in gradients(toy, [loss]))
    assert not found.applied.any() and not found.clipped.any()


def test_a_sequence_of_which_nothing_counts_has_no_gradient_where_the_loss_is_a_mean(written) -> None:
    name = written("return -logprobs * advantages[:, None] / mask.sum(1, keepdim=True)")
    (batch,), toy = make_micro_batches(make_rows(4), 1, 1000), Toy()
    batch.behaviour_logprobs[0] = -60.0
    loss, found = Objective(AlgorithmSection(objective=name), MAX_TOKENS, 1.0).loss(
        toy.hidden(batch), toy.head, batch, totals_of([batch]), None
    )
    assert torch.isfinite(loss) and all(one.isfinite().all() for one in gradients(toy, [loss]))
    assert not found.applied[0].any() and found.applied[1].any()


@pytest.mark.parametrize("held", ["torch.detach(gap).exp()", "gap.detach().exp_()"])
def test_whichever_way_something_is_detached_it_is_held_fixed(written, held: str) -> None:
    body = f"gap = logprobs - behaviour_logprobs\nheld = {held}"
    own_objective(written(f"{body}\nreturn -held * advantages[:, None] * logprobs"))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "return logprobs.mean()",
            r"returned \[\] for logprobs of shape \[6, 7\]; return the loss of each token",
        ),
        ("return 1.0", "returned float for logprobs"),
        ("return advantages[:, None] * mask", "returned a loss without a gradient"),
        ("raise KeyError('beta')", "it raised KeyError: 'beta'"),
        ("return (logprobs - behaviour_logprobs).mul(8).exp()", r"not finite where .* is \+20 nats"),
        (
            "return -logprobs * (advantages - advantages.mean())[:, None]",
            "another loss in another order, beside",
        ),
        ("return -logprobs * logprobs.shape[1]", "or with padding; go by a sequence's own tokens"),
        ("return -logprobs * torch.rand(len(mask), 1)", "another loss in another order"),
        (
            "with torch.no_grad():\n    r = (logprobs - behaviour_logprobs).exp()\nreturn -r * logprobs",
            r"has the gradient .* where its value changes by .* with detach\(\)",
        ),
    ],
)
def test_what_is_no_objective_is_refused_in_one_sentence(written, body: str, sentence: str) -> None:
    name = written(body)
    with pytest.raises(ConfigError, match=sentence) as refused:
        own_objective(name)
    assert str(refused.value).startswith(f"algorithm.objective={name}: ") and "\n" not in str(refused.value)


def test_before_a_run_it_is_tried_in_a_process_of_its_own(written) -> None:
    check_methods(AlgorithmSection(objective=written(GOOD)))
    with pytest.raises(ConfigError, match=r"^algorithm.objective=mine:loss: it raised KeyError"):
        check_methods(AlgorithmSection(objective=written("raise KeyError('beta')")))
    with pytest.raises(ConfigError, match=r"^algorithm.objective=no_such:loss: there is no module no_such"):
        check_methods(AlgorithmSection(objective="no_such:loss"))


@pytest.mark.engine
def test_a_run_with_one_replays_exactly_and_not_with_another_source(
    written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, policy = written(GOOD), save_model(tmp_path / "policy")
    passes, logprobs = [], DeepSpeedEngine.logprobs
    monkeypatch.setattr(
        DeepSpeedEngine,
        "logprobs",
        lambda engine, batch, *temperature: (
            passes.append(temperature) or logprobs(engine, batch, *temperature)
        ),
    )
    run = TinyRun(
        tmp_path / "home", make_config(policy, algorithm__objective=name, algorithm__updates_per_step=2)
    )
    assert passes and all(passes), "for the probes alone, which have a temperature of their own"
    copy = ReplayCopy(run.ledger)
    replayer = Replayer(copy)
    try:
        assert replay_run(replayer, range(STEPS), rollouts=False).steps_equal_share == 1.0
    finally:
        replayer.close()
    trained = config_digest(run.config)
    own_objective.cache_clear()
    monkeypatch.setattr(Package, "release", "mine 2.0")
    assert config_digest(run.config) == trained
    written(GOOD + "  # again")
    assert config_digest(run.config) == trained, "what was edited meanwhile did not train"
    with pytest.raises(
        ConfigError, match=rf"{name} of source \w+, but the one here has \w+; put that source"
    ):
        Replayer(copy)
    own_objective.cache_clear()  # as in another process
    with pytest.raises(ConfigError, match=r"or another source of algorithm\.objective"):
        Trainer(run.config, CheckpointStore(run.run_dir / "checkpoints", STEPS)).start(STEPS)
