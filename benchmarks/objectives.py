"""Objectives: the loss and the gradient of a step beside a second implementation from the papers, in float64.

A batch of groups is made up, sealed as a run seals it and trained on by the learner itself, on a Qwen3 of two
layers with a vocabulary of 64 tokens. `benchmarks/parts/second_objective.py` computes advantages, loss and
gradient anew from rewards and log-probabilities, with the weights that the learner had before each update.
Every objective is tried with each level and kind of correction, with several updates, and with what else a
step can be asked for. `clipped_cases` and `altered_cases` are those where a clip or a weight's bound acted.

`gradient_error_worst`: largest difference of an entry, relative to the largest entry of all parameters.
`loss_error_worst`: relative to the sum of absolute parts, since the parts of a loss nearly cancel. Both are
of the learner's own policy with these weights in float64, `float32_*` of the step as it was trained and
reported. `kl_error_worst`: of both KL estimates (k1, k3) that the step reports, relative to the mean distance
of log-probabilities. Asks for at most 1e-6 of each, and 4e-6 of `float32_*`.

`masks_equal`: of ten chat templates, the share whose masks of two conversations (what supervised fine-tuning
learns) are the templates' own (`parts/chat_masks.py`); 1 is asked. `distillation_share`: the demo is trained,
and is then the teacher of a student that begins with the demo's base, gets no reward, and has a quarter of
the steps with as many rows in each (`parts/distilled.py`). The share is the student's held-out score over the
teacher's; at least 0.95 is asked. The last line is JSON.

    .venv/bin/python benchmarks/objectives.py [--every N] [--distillation STEPS] [--record]
"""

import copy
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.benchmarks.parts import second_objective as second
from antiphon.benchmarks.parts.chat_masks import masks_equal_share
from antiphon.benchmarks.parts.distilled import distil
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop.assembly import SealPlan
from antiphon.core.loop.group_state import GroupPhase, GroupState, Tally
from antiphon.core.records import FinishReason, FloatArray, GroupSubmission, Prompt, Trajectory, VersionSpan
from antiphon.core.reference_config import ReferenceSection
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.coordinator.sealing import Sampled, seal_batch
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.services.learner.deepspeed_engine import DeepSpeedEngine, Done
from antiphon.services.learner.objective import Objective, UpdateTotals
from antiphon.services.learner.packing import MicroBatch
from antiphon.services.learner.policy import Policy
from antiphon.services.learner.step import Trainer

VOCABULARY, LONGEST = 64, 24
"""Tokens of the model, and of the longest completion."""
REWARDS = ((1.0, 0.0, 0.0, 1.0), (0.3, 0.0, 1.0, 0.9), (1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0))
"""Of the trajectories of each group; one teaches nothing."""
RATE = 3e-3
"""Learning rate: later updates of a step meet their clips."""
LIMIT = 1e-6
SHARE = 0.95
"""Of a teacher's held-out score that its student is asked for."""
LIMITS = {"float32_loss_error": 4e-6, "float32_gradient_error": 4e-6}
"""Where another one holds: after two layers in float32, and a product over a sequence, one of seven digits is
lost."""


def cases() -> Iterator[dict[str, Any]]:
    """Yield what each step is asked for, beside the defaults."""
    levels: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(("grpo", "dapo", "dr_grpo"), ("token", "sequence", "geometric")),
        "gspo": ("sequence", "geometric"),
        "cispo": ("token",),
    }
    for name, own in levels.items():
        for level, correction, updates in itertools.product(own, ("truncate", "mask", "none"), (1, 2)):
            yield {
                "objective": name,
                "correction_level": level,
                "correction": correction,
                "updates_per_step": updates,
            }
        for updates in (1, 2):
            yield {"objective": name, "decoupled": False, "updates_per_step": updates}
        for level, correction in itertools.product(("sequence", "geometric"), ("truncate", "mask", "none")):
            wide = {"sequence_filter_low": 0.9, "sequence_filter_high": 1.1} if level == "geometric" else {}
            yield {
                "objective": name,
                "sequence_filter": level,
                "correction": correction,
                "updates_per_step": 2,
                **wide,
            }
        for bonus, updates in itertools.product((0.01, 1.0), (1, 2)):
            yield {"objective": name, "entropy_bonus": bonus, "updates_per_step": updates}
        if name != "cispo":
            yield {"objective": name, "dual_clip": 1.5, "decoupled": False}
        yield {"objective": name, "divisor": "trained"}
        yield {"objective": name, "temperature": 0.7, "entropy_bonus": 0.1}
        yield {"objective": name, "overlong_margin_tokens": 10, "overlong_penalty": 0.7}
        for truncated in ("mask", "mask_loss"):
            yield {"objective": name, "truncated_completions": truncated}
        for estimator, updates in itertools.product(("k1", "k3"), (1, 2)):
            yield {"objective": name, "kl": 0.3, "kl_estimator": estimator, "updates_per_step": updates}
        for estimator in ("k1", "k3"):
            yield {"objective": name, "kl": 0.1, "kl_estimator": estimator, "kl_place": "reward"}
        for keeps, updates in itertools.product((True, False), (1, 2)):
            taught = {"distillation": 0.5, "keep_reward": keeps, "filter": "none"}
            yield {"objective": name, **taught, "updates_per_step": updates}
        both = {"distillation": 1.0, "kl": 0.1, "filter": "none", "temperature": 0.7}
        yield {"objective": name, **both, "correction": "mask", "updates_per_step": 2}
        for base, deviation in (("mean", "batch"), ("leave_one_out", "batch"), ("leave_one_out", None)):
            over = {"normalise_advantages": False} if deviation is None else {"deviation": deviation}
            yield {"objective": name, "baseline": base, **over}
        yield {"objective": name, "baseline": "mean", "deviation": "batch", "truncated_completions": "mask"}
        for over in ({"deviation": "batch"}, {"normalise_advantages": False}):
            yield {"objective": name, "baseline": "batch", "filter": "none", **over}


def make_model(folder: Path) -> second.Weights:
    """Save a Qwen3 whose weights are drawn at random and return them in float64."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=second.HEADS, num_key_value_heads=second.KV_HEADS, head_dim=second.HEAD,
        max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": second.THETA}, rms_norm_eps=second.EPSILON,
    )  # fmt: skip
    model = Qwen3ForCausalLM(shape)
    model.save_pretrained(folder)
    return {name: one.detach().double() for name, one in model.named_parameters()}


Given = tuple[GroupState, Sampled, tuple[FloatArray, ...]]
"""A group, what was sampled, and a reference model's logprobs [T] of each trajectory."""


def make_groups(weights: second.Weights) -> list[Given]:
    """Make the groups of a step up; worker and reference have logprobs some way from those of the weights."""
    random, other = np.random.default_rng(0), np.random.default_rng(1)
    found = []
    for number, rewards in enumerate(REWARDS):
        prompt = tuple(random.integers(0, VOCABULARY, int(random.integers(2, 9))).tolist())
        trajectories, references = [], []
        for index in range(len(rewards)):
            length = int(random.integers(2, LONGEST)) if index else LONGEST
            tokens = random.integers(0, VOCABULARY, length)
            rows = second.logits(weights, [*prompt, *tokens.tolist()])[len(prompt) - 1 : -1].log_softmax(-1)
            own = rows[torch.arange(length), torch.from_numpy(tokens)].numpy()
            apart = random.normal(0.0, 0.3, length) + random.normal(0.0, 0.05)
            trajectories.append(
                Trajectory(
                    tokens.astype(np.int32), np.minimum(own + apart, 0.0).astype(np.float32),
                    (VersionSpan(0, 0, length),), FinishReason.STOP if index else FinishReason.LENGTH,
                    sample_index=index, seed=index,
                )
            )  # fmt: skip
            apart = other.normal(0.0, 0.6, length)
            references.append(np.minimum(own + apart, 0.0).astype(np.float32))
        name = f"g{number}"
        group = GroupState(name, number, "train", 0, 0, len(rewards), phase=GroupPhase.REWARDED)
        group.token_counts = tuple(len(one.token_ids) for one in trajectories)
        group.rewards = rewards
        submission = GroupSubmission("lease", name, "worker", tuple(trajectories), 0.0)
        found.append((group, (submission, Prompt(name, prompt)), tuple(references)))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One update of the learner."""

    weights: dict[str, torch.Tensor]
    """Before it, float64."""
    gradients: dict[str, torch.Tensor]
    """That it made, from float32."""
    double_gradients: dict[str, torch.Tensor]
    """That the same policy makes with these weights in float64."""
    double_loss: float


class Watched(DeepSpeedEngine):
    """The learner's engine; it notes weights and gradient of every update, and takes each in float64 too."""

    def __init__(self, config: RunConfig) -> None:
        self.policies: list[Policy] = []

        def make_policy(causal_model: Any, objective: Objective) -> Policy:
            self.policies.append(Policy(causal_model, objective))
            return self.policies[0]

        super().__init__(config, make_policy)
        self.seen: list[Seen] = []

    def sum_gradients(
        self,
        batches: Iterable[MicroBatch],
        totals: UpdateTotals,
        proximal_logprobs: Sequence[torch.Tensor] | None = None,
        done: Done = lambda batch, loss, found: None,
    ) -> None:
        batches = list(batches)
        super().sum_gradients(batches, totals, proximal_logprobs, done)
        double, loss = copy.deepcopy(self.policies[0]).double(), 0.0
        double.zero_grad()
        if not self.seen:
            self._begun = double
        weights = {_published(name): one.detach().clone() for name, one in double.named_parameters()}
        for batch in batches:
            with torch.no_grad():
                proximal = None if proximal_logprobs is None else self._begun(batch)
            share, _ = double(batch, totals, proximal)
            share.backward()
            loss += float(share.detach())
        self.seen.append(
            Seen(
                weights,
                {_published(name): one.double() for name, one in self.gradients().items()},
                {_published(name): one.grad for name, one in double.named_parameters()},
                loss,
            )
        )


def _published(name: str) -> str:
    return name.removeprefix("causal_model.")


def compare(
    case: dict[str, Any], model: Path, groups: Sequence[Given], folder: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Train a step as a case asks; return its errors, and the shares of tokens that a bound acted on."""
    reference = {name: value for name, value in case.items() if name in ReferenceSection.model_fields}
    choice = {
        name: value for name, value in case.items() if name not in {"filter", "temperature", *reference}
    }
    method = second.Method(**case)
    config = build_config(
        {
            "model": {"path": str(model)},
            "algorithm": choice,
            "reference": reference,
            "learner": {
                "learning_rate": RATE, "warmup_steps": 0, "zero_stage": 0, "micro_batch_tokens": 64,
            },
            "loop": {"filter": method.filter},
            "sampling": {"max_tokens": LONGEST, "temperature": method.temperature},
        }
    )  # fmt: skip
    store = ArtifactStore(folder / "store")
    plan = SealPlan(
        0,
        tuple(group for group, *_ in groups if group.varied or method.filter == "none"),
        tuple(group for group, *_ in groups if not group.varied and method.filter == "drop"),
    )
    sampled = {group.group_id: given for group, given, _ in groups}
    references = {group.group_id: one for group, _, one in groups} if config.reference.used else None
    payload = store.get(seal_batch(plan, sampled, Tally(), config, store, references=references).digest)
    engines: list[Watched] = []

    def make_engine(config: RunConfig) -> Watched:
        engines.append(Watched(config))
        return engines[-1]

    trainer = Trainer(config, CheckpointStore(folder / "checkpoints", 1), make_engine)
    trainer.start(0)
    metrics = trainer.train(0, payload).metrics
    trainer.stop()
    acted = {"clipped": metrics["clip_share"], "altered": metrics["truncated_share"]}
    return errors(method, groups, engines[0].seen, metrics), acted


def errors(
    method: second.Method,
    groups: Sequence[Given],
    seen: Sequence[Seen],
    metrics: dict[str, float],
) -> dict[str, float]:
    """Return how far a step is from the second implementation."""
    rows = [
        [
            second.Trajectory(
                list(prompt.token_ids), one.token_ids.tolist(), torch.from_numpy(one.logprobs).double(),
                reward, one.finish_reason.cut_off, torch.from_numpy(reference).double(),
            )
            for one, reward, reference in zip(submission.trajectories, group.rewards, references, strict=True)
        ]
        for group, (submission, prompt), references in groups
    ]  # fmt: skip
    given = list(zip(rows, second.advantages(method, rows, LONGEST), strict=True))
    losses, magnitudes, gaps = [], [], []
    worst = {"gradient_error": 0.0, "float32_gradient_error": 0.0}
    for place, own in enumerate(seen):
        leaves = {name: one.clone().requires_grad_() for name, one in own.weights.items()}
        begun = seen[0].weights if place else None
        found = second.update(method, given[place :: method.updates_per_step], leaves, begun, LONGEST)
        found.loss.backward()
        expected = {name: one.grad for name, one in leaves.items() if one.grad is not None}
        largest = max(float(one.abs().max()) for one in expected.values())
        for key, ours in zip(worst, (own.double_gradients, own.gradients), strict=True):
            assert expected.keys() == ours.keys() and largest > 0.0
            apart = max(float((ours[name] - one).abs().max()) for name, one in expected.items())
            worst[key] = max(worst[key], apart / largest)
        losses.append(float(found.loss.detach()))
        magnitudes.append(found.magnitude)
        gaps += found.log_ratios
    distance = float(torch.cat(gaps).abs().mean())
    kl = zip(("kl_k1", "kl_k3"), second.kl_estimates(gaps), strict=True)
    return {
        "loss_error": max(
            abs(one.double_loss - loss) / magnitude
            for one, loss, magnitude in zip(seen, losses, magnitudes, strict=True)
        ),
        "float32_loss_error": abs(metrics["loss"] * len(losses) - sum(losses)) / sum(magnitudes),
        **worst,
        "kl_error": max(abs(metrics[name] - value) for name, value in kl) / distance,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--every", type=int, default=1, help="of the cases, one in so many")
    parser.add_argument(
        "--distillation", type=int, default=60, metavar="STEPS", help="of the teacher; 0: no distillation"
    )
    parser.add_argument("overrides", nargs="*", help="key=value pairs for teacher and student")
    options = parser.parse_args(arguments)
    worst: dict[str, tuple[float, dict[str, Any]]] = {}
    counts = Counter[str](clipped_cases=0, altered_cases=0)
    chosen = list(cases())[:: options.every]
    with tempfile.TemporaryDirectory(prefix="antiphon-objectives-") as name:
        folder = Path(name)
        groups = make_groups(make_model(folder / "model"))
        for number, case in enumerate(chosen):
            found, acted = compare(case, folder / "model", groups, folder / f"case-{number}")
            counts.update(f"{key}_cases" for key, share in acted.items() if 0.0 < share < 1.0)
            print(", ".join(f"{key} {value:.1e}" for key, value in found.items()), case, flush=True)
            for key, value in found.items():
                if not value <= worst.get(key, (-1.0, {}))[0]:
                    worst[key] = value, case
    result: dict[str, Any] = {"cases": len(chosen), **counts}
    for key, (value, case) in worst.items():
        result |= {f"{key}_worst": value, f"{key}_worst_case": str(case)}
    violated = [
        f"{key} is {value:.1e}, above {LIMITS.get(key, LIMIT):g}, with {case}"
        for key, (value, case) in worst.items()
        if not value <= LIMITS.get(key, LIMIT)
    ]
    violated += [f"{key} is 0: that bound was not tried" for key, count in counts.items() if not count]
    result["masks_equal"] = masks_equal_share()
    if result["masks_equal"] != 1.0:
        violated.append(f"masks_equal is {result['masks_equal']}: masks are not those of their templates")
    at_size = []
    if options.distillation:
        result |= distil(options.distillation, options.overrides)
        if (share := result["distillation_share"]) < SHARE:
            at_size.append(f"distillation_share is {share:.3f}, below {SHARE}")
    return finish(result, record=options.record, violated=violated, at_size=at_size)


if __name__ == "__main__":
    execute(main)
