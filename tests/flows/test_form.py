"""The form: every field once, in words, from the quickstart's values, checked as the configuration is."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.schema_tools.validation import build_error_obj, is_valid_schema, validate

from antiphon.core.config import RunConfig, build_config, load_config
from antiphon.core.errors import ConfigError
from antiphon.flows.deployments import DEPLOYMENTS, load_flow
from antiphon.flows.form import filled, form_of, with_fields

ROOT = Path(__file__).parents[2]
QUICKSTART = load_config(ROOT / "examples" / "quickstart.yaml")
FORMS = {planned["name"]: form_of(load_flow(planned)) for planned in DEPLOYMENTS}


def fields(form: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield section, name and field of everything that a run's form draws."""
    for name, card in form["definitions"].items():
        form, _, section = name.partition("_")
        if form in {"usual", "change"} and section:
            yield from ((section, field, drawn) for field, drawn in card["properties"].items())


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_a_schema_in_words(name: str) -> None:
    form = FORMS[name]
    is_valid_schema(form)
    assert all("_" not in field["title"] for field in form["properties"].values())
    assert all(field["description"][0].isupper() for field in form["properties"].values())


def test_every_field_of_the_configuration_is_drawn_once_with_the_quickstarts_value() -> None:
    drawn = list(fields(FORMS["post-train"]))
    tree = QUICKSTART.model_dump(mode="json")
    expected = [(section, name) for section, values in tree.items() for name in values]
    assert sorted((section, name) for section, name, _ in drawn) == sorted(expected)
    assert all("_" not in field["title"] for _, _, field in drawn)
    values: dict[str, dict[str, Any]] = {section: {} for section in tree}
    for section, name, field in drawn:
        if "default" in field:
            values[section][name] = field["default"]
    assert build_config(values) == QUICKSTART


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"config": {"loop": {"max_staleness": 65}}}, "65 is greater than the maximum of 64"),
        ({"config": {"loop": {"max_stalenes": 1}}}, "'max_stalenes' was unexpected"),
        ({"config": {"run": {"steps": "many"}}}, "'many' is not of type 'integer'"),
        ({"config": {}, "more": {"drafting": {"min_match": 99}}}, "99 is greater than the maximum of 8"),
        ({"config": {}, "more": {"drafting": {"enabled": 3}}}, "3 is not of type 'boolean'"),
    ],
)
def test_what_the_configuration_refuses_the_form_refuses_at_the_field(
    given: dict[str, Any], words: str
) -> None:
    found = build_error_obj(validate(given, FORMS["post-train"]))
    assert not found["valid"] and words in str(found)


@pytest.mark.parametrize("given", [{}, {"run": {"steps": 20}}, {"learner": {"beta2": 0.5}}])
def test_a_few_fields_are_enough_and_the_others_are_the_quickstarts(given: dict[str, Any]) -> None:
    assert validate({"config": given, "more": {}}, FORMS["post-train"]) == []
    config = RunConfig.model_validate(filled(given))
    tree = QUICKSTART.model_dump(mode="json")
    assert config == build_config({key: {**values, **given.get(key, {})} for key, values in tree.items()})


def test_a_whole_configuration_is_taken_as_it_is() -> None:
    assert filled(RunConfig()) == RunConfig() and RunConfig() != QUICKSTART


def test_further_fields_are_laid_over_the_usual_ones() -> None:
    config = with_fields(QUICKSTART, {"loop": {"mode": "fixed"}, "evaluation": {"prompts": 16}})
    assert (config.loop.mode, config.loop.max_staleness, config.evaluation.prompts) == ("fixed", 2, 16)
    assert with_fields(QUICKSTART, {}) is QUICKSTART
    with pytest.raises(ConfigError, match=r"evaluation\.prompts=999 exceeds"):
        with_fields(QUICKSTART, {"evaluation": {"prompts": 999}})


def test_other_forms_start_from_their_deployments_values() -> None:
    plan = FORMS["benchmark"]["definitions"]["BenchmarkPlan"]["properties"]
    assert plan["script_timeout_s"]["title"] == "Script timeout, seconds"
    assert validate({"plan": {"configs": []}}, FORMS["benchmark"]) == []
    assert validate({"plan": {"repeats": 0}}, FORMS["benchmark"])
