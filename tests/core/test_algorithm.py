"""The algorithm's section: what means nothing is refused, and what cannot act is said."""

import pytest

from antiphon.core.algorithm import CLIPS, AlgorithmSection
from antiphon.core.config import build_config, dump_config, parse_config
from antiphon.core.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"correction": "mask", "correction_floor": 3.0},
            "correction_floor=3 is above algorithm.correction_cap=2",
        ),
        ({"correction": "mask", "correction_cap": 0.25}, "correction_floor=0.5 is above"),
        ({"objective": "gspo", "correction_level": "token"}, "does not fit algorithm.objective=gspo"),
        ({"objective": "cispo", "correction_level": "sequence"}, "does not fit algorithm.objective=cispo"),
        ({"objective": "cispo", "correction_level": "geometric"}, "caps weights token by token"),
        ({"objective": "cispo", "clip_low": 0.2}, "algorithm.clip_low=0.2 cannot act"),
        ({"objective": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip=3 cannot act"),
        ({"dual_clip": 1.28}, "algorithm.dual_clip=1.28 is not above 1 + clip_high = 1.28"),
        ({"dual_clip": 0.5}, "algorithm.dual_clip=0.5 is not possible"),
        ({"objective": "ppo"}, "it must be grpo, dapo, dr_grpo, gspo, cispo, or package.module:function"),
        (
            {"advantage": "rloo"},
            "algorithm.advantage='rloo' is not possible: it must be package.module:function",
        ),
        ({"baseline": "batch"}, "algorithm.baseline=batch does not fit algorithm.deviation=group"),
        (
            {"baseline": "batch", "deviation": "batch"},
            "loop.filter=drop leaves out; set loop.filter=none, or use another baseline",
        ),
        ({"sequence_filter_low": 1.5}, "algorithm.sequence_filter_low=1.5 is not possible"),
        ({"entropy_bonus": -0.1}, "algorithm.entropy_bonus=-0.1 is not possible"),
        ({"objective": None}, "algorithm.objective=null is not possible: it must be text"),
        ({"clip_high": float("nan")}, "algorithm.clip_high=nan is not possible"),
        ({"updates_per_step": 8}, "algorithm.updates_per_step=8 needs as many groups"),
    ],
)
def test_what_means_nothing_is_refused_in_one_sentence(changes: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_config({"algorithm": changes, "loop": {"prompts_per_step": 4}})
    assert sentence in str(refused.value)
    # Each names another fix than to read the code.
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({}, []),
        ({"clip_high": 0.3}, ["algorithm.clip_high cannot act: with algorithm.updates_per_step=1"]),
        ({"clip_low": 0.1, "dual_clip": 3.0}, ["algorithm.clip_low and algorithm.dual_clip cannot act"]),
        ({"clip_high": 0.3, "updates_per_step": 2}, []),
        ({"clip_high": 0.3, "decoupled": False}, []),
        (
            {"objective": "gspo"},
            ["algorithm.objective=gspo does not differ from grpo", "nothing bounds a step on stale data"],
        ),
        (
            {"objective": "gspo", "correction_cap": 1.01},
            ["algorithm.objective=gspo does not differ from grpo"],
        ),
        ({"correction_level": "geometric"}, ["nothing bounds a step on stale data"]),
        ({"correction_cap": 0.4}, []),
        ({"objective": "cispo"}, ["algorithm.objective=cispo does not differ from dapo"]),
        ({"objective": "gspo", "updates_per_step": 4}, []),
        (
            {"decoupled": False, "correction": "mask"},
            ["correction cannot act with algorithm.decoupled=false"],
        ),
        ({"decoupled": False, "correction_cap": 4.0}, ["correction_cap cannot act"]),
        ({"correction": "none", "correction_level": "sequence"}, ["correction_level cannot act with"]),
        ({"correction_floor": 0.1}, ["correction_floor cannot act with algorithm.correction=truncate"]),
        ({"correction": "mask", "correction_floor": 0.1}, []),
        ({"baseline": "leave_one_out"}, ["set algorithm.normalise_advantages=false"]),
        ({"baseline": "leave_one_out", "normalise_advantages": False}, []),
        ({"objective": "m:f", "advantage": "m:g", "updates_per_step": 4}, []),
        ({"deviation": "batch", "entropy_bonus": 0.01, "sequence_filter": "geometric"}, []),
        ({"objective": "dr_grpo", "deviation": "batch"}, ["with algorithm.objective=dr_grpo; leave it out"]),
        (
            {"deviation": "batch", "normalise_advantages": False},
            ["algorithm.deviation cannot act with algorithm.normalise_advantages=false"],
        ),
        ({"sequence_filter_low": 0.9}, ["sequence_filter_low cannot act without algorithm.sequence_filter"]),
        (
            {"sequence_filter": "sequence", "sequence_filter_high": 3.0, "decoupled": False},
            ["sequence_filter and algorithm.sequence_filter_high cannot act with algorithm.decoupled=false"],
        ),
        ({"correction_level": "geometric", "sequence_filter": "sequence"}, []),
        (
            {"objective": "m:f", "sequence_filter": "geometric", "entropy_bonus": 0.1},
            ["algorithm.sequence_filter cannot act with algorithm.objective=m:f; leave it out"],
        ),
        (
            {
                "objective": "m:f",
                "clip_low": 0.1,
                "dual_clip": 1.1,
                "advantage": "m:g",
                "baseline": "leave_one_out",
            },
            ["clip_low and algorithm.dual_clip cannot act with algorithm.objective=m:f", "leave it out"],
        ),
    ],
)
def test_what_cannot_act_is_said(changes: dict, sentences: list[str]) -> None:
    config = build_config({"algorithm": changes})
    found = config.idle_keys()
    assert len(found) == len(sentences)
    assert all(sentence in words for sentence, words in zip(sentences, found, strict=True))
    # A run's recorded configuration says the same as the file it was made from.
    assert (
        parse_config(dump_config(config)) == config and parse_config(dump_config(config)).idle_keys() == found
    )


def test_a_share_of_a_rate_that_never_falls_cannot_act() -> None:
    (sentence,) = build_config({"learner": {"final_rate_share": 0.1}}).idle_keys()
    assert sentence.startswith("learner.final_rate_share=0.1 cannot act with learner.schedule=constant")
    assert not build_config({"learner": {"final_rate_share": 0.1, "schedule": "cosine"}}).idle_keys()


def test_each_objective_has_its_own_clips_and_level() -> None:
    for name, clips in CLIPS.items():
        section = AlgorithmSection(objective=name)  # type: ignore[arg-type]
        assert section.clips == clips
        assert section.weight_level == ("geometric" if name == "gspo" else "token")
        assert section.divides_by_deviation == (name != "dr_grpo")
    assert AlgorithmSection(clip_high=0.5).clips == (0.2, 0.5)
    assert AlgorithmSection(objective="gspo", clip_low=0.01).clips == (0.01, 4e-4)
    assert AlgorithmSection(correction_level="sequence").weight_level == "sequence"
    assert AlgorithmSection(sequence_filter="sequence").filter_bounds == (0.5, 2.0)
    assert AlgorithmSection(sequence_filter="geometric", sequence_filter_low=0.9).filter_bounds == (0.9, 1.01)


def test_a_soft_punishment_leaves_some_lengths_unpunished() -> None:
    section = {"overlong_margin_tokens": 64}
    assert build_config({"algorithm": section, "sampling": {"max_tokens": 65}}).algorithm.idle_keys() == []
    with pytest.raises(
        ConfigError, match=r"overlong_margin_tokens=64 leaves no length unpunished.*=64; lower"
    ):
        build_config({"algorithm": section, "sampling": {"max_tokens": 64}})
    (said,) = AlgorithmSection(overlong_penalty=1.0).idle_keys()
    assert said.startswith("algorithm.overlong_penalty cannot act without algorithm.overlong_margin_tokens")
