"""Small host: plays a game of tokens by the gateway's HTTP alone.

It finds the gateway in ANTIPHON_GATEWAY and ANTIPHON_TOKEN. Each seat begins with random tokens and observes
random tokens after each of its turns, all drawn from the episode's seed, so that whoever begins an episode
again says the same.
"""

import json
import os
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

TURNS, OBSERVED, VOCABULARY = 4, 6, 100
CALL_S, PAUSE_S = 60.0, 0.2
"""Longest wait for an answer, and pause before asking again."""
AWAY_S = 120.0
"""Longest time that the gateway may be away."""
ALIVE_S = 1.0


class LostError(Exception):
    """The group is not this host's any more."""


def call(path: str, body: Mapping[str, Any]) -> Any:
    """Post JSON and return what comes back, None for nothing; a gateway that is away is asked again.

    Raises:
        LostError: when the gateway says that the group is not held by this host.
    """
    request = urllib.request.Request(os.environ["ANTIPHON_GATEWAY"] + path, json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {os.environ['ANTIPHON_TOKEN']}")
    give_up = time.monotonic() + AWAY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as reply:
                return json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code == 409:
                raise LostError(error.read().decode()) from error
            if error.code < 500 or time.monotonic() > give_up:
                raise SystemExit(f"{path}: {error.code} {error.read().decode(errors='replace')}") from error
        except OSError as error:
            if time.monotonic() > give_up:
                raise SystemExit(f"{path}: the gateway has been away for {AWAY_S:g} s: {error}") from error
        time.sleep(PAUSE_S)


def play(seed: int, trajectory: str) -> dict[str, Any]:
    """Play one seat to its end and return what is reported of it."""
    drawn = random.Random(f"{seed}/{trajectory.partition('@')[0]}")  # the same for each take
    row: list[int] = []
    for _ in range(TURNS):
        row += drawn.choices(range(VOCABULARY), k=OBSERVED)
        body = {"token_ids": row, "sampling_params": {"antiphon_trajectory": trajectory}}
        row += call("/inference/v1/generate", body)["choices"][0]["token_ids"]
    return {"trajectory": trajectory, "reward": float(sum(row) % 2), "branches": [row]}


def play_episode(name: str, group: str, episode: Mapping[str, Any]) -> None:
    """Play an episode, one seat after the other, and report it as the host of that name."""
    seats = [play(episode["seed"], trajectory) for trajectory in episode["trajectories"]]
    told = {"host": name, "group": group, "episode": episode["episode"], "seats": seats}
    call("/antiphon/v1/report", told)


def main() -> None:
    """Take groups and play them for ever, as many at once as the first argument says, one without it."""
    name, held = f"small-{os.getpid()}", set[str]()

    def stay_alive() -> None:
        while True:
            time.sleep(ALIVE_S)
            call("/antiphon/v1/alive", {"host": name, "groups": sorted(held)})

    def play_groups() -> None:
        while True:
            group = call("/antiphon/v1/take", {"host": name})
            if group is None:
                continue
            held.add(group["group"])
            try:
                with ThreadPoolExecutor(len(group["episodes"])) as pool:
                    list(pool.map(partial(play_episode, name, group["group"]), group["episodes"]))
            except LostError as lost:
                print(lost, flush=True)
            held.discard(group["group"])

    threading.Thread(target=stay_alive, daemon=True).start()
    for _ in range(int((*sys.argv[1:], 1)[0]) - 1):
        threading.Thread(target=play_groups, daemon=True).start()
    play_groups()


if __name__ == "__main__":
    main()
