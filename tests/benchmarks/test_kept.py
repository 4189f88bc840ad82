"""Finished runs are kept, and a line that was cut off is measured again."""

from pathlib import Path

from antiphon.benchmarks.parts.kept import Kept


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    made: list[str] = []

    def make(name: str) -> dict[str, str]:
        made.append(name)
        return {"name": name}

    first = Kept(file)
    assert first.get(["a", 0.5], lambda: make("a")) == {"name": "a"}
    first.get(["b", 0.5], lambda: make("b"))
    file.write_text(file.read_text()[:-3])
    again = Kept(file)
    assert again.get(["a", 0.5], lambda: make("a")) == {"name": "a"} and ["b", 0.5] not in again
    again.get(["b", 0.5], lambda: make("b"))
    assert made == ["a", "b", "b"] and Kept(file).found(["b", 0.5]) == {"name": "b"}
    assert Kept(None).get("a", lambda: 1) == 1
