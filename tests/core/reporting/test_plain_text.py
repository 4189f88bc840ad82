"""Text of others holds no orders: not for a terminal, not for a log, not for a page."""

import io
import json
import unicodedata

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli.app import execute
from antiphon.cli.evaluate import sample_lines
from antiphon.core.checks import check_rewards
from antiphon.core.records import SampleReward
from antiphon.core.reporting.plain_text import plain
from antiphon.environments.scoring.messages import Failed, parse_result
from antiphon.lineage.samples import Sample
from antiphon.report.render import render
from antiphon.system.logs import configure_logs

ORDERS = "\x1b[2J\x1b]52;c;cm0=\x07\r\x00\x9b31m\u202e\u2066\x7f\u2028"
"""Clears the screen, fills the clipboard, goes back, sets a colour by one byte, turns the direction."""


def holds_orders(text: str, keep: str = "") -> bool:
    return any(
        unicodedata.category(c) in {"Cc", "Zl", "Zp", "Cs"} or unicodedata.bidirectional(c) in BIDI
        for c in text
        if c not in keep
    )


BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@given(st.text(st.characters(exclude_categories=())), st.sampled_from(["", "\n\t"]))
def test_no_order_is_left_and_what_is_none_stays(text: str, keep: str) -> None:
    made = plain(text, keep)
    assert not holds_orders(made, keep)
    assert plain(made, keep) == made
    if not holds_orders(text, keep) and not set(text) & set("\u200e\u200f\u061c"):
        assert made == text


def test_a_sample_on_the_terminal_and_on_the_page() -> None:
    said = "k" + ORDERS, "p" + ORDERS, "a\n" + ORDERS, 1.0, "r" + ORDERS
    sample = Sample("t0.0", 1, 0, "train", *said, "best", True)
    assert not any(holds_orders(line, "\n") for line in sample_lines([sample]))
    page = render(
        "samples.html", parts=[("t", 1, 1, [(sample, None)])], longest=99, run="r", problem="", port=1
    )
    assert not holds_orders(str(page), "\n")


def test_a_scorers_reason_is_plain_before_it_is_kept() -> None:
    failed = parse_result(json.dumps({"failed": "why " + ORDERS}).encode())
    assert isinstance(failed, Failed) and not holds_orders(failed.reason)
    (kept,) = check_rewards("g", [SampleReward(0, 0.0, "why " + ORDERS)], 1)
    assert kept.failure and kept.failure.startswith("why ") and not holds_orders(kept.failure)


def test_a_log_line_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    before, written = structlog.get_config(), io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    try:
        configure_logs()
        structlog.get_logger().warning("reward.failed", reason=f"why\n2026 [info] all is well {ORDERS}")
    finally:
        structlog.configure(**before)
    assert written.getvalue().count("\n") == 1 and not holds_orders(written.getvalue(), "\n")


def test_a_complaint_that_quotes_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["report", "no-such-run" + ORDERS]) == 2
    assert not holds_orders(capsys.readouterr().err, "\n")
