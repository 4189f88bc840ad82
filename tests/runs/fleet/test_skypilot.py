"""SkyPilot: the task that is launched is one that it takes, and its run section becomes a worker."""

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from antiphon.core.capacity.order_book import InstanceState
from tests.support.fleet_site import FleetSite

SKY = """\
#!/bin/sh
"exec" "{python}" "$0" "$@"
# Plays the `sky` command: a job is a process of this machine that runs the task's run section.
import json, os, signal, subprocess, sys, yaml
from pathlib import Path
state = Path({folder!r}) / "jobs"
words = sys.argv[1:]
def jobs():
    for path in sorted(state.iterdir()):
        job = json.loads(path.read_text())
        alive = subprocess.run(["kill", "-0", str(job["pid"])], capture_output=True).returncode == 0
        yield path, job, alive
if words[:2] == ["jobs", "launch"]:
    task = yaml.safe_load(Path(words[-1]).read_text())
    secret = Path(words[words.index("--secret-file") + 1])
    assert oct(secret.stat().st_mode & 0o777) == "0o600"
    name, _, value = secret.read_text().strip().partition("=")
    assert task["secrets"] == {{name: None}}
    state.mkdir(exist_ok=True)
    known = dict(os.environ, HOME={folder!r}, **{{name: value}})
    process = subprocess.Popen(["bash", "-c", task["run"]], env=known, start_new_session=True)
    text = json.dumps({{"pid": process.pid, "name": task["name"]}})
    (state / f"{{process.pid}}.json").write_text(text)
elif words[:2] == ["jobs", "queue"] and not state.exists():
    sys.exit("sky.exceptions.ClusterNotUpError: No in-progress managed jobs.")
elif words[:2] == ["jobs", "queue"]:
    print("a line that some versions print first")
    found = [{{"job_id": job["pid"], "job_name": job["name"], "status": "RUNNING", "start_at": None}}
             for _, job, alive in jobs() if alive]
    print(json.dumps(found))
elif words[:2] == ["jobs", "cancel"]:
    for path, job, alive in jobs():
        if job["name"] == words[words.index("--name") + 1] and alive:
            os.killpg(job["pid"], signal.SIGTERM)
elif words == ["check"]:
    print("  vSphere: disabled")
    none = (Path({folder!r}) / "no-cloud").exists()
    print("Enabled infra \\n  " + ("No infra to check/enabled." if none else "AWS [compute]"))
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FleetSite]:
    sky = tmp_path / "sky"
    sky.write_text(SKY.format(python=sys.executable, folder=str(tmp_path)))
    sky.chmod(0o755)
    resources = [{"infra": "aws", "accelerators": "L4:1", "use_spot": True}, {"infra": "kubernetes"}]
    found = FleetSite(tmp_path, {"kind": "skypilot", "sky": str(sky), "resources": resources}, work_dir=False)
    yield found
    found.close()


def test_a_job_is_launched_once_adopted_and_cancelled(site: FleetSite) -> None:
    async def order() -> None:
        one, order = site.launcher(), site.site.order("spot-1")
        assert await one.missing() == [] and await one.running() == ()
        first = await one.start(order)
        another = site.launcher()
        assert (await another.start(order)).name == first.name
        async with asyncio.timeout(30.0):
            while not site.called:
                await asyncio.sleep(0.05)
        (process,) = site.processes
        words = process.cmdline()
        bundle = Path(words[words.index("--credentials") + 1])
        assert (bundle / "key.pem").read_text() == "secret key.pem of 1"
        assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o600 for path in bundle.iterdir())
        assert "ANTIPHON_BUNDLE" not in process.environ()
        (there,) = await another.running()
        assert (there.worker, there.state) == ("spot-1", InstanceState.UP)
        await another.stop("spot-1", 5.0)
        async with asyncio.timeout(30.0):
            while await another.running():
                await asyncio.sleep(0.05)
        assert not site.processes

    asyncio.run(order())


def test_that_no_cloud_is_enabled_is_said(site: FleetSite) -> None:
    (site.folder / "no-cloud").touch()
    (said,) = asyncio.run(site.launcher().missing())
    assert said.startswith("no cloud is enabled") and "check` says what each lacks" in said


def test_the_task_says_what_would_do_and_no_secret(site: FleetSite) -> None:
    ((name, text),) = site.launcher().render(site.site.draft("spot-0")).items()
    task = yaml.safe_load(text)
    assert name == "spot-0.sky.yaml" and task["resources"]["autostop"]["down"] is True
    assert [one["infra"] for one in task["resources"]["any_of"]] == ["aws", "kubernetes"]
    assert "secret key.pem" not in text and "--coordinator 127.0.0.1:7700" in text


def test_skypilot_itself_reads_the_task(site: FleetSite, tmp_path: Path) -> None:
    python = os.environ.get("ANTIPHON_SKY_PYTHON")
    if not python:
        pytest.skip("ANTIPHON_SKY_PYTHON names no Python with skypilot, which has an environment of its own")
    ((_, text),) = site.launcher().render(site.site.draft("spot-0")).items()
    (tmp_path / "task.yaml").write_text(text.replace("ANTIPHON_BUNDLE: null", "ANTIPHON_BUNDLE: x"))
    code = (
        "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); "
        "print(sorted(one.use_spot for one in task.resources))"
    )
    words = [python, "-c", code, str(tmp_path / "task.yaml")]
    said = subprocess.run(words, capture_output=True, text=True, timeout=120.0)
    assert said.returncode == 0 and said.stdout.strip().endswith("[False, True]"), said.stderr
