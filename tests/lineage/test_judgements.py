"""Judgements stay where a process ends, whoever writes beside it, and a file that is none is said."""

import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.lineage.judgements import JUDGEMENTS, JUDGEMENTS_FILE, Judgement, judgement_lines
from antiphon.lineage.kept import Kept

RIGHT = Judgement(0.75, "Score: 7.5", "", 100, 20, 1, 0.5, 0.001)
NONE = Judgement(None, "hm", "the reply has no score", 10, 2, 2, 1.0, 0.0)
KILLED = """
import os, signal, sys
from pathlib import Path
from antiphon.lineage.judgements import JUDGEMENTS, Judgement
from antiphon.lineage.kept import Kept

kept = Kept(Path(sys.argv[1]), JUDGEMENTS, Judgement)
kept.add("a", Judgement(0.75, "Score: 7.5", "", 100, 20, 1, 0.5, 0.001))
os.kill(os.getpid(), signal.SIGKILL)
"""


def opened(path: Path) -> Kept[Judgement]:
    return Kept(path, JUDGEMENTS, Judgement)


def test_what_was_kept_outlives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / JUDGEMENTS_FILE
    assert judgement_lines(tmp_path) == []
    done = subprocess.run([sys.executable, "-P", "-c", KILLED, str(path)], timeout=120, check=False)
    assert done.returncode == -9
    assert opened(path).find("a") == RIGHT


def test_the_first_score_of_two_writers_counts_and_both_read_it(tmp_path: Path) -> None:
    one, other = (opened(tmp_path / JUDGEMENTS_FILE) for _ in range(2))
    assert one.find("a") is None
    one.add("a", RIGHT)
    other.add("a", NONE)
    other.add("b", NONE)
    assert (other.find("a"), one.find("b")) == (RIGHT, NONE)
    other.add("b", found := RIGHT.after(NONE), over=NONE)
    one.add("b", NONE.after(NONE), over=NONE)
    assert one.find("b") == found == Judgement(0.75, "Score: 7.5", "", 110, 22, 3, 1.5, 0.001), "costs add up"


def test_the_lines_are_sums_and_what_another_order_changed(tmp_path: Path) -> None:
    kept = opened(tmp_path / JUDGEMENTS_FILE)
    assert judgement_lines(tmp_path) == []
    kept.add("a", RIGHT)
    kept.add("b", NONE)
    assert judgement_lines(tmp_path) == [
        "A model gave 2 judgements in 3 requests of 0.50 s, for 132 tokens and $0.00; 1 have no score."
    ]
    for name, share in (("c", 0.5), ("d", 0.25)):
        kept.add(name, RIGHT)
        kept.add(f"{name}'", Judgement(share, "", "", 0, 0, 1, 0.5, 0.0, name))
    kept.add("b'", RIGHT._replace(other_order_of="b"))  # one of the two has no score
    _, order = judgement_lines(tmp_path)
    assert "the judge gave -0.375 ± 0.245 more" in order and "of 2 answers" in order
    kept.close()
    assert len(judgement_lines(tmp_path)) == 2, "also of a run that is over"


def test_a_file_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / JUDGEMENTS_FILE).write_text("no database, " * 100)
    with pytest.raises(UnavailableError, match=r"judgements\.sqlite cannot be used"):
        opened(tmp_path / JUDGEMENTS_FILE)
    (line,) = judgement_lines(tmp_path)
    assert line.startswith("judgements.sqlite cannot be read: ")
    with pytest.raises(UnavailableError):
        opened(tmp_path / "none" / JUDGEMENTS_FILE)
