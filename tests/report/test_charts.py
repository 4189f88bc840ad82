"""Charts: values in; data for a page's script and pictures out, for one run or several."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from antiphon.core.reporting.run_view import Bar
from antiphon.report.charts import (
    CYCLE,
    MOST_MARKS,
    MOST_POINTS,
    SMOOTHING_STEPS,
    Bars,
    Chart,
    Panel,
    Part,
    Series,
    plain_charts,
    smoothed,
    thin,
)
from antiphon.report.pictures import Scale, picture
from antiphon.report.render import render
from antiphon.report.run_charts import MOMENTS, _groups, _told

SVG = "{http://www.w3.org/2000/svg}"


def words_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def runs(*names: str) -> list[Series]:
    """Rewards of several runs, as a comparison draws them."""
    return [
        Series(name, CYCLE[place], [(float(step), 0.1 * step + place) for step in range(5)])
        for place, name in enumerate(names)
    ]


def test_several_runs_share_one_legend_in_a_picture() -> None:
    series = runs("a <b> & $x$", "other")
    panels = [Panel("step", series, whole=True), Panel("seconds", series), Panel("tokens", series)]
    words = words_of(picture(Chart("p", "runs", panels)))
    assert words.count("a <b> & $x$") == words.count("other") == 1
    assert {"step", "seconds", "tokens"} <= set(words)


def test_a_name_of_a_run_cannot_leave_its_place_on_the_page() -> None:
    name = "</script><b>'\"&"
    chart = Chart("p", name, [Panel("step", [Series(name, "blue", [(0.0, 1.0)])])])
    bars = Chart("q", name, Bars("%", [(name, name, [Part(name, "blue", 50.0)] * 2)]))
    page = render(
        "compare.html",
        **dict.fromkeys(("title", "brand", "heading"), name),
        **dict.fromkeys(("facts", "runs", "parameters", "figures", "over_seeds"), ()),
        **dict.fromkeys(("seed_head", "warnings"), ()),
        names=[],
        drawn={"p": chart, "q": bars},
        charts=plain_charts([chart, bars]),
    )
    data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert data is not None and "</script><b>" not in page
    assert json.loads(data[1])["p"]["drawn"][0]["series"][0]["name"] == name
    assert page.count("<script") == 2 and list(json.loads(data[1])) == ["p"], "bars need no script"


def test_small_and_large_values_keep_their_digits_and_no_more() -> None:
    series = Series("kl", "blue", [(0.0, 0.000123456789), (1e6 + 1, 12345678.9), (2e6, float("nan"))])
    chart = plain_charts([Chart("p", "x", [Panel("step", [series])])])["p"]
    assert chart["drawn"] == [
        {
            "x": "step",
            "series": [
                {
                    "name": "kl",
                    "colour": "blue",
                    "points": [[0, 0.0001234568], [1000001, 12345680], [2000000, None]],
                }
            ],
        }
    ]


def test_hidden_series_are_told_and_not_drawn() -> None:
    shown, hidden = (Series(name, "blue", [(0.0, 1.0)], hidden=name == "read") for name in ("drawn", "read"))
    chart = Chart("p", "x", [Panel("step", [shown, hidden], whole=True)])
    assert [s.get("hidden", False) for s in plain_charts([chart])["p"]["drawn"][0]["series"]] == [False, True]
    assert "read" not in words_of(picture(chart))


@pytest.mark.parametrize("count", [0, 1, 2, MOST_POINTS, 10 * MOST_POINTS + 3])
def test_long_series_are_thinned_and_keep_their_end(count: int) -> None:
    values = list(range(count))
    kept = thin(values)
    assert len(kept) <= MOST_POINTS + 1 and kept[-1:] == values[-1:] and kept[:1] == values[:1]
    assert kept == sorted(set(kept))


def test_of_many_marks_only_some_are_drawn() -> None:
    panel = Panel("step", runs("a"), marks=[(float(x), f"epoch {x}") for x in range(100)])
    assert len(panel.marks) <= MOST_MARKS
    assert sum(word.startswith("epoch") for word in words_of(picture(Chart("p", "x", [panel])))) <= MOST_MARKS


def test_a_running_mean_looks_back_only() -> None:
    points = [(float(x), float(x)) for x in range(10)]
    means = smoothed(points)
    assert means[0] == (0.0, 0.0) and means[9] == (9.0, 9.0 - (SMOOTHING_STEPS - 1) / 2)


def test_groups_of_a_lane_never_cover_each_other() -> None:
    boxes, slots = _groups([Bar(0.0, 4.0, 0), Bar(1.0, 2.0, 1), Bar(2.5, 5.0, 2), Bar(4.0, 6.0, 3)])
    assert [box.slot for box in boxes] == [0, 1, 1, 0] and slots == 2
    assert boxes[0].shade != boxes[1].shade == boxes[1].shade


def test_a_lane_tells_what_it_did_at_each_moment() -> None:
    bars = [Bar(0.0, MOMENTS / 2, 3), Bar(MOMENTS / 4, MOMENTS / 2, 4)]
    counted, groups = (_told(bars, 0.0, float(MOMENTS), one) for one in (True, False))
    assert (counted[0], counted[MOMENTS // 3], counted[MOMENTS - 1]) == (3, 4, None)
    assert (groups[0], groups[MOMENTS // 3], groups[MOMENTS - 1]) == (1, 2, None)


def test_ticks_of_a_nearly_constant_curve_differ() -> None:
    words = [text for _, text in Scale(1 - 1e-5, 1 + 1e-5, 0.0, 100.0).ticks(5)]
    assert len(words) == len(set(words)) > 2
