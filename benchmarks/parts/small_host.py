"""Small host: plays a game of tokens by the gateway's HTTP alone.

It finds the gateway in ANTIPHON_GATEWAY and ANTIPHON_TOKEN. Each seat is told tokens of its problem's number
and answers, `TURNS` times; the more even tokens its last turn has, the more it earns. Whoever begins an
episode again says the same.
"""

import json
import math
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

TURNS = 4
NAME = f"small-{os.getpid()}"
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


def observed(index: int, turn: int) -> list[int]:
    """Return what a seat is told before a turn."""
    return [4 + turn, 5 + index % 7]


def reward(turn: Sequence[int]) -> float:
    """Return what a seat earns whose last turn this is."""
    return sum(token % 2 == 0 for token in turn) / len(turn)


def play(index: int, trajectory: str) -> dict[str, Any]:
    """Play one seat to its end and return what is reported of it."""
    row: list[int] = []
    for turn in range(TURNS):
        row += observed(index, turn)
        body = {"token_ids": row, "sampling_params": {"antiphon_trajectory": trajectory}}
        said = call("/inference/v1/generate", body)["choices"][0]["token_ids"]
        row += said
    return {"trajectory": trajectory, "reward": reward(said), "branches": [row]}


def play_episode(name: str, group: Mapping[str, Any], episode: Mapping[str, Any]) -> None:
    """Play an episode, one seat after the other, and report it as the host of that name."""
    seats = [play(group["index"], trajectory) for trajectory in episode["trajectories"]]
    told = {"host": name, "group": group["group"], "episode": episode["episode"], "seats": seats}
    if not (said := call("/antiphon/v1/report", told))["accepted"]:
        print(said["reason"], flush=True)


def main(groups: float = math.inf, places: int = 1) -> None:
    """Play a number of groups at each of some places, all at once; at each one after the other."""
    held, over = set[str](), threading.Event()

    def stay_alive() -> None:
        while not over.wait(ALIVE_S):
            call("/antiphon/v1/alive", {"host": NAME, "groups": sorted(held)})

    def play_groups() -> None:
        left = groups
        while left > 0:
            group = call("/antiphon/v1/take", {"host": NAME})
            if group is None:
                continue
            left -= 1
            held.add(group["group"])
            try:
                with ThreadPoolExecutor(len(group["episodes"])) as pool:
                    list(pool.map(partial(play_episode, NAME, group), group["episodes"]))
            except LostError as lost:
                print(lost, flush=True)
            held.discard(group["group"])

    threading.Thread(target=stay_alive, daemon=True).start()
    for _ in range(places - 1):
        threading.Thread(target=play_groups, daemon=True).start()
    play_groups()
    over.set()


if __name__ == "__main__":
    main(places=int(sys.argv[1]) if sys.argv[1:] else 1)
