"""Charts: under which names MLflow draws a run's metrics, and the comparison it opens with.

MLflow makes a section of charts for each part of a name before the slash and sorts sections and names by
letters, so the sections are named such that those which answer "does it learn?" come first. The prepared
comparison is what MLflow's own "Share" keeps of a page: a tag of the experiment, which a link names.
"""

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from antiphon.core.metrics import STALENESS_METRICS

SECTIONS: Mapping[str, str] = {
    "learning": "loss reward_mean",
    "optimizer": "gradient_norm learning_rate",
    "policy": "clip_share completion_tokens_mean effective_sample_share entropy_estimate kl_k1 kl_k3 "
    "ratio_max ratio_mean truncated_share",
    "rollout": "groups groups_filtered groups_dropped_stale trajectories trajectories_failed workers voided "
    "completion_tokens staleness_mean staleness_max",
    "plan": "plan_step_s plan_measured_step_s plan_need_tokens_per_s plan_supply_tokens_per_s "
    "plan_acceptance plan_publish_interval",
    "timing": "train_s micro_batches padding_share",
}
"""Section -> metrics of a step that MLflow draws in it."""
HELDOUT = "heldout/pass_at_1"
"""MLflow's name of the held-out score; its section comes before all others."""
_CLOCKS = frozenset({"at", "wall_s", "startup_s", "break_s", "breaks"})
"""Timings of a line that say something of the run so far, not of its step."""
COMPARISON = "antiphon"
"""Key of the prepared comparison in links."""
_SHARED = "mlflow.sharedViewState."
_MODE = "workflowType=machine_learning"
"""MLflow opens a link without it as an experiment with agents, whose lists of runs show no metrics."""
_AXES = ("wall_s", "tokens_total", "cost_dollars")
"""Metrics that are x axes of the prepared comparison, beside the step."""
_NAMES = {name: f"{section}/{name}" for section, names in SECTIONS.items() for name in names.split()}
_SPLIT = {metric.name for metric in STALENESS_METRICS}


def chart_name(metric: str) -> str:
    """Return the name under which MLflow keeps a metric of a step.

    >>> [chart_name(name) for name in ("loss", "kl_k3.staleness_2", "drafting_gain", "wall_s")]
    ['learning/loss', 'staleness/kl_k3.staleness_2', 'rollout/drafting_gain', 'wall_s']
    """
    if metric in _NAMES:
        return _NAMES[metric]
    if metric.startswith(("drafting_", "order_")):
        return f"rollout/{metric}"
    return f"staleness/{metric}" if metric.partition(".")[0] in _SPLIT and "." in metric else metric


STEP_METRIC = chart_name("loss")
"""A metric that every recorded step has."""


def step_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what there is to draw of a step, by chart, from its line of the run log."""
    timings, batch = line["timings"], line["batch"] or {}
    # A commit repeats most of what is known of its batch; each number is drawn once.
    metrics = {k: v for k, v in batch.items() if k != "tokens" and isinstance(v, int | float)}
    metrics |= line["metrics"]
    metrics |= {k: v for k, v in timings.items() if k not in _CLOCKS and isinstance(v, int | float)}
    if batch.get("replaced"):
        metrics["voided"] = len(batch["replaced"])
    if timings.get("workers"):
        metrics["workers"] = len(timings["workers"])
    metrics = {chart_name(name): value for name, value in metrics.items()}
    for staleness, count in batch.get("staleness_histogram", {}).items():
        metrics[f"staleness/trajectories.staleness_{staleness}"] = count
    for name, value in batch.get("reward_parts", {}).items():
        metrics[f"reward_part/{plain_name(name)}"] = value
    return metrics


def plain_name(name: str) -> str:
    """Return a name with all replaced that the name of a metric may not have."""
    return re.sub(r"[^\w. -]", "_", name, flags=re.ASCII)


def heldout_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what there is to draw of an evaluation, by chart, from its line of the run log."""
    found = {HELDOUT: line["reward_mean"], "heldout/tokens_mean": line["completion_tokens_mean"]}
    return found | ({"heldout/best_of_k": line["best_of_k"]} if "best_of_k" in line else {})


def experiment_link(base: str, experiment_id: str) -> str:
    """Return the address of an experiment's comparison on the MLflow server `base`; "": on the same."""
    query = f"{_MODE}&viewStateShareKey={COMPARISON}&compareRunsMode=CHART"
    return f"{_root(base)}/experiments/{experiment_id}/runs?{query}"


def run_link(base: str, experiment_id: str, run_id: str, page: str = "") -> str:
    """Return the address of a run's page, or of one below it, on the MLflow server `base`."""
    below = f"/{page}" if page else ""
    return f"{_root(base)}/experiments/{experiment_id}/runs/{run_id}{below}?{_MODE}"


def comparison_tag() -> tuple[str, str]:
    """Return name and value of the experiment's tag that holds the prepared comparison."""
    state = json.dumps(_comparison(), sort_keys=True, separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(state.encode(), 9)).decode()
    view = {"name": "Held-out reward over steps, seconds, tokens, dollars", "createdAt": 0}
    return f"{_SHARED}{COMPARISON}", json.dumps(view | {"state": f"deflate;{packed}"})


def _comparison() -> dict[str, Any]:
    rewards = [(_NAMES["reward_mean"], axis) for axis in ("", *_AXES)]
    steps = ("loss", "entropy_estimate", "kl_k3", "completion_tokens_mean")
    stale = ("staleness_mean", "staleness_max", "groups_dropped_stale", "groups_filtered", "train_s")
    sections = {
        "Held-out reward": [(HELDOUT, axis) for axis in ("", *_AXES)],
        "Learning": [*rewards, *((_NAMES[name], "") for name in steps)],
        "What the overlap does": [(_NAMES[name], "") for name in stale],
    }
    cards = [
        _line(f"{section} {place}", section, *card)
        for section, drawn in sections.items()
        for place, card in enumerate(drawn)
    ]
    cards.append(_differences("Parameters that differ"))
    prepared = [*sections, "Parameters that differ"]
    figures = [f"metrics.`summary/{name}`" for name in ("reward_last", "wall_s", "tokens", "dollars")]
    # MLflow adds a chart for each further metric; its sections stand below these, closed.
    others = ["heldout", *SECTIONS, "staleness", "summary", "weights", "Model metrics", "System metrics"]
    return {
        "searchFilter": 'tags.`antiphon.run_id` != ""',
        "compareRunCharts": cards,
        "compareRunSections": [
            {"uuid": name, "name": name, "display": name in prepared, "isReordered": name in prepared}
            for name in (*prepared, *others)
        ],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "selectedColumns": figures,
    }


def _root(base: str) -> str:
    return f"{base.rstrip('/')}/#" if base else "#"


def _line(identity: str, section: str, metric: str, axis: str) -> dict[str, Any]:
    return {
        "uuid": identity,
        "type": "LINE",
        "metricSectionId": section,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "xAxisKey": "metric" if axis else "step",
        "selectedXAxisMetricKey": axis,
        "useGlobalXaxisKey": False,
        "lineSmoothness": 0,
        "useGlobalLineSmoothing": False,
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
    }


def _differences(section: str) -> dict[str, Any]:
    return {
        "uuid": section,
        "type": "DIFFERENCE",
        "metricSectionId": section,
        "chartName": section,
        "compareGroups": ["Parameters"],
        "showChangeFromBaseline": True,
        "showDifferencesOnly": True,
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
    }
