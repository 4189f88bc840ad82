"""A home's Prefect server asked as its pages ask it: with the home's password and a token against forgery."""

import base64
import json
import urllib.request
from pathlib import Path
from typing import Any

from antiphon.runs.servers.prefect_server import server_password

CLIENT = "tests"
ANSWER_S = 60.0
"""Longest wait for one answer."""


def post(url: str, home: Path, path: str, body: Any) -> Any:
    """Return the answer of a home's server to a request.

    Args:
        url: Of the server's pages, without `/api`.
        home: The home that started it.
        path: Below `/api`.
        body: What is sent, as JSON.
    """
    password = base64.b64encode(server_password(home).encode()).decode()
    headers = {"Authorization": f"Basic {password}"}
    token = urllib.request.Request(f"{url}/api/csrf-token?client={CLIENT}", None, headers)
    with urllib.request.urlopen(token, timeout=ANSWER_S) as answer:
        headers |= {"Prefect-Csrf-Token": json.load(answer)["token"], "Prefect-Csrf-Client": CLIENT}
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(f"{url}/api/{path}", json.dumps(body).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return json.load(answer)


def find_all(url: str, home: Path, kind: str) -> list[dict[str, Any]]:
    """Return what a home's server holds of a kind (`flow_runs`, `deployments`, ...)."""
    return list(post(url, home, f"{kind}/filter", {}))
