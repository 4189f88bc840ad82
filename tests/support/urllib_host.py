"""A host in forty lines of the standard library: takes groups, plays each episode seat by seat, reports.

    python urllib_host.py [EPISODES]

ANTIPHON_GATEWAY and ANTIPHON_TOKEN say where and as whom. Each seat is told tokens and answers, twice;
an answer earns more the more of its tokens are even.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

PATIENCE = 60
NAME = f"host-{os.getpid()}"


def call(path: str, body: dict[str, Any], url: str = "", token: str = "") -> dict[str, Any] | None:
    url, token = url or os.environ["ANTIPHON_GATEWAY"], token or os.environ.get("ANTIPHON_TOKEN", "")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    for _ in range(PATIENCE):
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                if reply.status == HTTPStatus.NO_CONTENT:
                    return None
                found: dict[str, Any] = json.load(reply)
                return found
        except urllib.error.HTTPError:
            raise
        except OSError:  # the gateway starts again
            time.sleep(1.0)
    raise TimeoutError(url)


def play(
    group: dict[str, Any], episode: dict[str, Any], url: str = "", token: str = ""
) -> list[dict[str, Any]]:
    contexts: dict[str, list[int]] = {}
    rewards: dict[str, float] = {}
    for turn in range(2):
        for name in episode["trajectories"]:
            context = [*contexts.get(name, []), 4 + turn, 5 + group["index"] % 7]
            sampling = {"antiphon_trajectory": name, "max_tokens": group["sampling"]["max_tokens"]}
            body = {"model": group["model"], "token_ids": context, "sampling_params": sampling}
            answer = call("/inference/v1/generate", body, url, token)
            assert answer is not None
            said = answer["choices"][0]["token_ids"]
            contexts[name] = [*context, *said]
            rewards[name] = sum(token % 2 == 0 for token in said) / len(said)
    return [{"trajectory": n, "reward": rewards[n], "branches": [contexts[n]]} for n in contexts]


def main(groups: float, url: str = "", token: str = "") -> None:
    while groups > 0:
        group = call("/antiphon/v1/take", {"host": NAME}, url, token)
        groups -= group is not None
        for episode in [] if group is None else group["episodes"]:
            assert group is not None
            body = {"host": NAME, "group": group["group"], "episode": episode["episode"]}
            said = call("/antiphon/v1/report", body | {"seats": play(group, episode, url, token)}, url, token)
            assert said is not None and said["accepted"], said


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf"))
