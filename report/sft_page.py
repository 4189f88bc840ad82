"""Page of a supervised training: its curves and its settings, in the style of a run's report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from antiphon.report.charts import SMOOTHING_STEPS, Chart, Panel, Series, plain_charts, smoothed
from antiphon.report.render import render
from antiphon.system.files import write_atomically

NAMES = {
    "loss": "Loss",
    "heldout_loss": "Held-out loss",
    "heldout_score": "Score on the task",
    "gradient_norm": "Gradient norm",
    "learning_rate": "Learning rate",
}


def build_sft_page(
    name: str, record: Mapping[str, Any], lines: Sequence[Mapping[str, float]], out: Path
) -> None:
    """Write the page of the training whose folder has this `name` to `out`.

    Args:
        name: of the folder.
        record: its configuration, its number of steps and the digests of its rows and weights.
        lines: the figures of its steps, in order; losses in nats per learned token.
        out: the file.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    found = {figure: [(line["step"], line[figure]) for line in lines if figure in line] for figure in NAMES}
    found = {figure: points for figure, points in found.items() if points}
    charts = []
    for figure, points in found.items():
        series = [Series(NAMES[figure], "blue", points, style="faint" if figure == "loss" else "dots")]
        if figure == "loss":
            series.append(Series(f"mean of the last {SMOOTHING_STEPS} steps", "blue", smoothed(points)))
        panel = Panel("step", series, low=0.0, whole=True)
        charts.append(Chart(figure, f"{NAMES[figure]} over steps", [panel]))
    done, steps = len(lines), record["steps"]
    page = render(
        "sft.html",
        title=name,
        brand="Antiphon supervised fine-tuning",
        heading=name,
        facts=[f"{done} of {steps} steps", f"{sum(line['tokens'] for line in lines):,.0f} tokens learned"],
        cards=[
            (NAMES[figure], f"{points[-1][1]:.4g}", f"from {points[0][1]:.4g} in step {points[0][0]:.0f}")
            for figure, points in found.items()
        ],
        drawn=charts,
        charts=plain_charts(charts),
        digests=[*record["rows"].items(), ("weights", record["weights"])],
        configuration=yaml.safe_dump(record["config"], sort_keys=False, allow_unicode=True),
        notes=["A loss is minus the mean log-probability of a token that is learned, in nats."],
    )
    write_atomically(out, page.encode("utf-8"))
