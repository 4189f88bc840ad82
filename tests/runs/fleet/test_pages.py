"""The pages show what is really submitted, and their files are configurations."""

import re
from pathlib import Path

import pytest
import yaml

from antiphon.core.config import RunConfig, build_config
from antiphon.runs.fleet.engines import make_launcher
from antiphon.runs.fleet.launcher import LaunchSite

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


def configured(page: str) -> RunConfig:
    found = re.search(r"```yaml\n(.*?)```", (GUIDES / page).read_text(), re.DOTALL)
    assert found is not None
    plain = yaml.safe_load(found[1])
    plain["services"] |= {"credentials": None, "host": "127.0.0.1"}  # no bundle lies beside a page
    return build_config(plain)


@pytest.mark.parametrize("page", sorted(path.name for path in GUIDES.glob("fleet-*.md")))
def test_a_file_of_a_page_is_a_configuration_of_its_launcher(page: str) -> None:
    (one,) = configured(page).provisioning.pool
    assert f"fleet-{one.launcher.kind}.md" == page


def test_the_page_of_slurm_shows_what_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = configured("fleet-slurm.md")
    bundles = Path(".antiphon/keys/workers")
    site = LaunchSite("RUN", "RUN-ab12cd34", "login-1.example:7000", bundles, config)
    (text,) = make_launcher(config.provisioning.pool[0], site).render(site.draft("spot-0")).values()
    assert f"```sh\n{text}```" in (GUIDES / "fleet-slurm.md").read_text()
