"""Ray driver: the process that speaks with a Ray cluster for a launcher, and the actor that holds a worker.

It is a process of its own since Ray ends one whose cluster is lost, and has signal handlers and threads. A
line of JSON on standard input is a request, one on standard output its answer; it ends with its input. The
actor's class is that of this main module, which Ray therefore sends by value: Ray's own Python on the nodes
needs no `antiphon`, and what the actor calls comes from the standard library.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

ANSWER_S = 5.0
"""Longest wait for an actor: it is there by then, or waits for a place."""
TRIES, AGAIN_S = 10, 0.5
"""How often, and after how many seconds, an actor is asked for again that was just ending."""
UNTOLD_S = 60.0
"""After this an actor ends that was never told what to hold: who ordered it is gone."""


class Holder:
    """One worker's process on a node of the cluster: it ends with this actor, and this actor with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._since_s, self._stopping = time.monotonic(), False
        threading.Thread(target=self._end_untold, daemon=True).start()

    def hold(self, line: str, bundle: dict[str, bytes]) -> dict[str, Any]:
        """Start the worker unless it was: a line of shell whose $0 is its bundle and $1 a work folder."""
        if self._process is None:
            # Named and locked as `keep_temporary_files` has it, which later removes what a kill leaves.
            folder = Path(tempfile.mkdtemp(prefix=f"antiphon-{os.getuid()}-"))
            held = os.open(folder, os.O_RDONLY)
            fcntl.flock(held, fcntl.LOCK_EX)
            (folder / "bundle").mkdir(mode=0o700)
            (folder / "work").mkdir()
            for name, content in bundle.items():
                with open(os.open(folder / "bundle" / name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    file.write(content)
            tie = ctypes.CDLL(None).prctl
            self._since_s = time.monotonic()
            self._process = subprocess.Popen(
                ["sh", "-c", line, str(folder / "bundle"), str(folder / "work")],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[held],
                preexec_fn=lambda: tie(1, signal.SIGTERM),  # when this thread ends, that of all calls
            )
            threading.Thread(target=self._end_with, args=(self._process, folder), daemon=True).start()
        return self.look()

    def look(self) -> dict[str, Any]:
        """Return what there is: pid (None before `hold`), node, seconds up, whether it was asked to stop."""
        pid = None if self._process is None else self._process.pid
        up_s = time.monotonic() - self._since_s
        return {"pid": pid, "node": os.uname().nodename, "up_s": up_s, "stopping": self._stopping}

    def stop(self, grace_s: float) -> None:
        """Ask the worker to leave, and kill it and its group `grace_s` seconds later."""
        if self._process is None:
            os._exit(0)
        self._stopping = True
        self._signal(self._process, signal.SIGTERM)
        later = threading.Timer(grace_s, self._signal, (self._process, signal.SIGKILL))
        later.daemon = True
        later.start()

    def _end_untold(self) -> None:
        time.sleep(UNTOLD_S)
        if self._process is None:
            os._exit(0)

    def _end_with(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        process.wait()
        self._signal(process, signal.SIGKILL)  # what it left of its group
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # from a thread, since no call need ever come

    @staticmethod
    def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _connect(address: str, namespace: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():  # Ray itself tries for minutes
        socket.create_connection((host, int(port)), ANSWER_S).close()
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")


def _start(worker: str, options: dict[str, Any], line: str, bundle: str) -> dict[str, Any]:
    files = {path.name: path.read_bytes() for path in Path(bundle).iterdir() if path.is_file()}
    actor = ray.remote(Holder).options(
        name=worker, lifetime="detached", get_if_exists=True, max_restarts=0, max_task_retries=0, **options
    )
    # An argument of a call goes from this process to the actor's: Ray keeps only those of a constructor.
    for _ in range(TRIES):
        told = _told(worker, actor.remote().hold.remote(line, files))
        if not told.get("gone"):
            return told
        time.sleep(AGAIN_S)
    raise RuntimeError(f"the actor that held {worker} before is still ending")


def _told(worker: str, answer: Any, wait_s: float = ANSWER_S) -> dict[str, Any]:
    try:
        ready, _ = ray.wait([answer], timeout=wait_s)
        return {"worker": worker} | (ray.get(answer) if ready else {"pid": None, "waits": _waits(worker)})
    except ray.exceptions.RayActorError:
        return {"worker": worker, "gone": True}


def _waits(worker: str) -> str:
    """Say what an actor that does not answer waits for, as far as Ray tells."""
    free, names = ray.available_resources(), ray.cluster_resources()
    free = {name: free.get(name, 0.0) for name in names if ":" not in name and "memory" not in name}
    return f"Ray has not placed {worker} yet; free in its cluster: {free}"


def _list(workers: list[str]) -> list[dict[str, Any]]:
    known, asked = set(workers), {}
    for name in ray.util.list_named_actors():
        with contextlib.suppress(ValueError):  # gone in between
            if name in known:
                asked[name] = ray.get_actor(name).look.remote()
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
    told = [_told(worker, answer, 0.0) for worker, answer in asked.items()]
    return [one for one in told if not one.get("gone")]


def _stop(worker: str, grace_s: float) -> None:
    try:
        actor = ray.get_actor(worker)
    except ValueError:
        return
    asked = actor.stop.remote(grace_s)
    with contextlib.suppress(ray.exceptions.RayActorError):  # it held nothing, or has ended
        if ray.wait([asked], timeout=ANSWER_S)[0]:
            ray.get(asked)
        else:  # it waits for a place, or its node does not answer
            ray.kill(actor, no_restart=True)


def _lacking(needs: dict[str, float]) -> str:
    """Return "" where some node has, free or not, what a worker needs, else what the nodes have."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0.0) >= needed for name, needed in needs.items()) for node in nodes):
        return ""
    return str([{name: has for name, has in node.items() if ":" not in name} for node in nodes])


_CALLS: dict[str, Callable[..., Any]] = {
    "connect": _connect,
    "start": _start,
    "list": _list,
    "stop": _stop,
    "lacking": _lacking,
}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"id": request["id"], "result": _CALLS[request["call"]](*request["arguments"])}
    except Exception as error:  # noqa: BLE001 - handed on to who asked, in Ray's words
        return {"id": request["id"], "error": f"{type(error).__name__}: {str(error).strip()}"}


def main() -> None:
    """Answer requests, several at a time, until the input ends."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    writing = threading.Lock()

    def serve(request: dict[str, Any]) -> bool:
        answer = _answer(request)
        with writing:
            print(json.dumps(answer), file=output, flush=True)
        return "error" not in answer

    pool = ThreadPoolExecutor(16)
    for line in sys.stdin:
        request = json.loads(line)
        if request["call"] != "connect":
            pool.submit(serve, request)
        elif not serve(request):
            break
    os._exit(0)  # calls under way have nobody to answer


if __name__ == "__main__":
    main()
