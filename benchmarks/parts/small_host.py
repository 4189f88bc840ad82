"""Small host: plays a game of tokens by the gateway's HTTP alone, as `python small_host.py URL NAME`.

Each seat begins with random tokens and observes random tokens after each of its turns, all drawn from the
episode's seed, so that whoever begins an episode again says the same. The token stands in ANTIPHON_TOKEN.
"""

import json
import os
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TURNS, OBSERVED, TURN_TOKENS, VOCABULARY = 4, 6, 8, 100
CALL_S = 60.0
"""Longest wait for an answer of the gateway; then it is asked again."""
AWAY_S = 120.0
"""Longest time that the gateway may be away."""
PAUSE_S = 0.5


def call(url: str, body: dict[str, Any]) -> Any:
    """Post JSON and return what comes back, None for nothing; one that is away is asked again."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    if token := os.environ.get("ANTIPHON_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    give_up = time.monotonic() + AWAY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as reply:
                return json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code < 500 or time.monotonic() > give_up:
                raise SystemExit(f"{url}: {error.code} {error.read().decode(errors='replace')}") from error
        except OSError as error:
            if time.monotonic() > give_up:
                raise SystemExit(f"{url} has been away for {AWAY_S:g} s: {error}") from error
        time.sleep(PAUSE_S)


def play(url: str, model: str, trajectory: str, seed: int) -> dict[str, Any]:
    """Play one seat to its end and return what is reported of it."""
    drawn = random.Random(f"{seed}/{trajectory}")
    row = drawn.choices(range(VOCABULARY), k=OBSERVED)
    sampling = {"antiphon_trajectory": trajectory, "max_tokens": TURN_TOKENS}
    reason = "turns"
    for turn in range(TURNS):
        body = {"model": model, "token_ids": row, "sampling_params": sampling}
        choice = call(f"{url}/inference/v1/generate", body)["choices"][0]
        row = row + choice["token_ids"]
        if turn < TURNS - 1:
            row = row + drawn.choices(range(VOCABULARY), k=OBSERVED)
    return {
        "trajectory": trajectory,
        "reward": float(sum(row) % 2),
        "metrics": {},
        "error": None,
        "stop_condition": reason,
        "branches": [row],
    }


def main() -> None:
    """Take groups and play them until the gateway says no more."""
    url, name = sys.argv[1:3]
    held: list[str] = []

    def stay_alive() -> None:
        while True:
            time.sleep(1.0)
            if held:
                call(f"{url}/antiphon/v1/alive", {"host": name, "groups": held})

    threading.Thread(target=stay_alive, daemon=True).start()
    while True:
        group = call(f"{url}/antiphon/v1/take", {"host": name, "programs": 1})
        if group is None:
            continue
        held = [group["group"]]
        seats = [(name, one["seed"]) for one in group["episodes"] for name in one["trajectories"]]
        with ThreadPoolExecutor(len(seats)) as pool:
            played = dict(zip(seats, pool.map(lambda seat: play(url, group["model"], *seat), seats), strict=True))
        for number, episode in enumerate(group["episodes"]):
            own = [played[trajectory, episode["seed"]] for trajectory in episode["trajectories"]]
            body = {"host": name, "group": group["group"], "episode": number, "seats": own}
            call(f"{url}/antiphon/v1/report", body)
        held = []


if __name__ == "__main__":
    main()
