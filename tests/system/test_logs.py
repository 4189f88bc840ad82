"""Logs never stand in the way: a line that finds no place is dropped."""

import errno
import io

import pytest
import structlog

from antiphon.system.logs import configure_logs


class FullDisk(io.TextIOBase):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("level", ["info", "warning", "error", "critical", "exception"])
@pytest.mark.parametrize("refuses", [FullDisk, closed])
def test_a_line_that_finds_no_place_is_dropped(
    refuses: type, level: str, logs_as_they_were: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    configure_logs()
    monkeypatch.setattr("sys.stderr", refuses())
    getattr(structlog.get_logger("tests"), level)("journal.blocked", reason="no space")
    monkeypatch.setattr("sys.stderr", now := io.StringIO())
    structlog.get_logger("tests").error("journal.unblocked")
    assert "journal.unblocked" in now.getvalue()
