"""Training samples from the whole distribution, evaluation as it likes; and which rule a run draws by."""

import pytest

from antiphon.core.config import build_config, dump_config, parse_config, with_rule
from antiphon.core.errors import ConfigError
from antiphon.core.records import SamplingParameters


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"sampling": {"top_k": 5}}, r"sampling\.top_k=5 cuts .* leave it at 0, and cut evaluation\.top_k"),
        ({"sampling": {"top_p": 0.9}}, r"sampling\.top_p=0\.9 cuts .* at 1, and cut evaluation\.top_p"),
        ({"sampling": {"sampler": "native", "rule": "gumbel"}}, r"sampling\.rule=gumbel has no effect"),
        (
            {"loop": {"accept_uneven": True}},
            r"loop\.accept_uneven=true has no effect with loop\.mode=elastic",
        ),
        ({"evaluation": {"top_p": 0}}, r"evaluation\.top_p=0 is not possible"),
        ({"sampling": {"stop": ["x", ""]}}, r"sampling\.stop has ''; each text needs 1 to 200 characters"),
        ({"sampling": {"stop": ["\ufffd"]}}, r"sampling\.stop has '.'; .* half a character"),
    ],
)
def test_what_cannot_act_or_would_be_wrong_is_refused(tree: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        build_config(tree)
    assert "\n" not in str(error.value)


def test_evaluation_may_be_greedy_or_cut_while_training_is_whole() -> None:
    config = build_config(
        {"sampling": {"temperature": 0.8, "max_tokens": 30}, "evaluation": {"temperature": 0, "top_k": 3}}
    )
    assert config.sampling.parameters() == SamplingParameters(0.8, 0, 1.0, 30)
    assert config.evaluation.parameters(config.sampling) == SamplingParameters(0.0, 3, 1.0, 30)
    stopped = build_config({"sampling": {"stop": ["</answer>"]}})
    for parameters in (
        stopped.sampling.parameters(),
        stopped.evaluation.parameters(stopped.sampling),
    ):
        assert parameters.stop == ("</answer>",)
    same = build_config({"sampling": {"temperature": 0.8}})
    assert same.evaluation.parameters(same.sampling) == same.sampling.parameters()


def test_a_decided_rule_replaces_auto_and_survives_the_way_to_a_worker() -> None:
    config = build_config({})
    assert config.sampling.rule == "auto"
    assert parse_config(dump_config(with_rule(config, "gumbel"))).sampling.rule == "gumbel"
    native = build_config({"sampling": {"sampler": "native"}})
    assert with_rule(native, "gumbel") == native
