"""The command that a run without workers prints is one that its coordinator accepts."""

from antiphon.core.config import build_config
from antiphon.runs.live_run import ways_to_join


def test_a_run_on_one_machine_is_joined_by_its_name() -> None:
    ways = ways_to_join(build_config({}), "127.0.0.1:7700", "demo-1")
    assert ways == ("./antiphon worker --coordinator 127.0.0.1:7700 --run demo-1",)


def test_a_run_with_credentials_is_joined_with_a_bundle() -> None:
    config = build_config({"services": {"credentials": "keys/services"}})
    ways = " ".join(ways_to_join(config, "train.example:7700", "demo-1"))
    assert "--coordinator train.example:7700 --name NAME --credentials FOLDER" in ways
    assert "invite NAME --run demo-1" in ways
