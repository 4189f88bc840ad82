"""Capacity plot: what a plan's seconds and dollars per step are at other bounds and with other fleets."""

from antiphon.core.capacity.planner import Assessment, Plan
from antiphon.report.canvas import BLUE, ORANGE, Plot
from antiphon.report.line_panels import Panel, Series, draw_panels


def capacity_plot(plan: Plan, max_staleness: int) -> Plot:
    """Draw seconds per step over the staleness bound, and seconds and dollars over the number of workers."""
    bounds = list(enumerate(plan.by_bound))
    sizes = [(one.workers, one) for one in plan.by_workers]
    marks = [(float(max_staleness), "configured")]
    if plan.least_staleness != max_staleness:
        marks.append((float(plan.least_staleness), "never waits"))
    fleet = [(float(plan.chosen.workers), "planned")]

    def line(name: str, colour: str, points: list[tuple[int, Assessment]], dollars: bool = False) -> Series:
        values = [(float(x), one.usd_per_step if dollars else one.pace.step_s) for x, one in points]
        return Series(name, colour, values, style="dots")

    panels = [
        Panel(
            "staleness bound",
            [line("s per step", BLUE, bounds)],
            "seconds per step",
            low=0.0,
            marks=marks,
            whole=True,
        ),
        Panel(
            "workers", [line("s per step", BLUE, sizes)], "seconds per step", low=0.0, marks=fleet, whole=True
        ),
        Panel(
            "workers",
            [line("USD per step", ORANGE, sizes, True)],
            "dollars per step",
            low=0.0,
            marks=fleet,
            whole=True,
        ),
    ]
    label = "Seconds per step by staleness bound; seconds and dollars per step by number of workers"
    return draw_panels("capacity", label, panels)
