"""Run views of runs that a test made up or read as events."""

from collections.abc import Iterable

from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import Event


def view_of(events: Iterable[Event]) -> RunView:
    """Return the view of a run with these events, in the order of the journal."""
    view = RunView()
    for event in events:
        view.apply(event)
    return view
