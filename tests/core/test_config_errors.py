"""A configuration that cannot be meant is refused in plain words, and no number is beyond all bounds."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from antiphon.core.config import RunConfig, build_config, load_config
from antiphon.core.errors import ConfigError

LIBRARY_WORDS = re.compile(
    r"Input should|valid (string|dict|integer|number|tuple|boolean)|instance of|\^\[|None\b"
)
"""Words of the library that checks types, which say nothing to people."""

WRONG: tuple[Any, ...] = (
    *(5, -7, 0.5, True, None, "", "words", "a b", "12x", [], [1], {}, {"a": 1}, {1: 2}, float("nan")),
    *(float("inf"), 10**30, -(10**30), b"bytes", {"a": {"b": []}}, "x" * 500),
)


def fields() -> Iterator[tuple[str, str, FieldInfo]]:
    for section, info in RunConfig.model_fields.items():
        assert isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        for name, field in info.annotation.model_fields.items():
            yield section, name, field


def limit(field: FieldInfo, *kinds: str) -> float | None:
    return next(
        (getattr(rule, kind) for rule in field.metadata for kind in kinds if hasattr(rule, kind)), None
    )


def is_of(field: FieldInfo, kind: type) -> bool:
    if get_origin(field.annotation) is tuple:  # the environment's range, which `reward_range_of` looks at
        return False
    return field.annotation is kind or kind in get_args(field.annotation)


def test_every_whole_number_and_every_duration_has_a_bound_on_both_sides() -> None:
    numbers = [(f"{s}.{n}", field) for s, n, field in fields() if is_of(field, int) or is_of(field, float)]
    assert len(numbers) > 60
    for name, field in numbers:
        assert limit(field, "ge", "gt") is not None, name
        if is_of(field, int) or (name.endswith("_s") and not name.endswith("per_s")):
            assert limit(field, "le", "lt") is not None, name


def test_whatever_is_given_for_a_field_is_taken_or_refused_in_plain_words() -> None:
    refused = 0
    for section, name, _ in fields():
        for wrong in WRONG:
            try:
                build_config({section: {name: wrong}})
            except ConfigError as error:
                refused += 1
                assert not LIBRARY_WORDS.search(str(error)), error
                assert len(str(error)) < 700 and "\n" not in str(error)
    assert refused > 1000
    for wrong in WRONG:
        for tree in ({"run": wrong}, {"loop": wrong}, wrong):
            try:
                build_config(tree)
            except ConfigError as error:
                assert not LIBRARY_WORDS.search(str(error)), error


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(), st.lists))
def test_no_value_of_a_number_escapes_as_another_error(value: Any) -> None:
    for key in ("steps", "seed", "name"):
        try:
            build_config({"run": {key: value}})
        except ConfigError as error:
            assert not LIBRARY_WORDS.search(str(error))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: 5", "run=5 is not possible: run is a section of fields; write run.name=..."),
        ("run:", "run=null is not possible: run is a section"),
        ("run: {name: My Experiment}", "use 1 to 64 of the letters a to z"),
        ("run: {steps: 1.5}", "run.steps=1.5 is not possible: it must be a whole number"),
        ("run: {steps: 1e99}", "run.steps="),
        ("run: {steps: 99999999999999999999999}", "it must be at most 10,000,000"),
        ("learner: {learning_rate: .inf}", "it must be a finite number"),
        ("loop: {mode: quick}", "it must be 'elastic' or 'fixed'"),
        ("record: {mlflow: perhaps}", "it must be true or false"),
        ("trust: {trusted: ada}", "it must be a list, such as [a, b]"),
        ("environment: {parameters: 3}", "it must hold keys with values"),
        ("run:\n  steps: 3\nloop: {}\nrun:\n  seed: 1", "run is set twice, in lines 1 and 4"),
        ("run:\n  steps: 3\n  steps: 4", "run.steps is set twice, in lines 2 and 3"),
        ("run: {steps: 3, steps: 4}", "run.steps is set twice, in line 1"),
        ("environment: {parameters: {a: [{b: 1, b: 2}]}}", "environment.parameters.a.b is set twice"),
        ("environment: {parameters: &a {b: *a}}", "environment.parameters.b holds itself"),
        ("run: {name: 2020-13-45}", "is not valid YAML: month must be in 1..12"),
        ("run: {steps: [[", "is not valid YAML"),
        ("- run\n- loop", "must hold sections, such as run and loop"),
        ("1: 2", "unknown key 1"),
    ],
)
def test_the_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(path)


def test_an_override_says_as_much(tmp_path: Path) -> None:
    path = tmp_path / "right.yaml"
    path.write_text("run: {steps: 3}")
    for override, says in {
        "environment.parameters={a: 1, a: 2}": "a is set twice, in line 1",
        "run..steps=3": "is not of the form key=value",
        "run=5": "run is a section of fields",
        "run.steps.more=5": "steps is a value, not a section",
        f"run.steps={'9' * 5000}": "is not a valid YAML value",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(says)):
            load_config(path, [override])


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (
            {"mode": "fixed"},
            r"swap_cache=keep cannot act with loop\.mode=fixed, which swaps .* only when",
        ),
        ({"max_staleness": 0}, r"rollout\.swap_cache=keep cannot act with loop\.max_staleness=0"),
        (
            {"max_staleness": 2, "publish_interval": 3},
            r"publish_interval=3 versions old when it trains",
        ),
    ],
)
def test_a_cache_that_nothing_could_keep_is_refused(loop: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        build_config({"rollout": {"swap_cache": "keep"}, "loop": loop})
    assert "\n" not in str(refused.value)
    build_config({"rollout": {"swap_cache": "keep"}, "loop": {"max_staleness": 3, "publish_interval": 3}})


@pytest.mark.parametrize("ladder", [[2, 1], [1, 1], list(range(1, 18))])
def test_a_ladder_of_patches_has_different_rungs_in_order(ladder: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"broadcast\.patch_ladder=.*is no ladder"):
        build_config({"broadcast": {"patch_ladder": ladder}})
    with pytest.raises(ConfigError, match=r"broadcast\.patch_ladder"):
        build_config({"broadcast": {"patch_ladder": [0, 1]}})
    assert build_config({"broadcast": {"patch_ladder": [1, 3]}}).broadcast.patch_ladder == (1, 3)


@pytest.mark.parametrize("key", ["broadcast.relay", "broadcast.patches", "trust.audits"])
def test_off_means_the_word_where_a_key_has_it(tmp_path: Path, key: str) -> None:
    section, _, field = key.partition(".")
    written = tmp_path / "run.yaml"
    written.write_text(f"{section}:\n  {field}: off\n")
    assert getattr(getattr(load_config(written), section), field) == "off"
    assert getattr(getattr(load_config(written, [f"{key}=off"]), section), field) == "off"


def test_on_means_the_word_only_where_a_key_has_it(tmp_path: Path) -> None:
    written = tmp_path / "run.yaml"
    written.write_text("{}")
    assert load_config(written, ["broadcast.patches=on"]).broadcast.patches == "on"
    assert load_config(written, ["broadcast.compress_full=on"]).broadcast.compress_full is True
    with pytest.raises(
        ConfigError, match=r"broadcast\.relay=true is not possible: it must be 'auto' or 'off'"
    ):
        load_config(written, ["broadcast.relay=on"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.seed=010", "run.seed=010 is 8 in YAML; write 8"),
        ("run.steps=1:30", "run.steps=1:30 is 90 in YAML"),
        ("algorithm.ratio_cap=1:30.5", "algorithm.ratio_cap=1:30.5 is 90.5 in YAML"),
        ("environment.parameters={a: 07}", "environment.parameters.a=07 is 7 in YAML"),
        (
            "model.path=/data/my model #2",
            "model.path: YAML leaves out '#2' as a comment; quote the whole value",
        ),
        ("run.name=#2", "run.name: YAML leaves out '#2'"),
        ("environment.parameters={min_number:2}", "min_number:2 is a key without a value; write a blank"),
        ("learning_rate=1e-4", "unknown key learning_rate; did you mean learner.learning_rate?"),
        ("dtype=float32", "did you mean model.dtype or learner.dtype?"),
    ],
)
def test_what_yaml_would_read_as_something_else_is_refused(tmp_path: Path, override: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text("run: {steps: 3}  # a comment here is one\n")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(tmp_path / "run.yaml", [override])


@pytest.mark.parametrize(
    ("override", "value"),
    [("'/data/my model #2'", "/data/my model #2"), ("/data/a#b", "/data/a#b"), ("'010'", "010")],
)
def test_what_is_quoted_is_taken_as_it_stands(tmp_path: Path, override: str, value: str) -> None:
    (tmp_path / "run.yaml").write_text("run: {steps: 1_000}\n")
    config = load_config(tmp_path / "run.yaml", [f"model.path={override}"])
    assert (config.model.path, config.run.steps) == (value, 1000)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "Is a directory; give the path of a YAML file"), ("# A\na: b: c\n", "in line 2")],
)
def test_what_is_no_configuration_is_said_without_words_of_the_library(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "given"
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        load_config(path)
    assert "unicode string" not in str(refused.value) and "Errno" not in str(refused.value)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"environment": {"seats": 2}}, "environment.seats=2 has no effect with environment.name=reasoning/"),
        ({"environment": {"host_command": ["x"]}}, "has no effect with environment.name=reasoning/chain_sum"),
        ({"gateway": {"port": 8000}}, "gateway has no effect with environment.name=reasoning/chain_sum"),
        (
            {"environment": {"name": "host", "seats": 3}},
            "loop.group_size=8 is no multiple of environment.seats=3",
        ),
        (
            {"environment": {"name": "host", "seats": 2}},
            "evaluation.samples=1 is no multiple of environment.seats=2",
        ),
    ],
)
def test_what_only_hosts_have_fits_the_rest(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_config(tree)
    assert words in str(refused.value)
