"""Whatever Prefect server a run talks to, Prefect's own lines never reach the terminal; the page has them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from antiphon.runs.servers.prefect_server import QUIET, begin_prefect_server, server_password

START_S = 170.0
FLOW = """
from prefect import flow, get_run_logger, task

@task
def collect(step):
    if step == 2:
        raise ValueError("of the stage")

@flow
def watched():
    get_run_logger().warning("a line for the page")
    for future in [collect.submit(step) for step in range(3)]:
        future.result()

try:
    watched()
except ValueError as error:
    print("the command says:", error)
"""


def test_prefects_lines_reach_the_page_and_not_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a file that has a module's name, and variables that are about another server."""
    decoys = tmp_path / "decoys"
    decoys.mkdir()
    for name in ("yaml", "aiosqlite"):
        (decoys / f"{name}.py").write_text('raise SystemExit("this file is of the user")\n')
    monkeypatch.chdir(decoys)
    monkeypatch.setenv("WEB_CONCURRENCY", "2")
    monkeypatch.setenv("UVICORN_ROOT_PATH", "/elsewhere")
    server = begin_prefect_server(tmp_path, 0, tmp_path / "server.log")
    try:
        server.wait_healthy(START_S)
        password = server_password(tmp_path)
        told = {"PREFECT_API_URL": server.url, "PREFECT_API_AUTH_STRING": password}
        told |= {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "true"}
        done = subprocess.run(
            [sys.executable, "-P", "-c", FLOW],
            env={**os.environ, **told, **QUIET},
            capture_output=True,
            text=True,
            timeout=START_S,
            check=True,
        )
        assert done.stdout == "the command says: of the stage\n" and done.stderr == ""
        user, secret = password.split(":")
        with httpx.Client(base_url=server.url, auth=(user, secret)) as client:
            token = client.get("/csrf-token", params={"client": "test"}).json()["token"]
            headers = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "test"}
            ends = time.perf_counter() + START_S
            while time.perf_counter() < ends:
                logs = client.post("/logs/filter", json={}, headers=headers).json()
                lines = [log["message"] for log in logs]
                if "a line for the page" in lines:
                    break
        assert "a line for the page" in lines and not [line for line in lines if "Completed()" in line]
    finally:
        server.stop()
