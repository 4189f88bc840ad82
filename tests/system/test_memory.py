"""Memory: what a process that computes is told when it starts."""

from antiphon.system.memory import keep_memory


def test_what_the_environment_says_already_stays() -> None:
    kept = keep_memory({"MALLOC_TRIM_THRESHOLD_": "1", "HOME": "/home"})
    assert kept["MALLOC_TRIM_THRESHOLD_"] == "1" and kept["HOME"] == "/home"
    assert int(kept["MALLOC_MMAP_THRESHOLD_"]) > 2**20
