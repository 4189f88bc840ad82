"""Memory of ranks and engines: the tensors that transformers builds, what fits, and what would."""

import math
import re
from typing import Any

import pytest

from antiphon.core.capacity.model_shape import SHAPES, ModelShape, adapter_tensors, count, shape_of
from antiphon.core.config import RunConfig, apply_override, build_config
from antiphon.core.errors import InfeasibleError
from antiphon.core.ranks.memory import check_memory, held_by_rank, plan_memory

SMALL, LARGE = SHAPES["Qwen/Qwen3-0.6B"], SHAPES["Qwen/Qwen3-32B"]


def config_of(**learner: Any) -> RunConfig:
    return build_config(
        {"learner": learner, "model": {"dtype": "bfloat16"}, "rollout": {"workers": 0}, "loop": {}}
    )


def tree_of(shape: ModelShape) -> dict[str, Any]:
    """Return the config.json of a shape."""
    sparse = bool(shape.experts)
    return {
        "model_type": "qwen3_moe" if sparse else "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": 6144 if sparse else shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.cached_heads,
        "head_dim": shape.head_size,
        "tie_word_embeddings": shape.tied,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_used,
    }


@pytest.mark.engine
@pytest.mark.parametrize("name", SHAPES)
def test_the_tensors_are_those_that_transformers_builds(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tree = tree_of(SHAPES[name])
    assert shape_of(tree) == SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tree))
    built = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert SHAPES[name].tensors() == built


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"model_type": "mamba"}, "model_type=mamba is not known; known are llama"),
        ({"model_type": "llama", "num_attention_heads": 4}, "says nothing of 'hidden_size'"),
    ],
)
def test_another_model_is_named(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(InfeasibleError, match=re.escape(words)):
        shape_of(tree)


def test_stages_divide_what_they_say() -> None:
    tensors, parameters = SMALL.tensors(), count(SMALL.tensors())
    found = [
        held_by_rank(tensors, config_of(ranks=4, zero_stage=stage, dtype="bfloat16").learner)
        for stage in (1, 2, 3)
    ]
    assert [one["weights"] / parameters for one in found[:2]] == [2.0, 2.0]
    assert found[2]["weights"] / parameters == pytest.approx(0.5, rel=1e-2)
    assert [one["gradients"] / parameters for one in found] == [4.0, 1.0, 1.0]
    assert {one["optimizer"] / parameters for one in found} == {3.0}
    alone = held_by_rank(tensors, config_of().learner)
    assert sum(alone.values()) == 16.0 * parameters


@pytest.mark.parametrize(
    ("dtype", "stage", "parameters_of_four_bytes"),
    [
        # Weights, gradients, three of AdamW, and what is on its way; as counted by benchmarks/ranks.py.
        ("float32", 1, 1 + 1 + 1.5 + 1),
        ("float32", 2, 1 + 0.5 + 1.5 + 2),
        ("float32", 3, 0.5 + 0.5 + 1.5 + 1.5),
        ("bfloat16", 1, 0.5 + 1 + 1.5 + 1),
        ("bfloat16", 2, 0.5 + 0.5 + 1.5 + 1),
        ("bfloat16", 3, 0.25 + 0.5 + 1.5 + 1),
    ],
)
def test_of_a_small_model_two_ranks_hold_what_was_counted(
    dtype: str, stage: int, parameters_of_four_bytes: float
) -> None:
    learner = config_of(ranks=2, zero_stage=stage, dtype=dtype).learner
    found = held_by_rank({"a": (64, 64), "b": (64, 64)}, learner)
    assert sum(found.values()) == 4 * 8192 * parameters_of_four_bytes


def test_a_rank_of_stage_2_has_whole_tensors_where_its_part_ends_within_one() -> None:
    learner = config_of(ranks=2, zero_stage=2).learner
    even = held_by_rank({"a": (50, 2), "b": (50, 2)}, learner)
    astride = held_by_rank({"a": (30, 2), "b": (40, 2), "c": (30, 2)}, learner)
    assert (even["gradients"], astride["gradients"]) == (4 * 100, 4 * 140)


def test_what_an_update_takes_besides_counts_where_activations_do_not_cover_it() -> None:
    few, many = (
        plan_memory(config_of(zero_stage=3, micro_batch_tokens=tokens), SMALL.tensors(), SMALL).rank
        for tokens in (64, 8192)
    )
    assert few["update"] == 4 * count(SMALL.tensors()) - few["activations"] - few["logits"] > 0
    assert many["update"] == 0.0


def test_an_adapter_trains_little_of_the_model() -> None:
    """peft's count for all linear layers of Qwen3-0.6B at rank 16: 1.7% (arXiv 2106.09685: r (in + out))."""
    adapter = adapter_tensors(SMALL.tensors(), 16)
    assert count(adapter) / count(SMALL.tensors()) == pytest.approx(0.017, abs=1e-3)
    chosen = adapter_tensors(SMALL.tensors(), 16, ("q_proj", "v_proj"))
    assert len(chosen) == 4 * SMALL.layers
    # Whatever they are called: all matrices of layers, but no router, norm, embedding or head.
    at = "transformer.h.0"
    named = {f"{at}.{name}.weight": (8, 4) for name in ("attention.query", "mlp.c_fc", "mlp.gate")}
    others = {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (8, 4), f"{at}.norm.weight": (4,)}
    found = adapter_tensors(named | others, 2)
    assert {name.removeprefix(f"{at}.") for name in found} == {
        f"{module}.lora_{letter}" for module in ("attention.query", "mlp.c_fc") for letter in "AB"
    }
    learner = config_of(dtype="bfloat16").learner
    none = held_by_rank(SMALL.tensors(), learner, {})
    assert none["gradients on their way"] == 0
    assert none["gradients"] == none["optimizer"] == 0
    held = held_by_rank(SMALL.tensors(), learner, adapter)
    assert held["gradients"] == 4 * count(adapter) and held["optimizer"] == 12 * count(adapter)


def test_logits_are_held_in_pieces_and_a_frozen_head_has_no_gradient() -> None:
    tensors = SMALL.tensors()
    longer, adapted = {"micro_batch_tokens": 1 << 20}, {"lora": {"rank": 16}}
    trained, long, frozen = (
        plan_memory(config_of(**tree), tensors, SMALL).rank["logits"] for tree in ({}, longer, adapted)
    )
    assert trained == long == frozen + 4 * SMALL.vocabulary * SMALL.hidden


def test_with_adapters_each_rank_of_stage_3_has_the_whole_model_while_it_loads() -> None:
    tensors = LARGE.tensors()
    config = config_of(dtype="bfloat16", ranks=8, zero_stage=3, lora={"rank": 16})
    assert sum(plan_memory(config, tensors, None).rank.values()) == 2 * count(tensors)


def test_a_version_of_adapters_is_whole_on_the_disk_and_sent_as_they_are() -> None:
    tensors = SMALL.tensors()
    adapted, whole = (plan_memory(config_of(lora={"rank": rank}), tensors, None) for rank in (16, 0))
    assert whole.snapshot == whole.transfer == 2 * count(tensors)
    assert adapted.snapshot == whole.snapshot + adapted.transfer
    assert adapted.transfer == 2 * count(adapter_tensors(tensors, 16))


def test_what_does_not_fit_is_refused_with_changes_that_do() -> None:
    config, tensors = config_of(dtype="bfloat16"), LARGE.tensors()
    with pytest.raises(InfeasibleError, match=r"are needed on a GPU, which has 80\.0 GB") as refused:
        check_memory(config, tensors, LARGE, 80e9, gpus=True)
    changes = re.findall(r"((?:learner\.\S+ )+)\(([\d.]+) GB\)", str(refused.value))
    assert 1 <= len(changes) <= 3
    for words, size in changes:
        tree: dict[str, Any] = {"learner": {"dtype": "bfloat16"}}
        for word in words.split():
            apply_override(tree, word)
        changed = config_of(**tree["learner"])
        check_memory(changed, tensors, LARGE, 80e9, gpus=True)
        fullest = plan_memory(changed, tensors, LARGE).fullest(gpus=True)
        assert math.isclose(fullest, float(size) * 1e9, rel_tol=0.01)


def test_of_one_machine_all_ranks_and_engines_take_their_part() -> None:
    config = build_config({"learner": {"ranks": 2, "zero_stage": 2}, "rollout": {"workers": 3}})
    made = plan_memory(config, SMALL.tensors(), SMALL)
    rank, engine = sum(made.rank.values()), sum(made.engine.values())
    assert made.fullest(gpus=False) == 2 * rank + 3 * engine
    assert made.fullest(gpus=True) == max(rank, engine)  # `assign_devices` lets nobody share then
    certain = plan_memory(config, SMALL.tensors(), None)
    assert certain.fullest(gpus=False) < made.fullest(gpus=False)
    check_memory(config, SMALL.tensors(), None, certain.fullest(gpus=False), gpus=False)


def test_of_an_engine_of_several_processes_each_holds_its_part_of_the_weights() -> None:
    rollout = {"workers": 3, "tensor_parallel": 4}
    whole = plan_memory(build_config({"rollout": {"workers": 3}}), SMALL.tensors(), SMALL)
    parts = plan_memory(build_config({"rollout": rollout}), SMALL.tensors(), SMALL)
    assert parts.engine == {**whole.engine, "weights": whole.engine["weights"] / 4}
    rank, whole_engine, part = (sum(x.values()) for x in (parts.rank, whole.engine, parts.engine))
    assert whole.fullest(gpus=True) == rank + 3 * whole_engine  # one GPU may be all there is
    assert parts.fullest(gpus=True) == max(rank, part)
    assert parts.fullest(gpus=False) == rank + 12 * part


def test_a_learner_that_scores_under_earlier_versions_holds_a_second_model() -> None:
    tree = {"model": {"dtype": "bfloat16"}, "trust": {"audits": "off"}}
    silent, tensors = {"rollout": {"logprobs": "learner"}}, SMALL.tensors()
    held = [
        plan_memory(build_config(tree | changes), tensors, SMALL).rank
        for changes in ({}, silent, silent | {"loop": {"max_staleness": 0}})
    ]
    assert held[1] == held[0] | {"earlier policy": 2.0 * count(tensors)} and held[2] == held[0]
