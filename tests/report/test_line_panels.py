"""Line panels: series in, drawings and readings out, for one run or several."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from antiphon.report.canvas import BLUE, ORANGE
from antiphon.report.line_panels import (
    CYCLE,
    MOST_POINTS,
    SMOOTHING_STEPS,
    Panel,
    Series,
    draw_panels,
    smoothed,
    thin,
)
from antiphon.report.render import _environment, standalone

SVG = "{http://www.w3.org/2000/svg}"


def words_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


class Outline(HTMLParser):
    """Collects tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, dict[str, str]]] = []
        self.feed(page)
        self.tags = [tag for tag, _ in self.attributes]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, {name: value or "" for name, value in attributes}))


def runs(*names: str) -> list[Series]:
    """Rewards of several runs, as a comparison draws them."""
    return [
        Series(name, CYCLE[place], [(float(step), 0.1 * step + place) for step in range(5)])
        for place, name in enumerate(names)
    ]


def drawn(panels: list[Panel]) -> tuple[str, str]:
    plot = draw_panels("p", "runs", panels)
    return standalone(plot.wide), standalone(plot.narrow)


def test_several_runs_share_one_legend_in_both_drawings() -> None:
    series = runs("a <b> & $x$", "other")
    panels = [Panel("step", series, whole=True), Panel("seconds", series), Panel("tokens", series)]
    for svg in drawn(panels):
        words = words_of(svg)
        assert words.count("a <b> & $x$") == words.count("other") == 1
        assert {"step", "seconds", "tokens"} <= set(words)
    wide, narrow = (ElementTree.fromstring(svg).attrib for svg in drawn(panels))
    places = [json.loads(one["data-axes"]) for one in (wide, narrow)]
    assert places[0][0][0] < places[0][1][0] < places[0][2][0], "beside each other"
    assert places[1][0][1] < places[1][1][1] < places[1][2][1], "below each other"


def test_a_name_of_a_run_cannot_leave_its_place_on_the_page() -> None:
    name = "</script><b>'\"&"
    plot = draw_panels("p", name, [Panel("step", [Series(name, BLUE, [(0.0, 1.0)])])])
    page = _environment().get_template("plot.html").module.figure(plot)  # type: ignore[attr-defined]
    outline = Outline(page)
    assert set(outline.tags) <= {
        "figure",
        "div",
        "svg",
        "defs",
        "style",
        "path",
        "g",
        "use",
        "text",
        "clippath",
        "rect",
    }
    figure, svg = (
        next(found for tag, found in outline.attributes if tag == one) for one in ("figure", "svg")
    )
    assert json.loads(figure["data-readings"])[0]["names"] == [name] and svg["aria-label"] == name


def test_a_small_plot_has_one_drawing_for_every_page() -> None:
    plot = draw_panels("p", "one", [Panel("step", runs("a"))], small=True)
    assert plot.wide and not plot.narrow
    assert len(words_of(standalone(plot.wide))) > 2 and "a" not in words_of(standalone(plot.wide))


def test_readings_join_series_at_their_places() -> None:
    held = Series("held-out", ORANGE, [(0.0, 0.25), (2.0, 0.5)], spread=[0.1, 0.2])
    loss = Series("loss", BLUE, [(0.0, 1e-7), (1.0, 12345.6)], hidden=True)
    (reading,) = draw_panels("p", "x", [Panel("step", [held, loss], whole=True)], small=True).readings
    assert reading.points == [
        (0.0, "0", ["0.25 ± 0.1", "1e-07"]),
        (1.0, "1", ["", "12,346"]),
        (2.0, "2", ["0.5 ± 0.2", ""]),
    ]
    assert reading.plain()["colours"] == ["orange", "blue"]


def test_small_values_keep_their_digits() -> None:
    series = [Series("kl", BLUE, [(0.0, 0.00012), (10.0, 0.00098)])]
    svg = draw_panels("p", "kl", [Panel("step", series, low=0.0)], small=True).wide
    ticks = [float(word) for word in words_of(standalone(svg)) if re.fullmatch(r"0\.\d+", word)]
    assert len(set(ticks)) >= 4 and max(ticks) <= 0.00105
    assert not re.findall(r'="[^"]*\d\.\d{3,}', svg.partition(">")[2]), "hundredths are enough for a place"


@pytest.mark.parametrize("count", [0, 1, 2, MOST_POINTS, 10 * MOST_POINTS + 3])
def test_long_series_are_thinned_and_keep_their_end(count: int) -> None:
    values = list(range(count))
    kept = thin(values)
    assert len(kept) <= MOST_POINTS + 1 and kept[-1:] == values[-1:] and kept[:1] == values[:1]
    assert kept == sorted(set(kept))


def test_a_running_mean_looks_back_only() -> None:
    points = [(float(x), float(x)) for x in range(10)]
    means = smoothed(points)
    assert means[0] == (0.0, 0.0) and means[9] == (9.0, 9.0 - (SMOOTHING_STEPS - 1) / 2)


def test_one_point_is_seen() -> None:
    for points in ([(3.0, 0.5)], [(3.0, 0.5), (4.0, 0.6)]):
        svg = draw_panels("p", "x", [Panel("step", [Series("a", BLUE, points)], whole=True)], small=True).wide
        assert ("fill: var(--blue)" in svg) == (len(points) == 1), "a dot where no line can be drawn"
        assert "3" in words_of(standalone(svg))
