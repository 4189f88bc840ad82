"""A stand-in of Kubernetes: the five calls that a launcher makes, and Pod templates executed as processes.

What is executed is what the manifests say: init containers in order, command, environment, files of Secrets,
ConfigMaps and emptyDirs, readiness probes of the kind exec, SIGTERM and the pod's own grace time. Containers
see the machine's files; a mounted path becomes a folder of the pod wherever a command names it.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

LOOK_S = 0.05
"""Pause between two looks at processes and probes."""
TOKEN = "token-of-the-run"
START_S, END_S = 10.0, 60.0
"""Longest wait for the stand-in to listen, and for its pods to end."""


class KubernetesRunner:
    """One namespace of a cluster whose only node is this machine."""

    def __init__(self, folder: Path, documents: list[dict[str, Any]], pods: int = 100) -> None:
        """Take manifests, of which no more than `pods` pods may be there (a quota)."""
        self.url, self.quota, self.pods = "", pods, dict[str, _Pod]()
        self.schedules = True
        """Whether a node has room."""
        self.objects = {(one["kind"], one["metadata"]["name"]): one for one in documents}
        self.events: list[dict[str, Any]] = []
        self._folder = folder

    def apply(self, folder: Path) -> None:
        """Take manifests as files, as `kubectl apply` does."""
        for path in folder.rglob("*.yaml"):
            for one in yaml.safe_load_all(path.read_text()):
                if "metadata" in (one or {}):
                    self.objects[one["kind"], one["metadata"]["name"]] = one

    def start_of(self, name: str) -> None:
        """Make the pod of a StatefulSet, as its controller does."""
        if len(self.pods) >= self.quota:
            said = (
                f"create Pod {name}-0 in StatefulSet {name} failed error: pods is forbidden: exceeded quota"
            )
            if said not in [one["message"] for one in self.events]:
                about = {"kind": "StatefulSet", "name": name}
                self.events.append({"involvedObject": about, "message": said, "type": "Warning"})
            return
        template = self.objects["StatefulSet", name]["spec"]["template"]
        self.pods[f"{name}-0"] = _Pod(f"{name}-0", template, self)

    async def control(self) -> None:
        """Have the pods that StatefulSets want, until cancelled."""
        while True:
            for (kind, name), one in self.objects.items():
                if (
                    kind != "StatefulSet"
                    or one["metadata"].get("labels", {}).get("antiphon/role") != "worker"
                ):
                    continue
                pod = self.pods.get(f"{name}-0")
                if one["spec"]["replicas"] and pod is None:
                    self.start_of(name)
                elif not one["spec"]["replicas"] and pod is not None:
                    pod.delete()
            self.pods = {name: pod for name, pod in self.pods.items() if not pod.task.done()}
            await asyncio.sleep(LOOK_S)

    def volume(self, folder: Path, spec: dict[str, Any]) -> None:
        """Fill a pod's folder with what a volume holds."""
        folder.mkdir(parents=True)
        files: dict[str, bytes] = {}
        if "secret" in spec:
            data = self.objects["Secret", spec["secret"]["secretName"]]["data"]
            files = {name: base64.b64decode(content) for name, content in data.items()}
        elif "configMap" in spec:
            data = self.objects["ConfigMap", spec["configMap"]["name"]]["data"]
            files = {name: content.encode() for name, content in data.items()}
        for name, content in files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o440)  # what an fsGroup makes of a Secret's file

    def folder_of(self, pod: str) -> Path:
        """Return an empty folder of a pod."""
        folder = self._folder / pod
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one call as the API does."""
        code, told = self._answer(request, await request.text())
        return web.json_response(
            told, status=code, headers={"Date": format_datetime(datetime.now(UTC), True)}
        )

    def _answer(self, request: web.Request, text: str) -> tuple[int, dict[str, Any]]:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"message": "Unauthorized"}
        kind, _, rest = request.match_info["path"].partition("/")
        if request.method == "GET":
            return 200, {"items": self._list(kind, request.query)}
        body, name = json.loads(text), rest.partition("/")[0]
        if kind == "secrets":
            self.objects["Secret", name] = body
        elif ("StatefulSet", name) not in self.objects:
            return 404, {"message": f'statefulsets.apps "{name}" not found'}
        else:
            self.objects["StatefulSet", name]["spec"] |= body["spec"]
        return 200, body

    def _list(self, kind: str, query: Any) -> list[dict[str, Any]]:
        if kind == "events":
            about = dict(one.split("=") for one in query["fieldSelector"].split(","))
            return [x for x in self.events if x["involvedObject"]["name"] == about["involvedObject.name"]]
        labels = dict(one.split("=") for one in query["labelSelector"].split(","))
        sets = [one for (its, _), one in self.objects.items() if its == "StatefulSet"]
        found = sets if kind == "statefulsets" else [pod.document() for pod in self.pods.values()]
        return [one for one in found if labels.items() <= one["metadata"].get("labels", {}).items()]


class _Pod:
    """A Pod template that is executed."""

    def __init__(self, name: str, template: dict[str, Any], runner: KubernetesRunner) -> None:
        self._name, self._template, self._runner = name, template, runner
        self._folder = runner.folder_of(name)
        self._begun, self._deleted, self.ready = "", asyncio.Event(), False
        self.task = asyncio.create_task(self._live())

    def delete(self) -> None:
        """Ask it to end."""
        self._deleted.set()

    def document(self) -> dict[str, Any]:
        """Return it as the API does."""
        metadata: dict[str, Any] = {"name": self._name, "labels": self._template["metadata"]["labels"]}
        if self._deleted.is_set():
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        if self._begun:
            statuses = [{"name": "worker", "ready": self.ready, "state": {"running": {}}}]
            status = {"phase": "Running", "startTime": self._begun, "containerStatuses": statuses}
        else:
            said = {"reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient cpu."}
            status = {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", **said}],
            }
        return {"metadata": metadata, "status": status}

    async def _live(self) -> None:
        spec = self._template["spec"]
        while not self._runner.schedules:
            if self._deleted.is_set():
                return
            await asyncio.sleep(LOOK_S)
        self._begun = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for volume in spec["volumes"]:
            self._runner.volume(self._folder / volume["name"], volume)
        for container in spec.get("initContainers", ()):
            assert await asyncio.to_thread(self._started(container).wait, 30) == 0, container["command"]
        (container,) = spec["containers"]
        process = self._started(container)
        while not self._deleted.is_set():
            if process.poll() is not None:
                await asyncio.sleep(10 * LOOK_S)
                process = self._started(container)  # restartPolicy: Always
            probe = container["readinessProbe"]["exec"]["command"]
            self.ready = subprocess.run(self._words(container, probe), check=False).returncode == 0
            await asyncio.sleep(LOOK_S)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, spec["terminationGracePeriodSeconds"])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(self._folder)

    def _started(self, container: dict[str, Any]) -> "subprocess.Popen[bytes]":
        variables = {one["name"]: one["value"] for one in container.get("env", ())}
        words = self._words(container, container["command"])
        return subprocess.Popen(words, env=os.environ | variables, start_new_session=True)

    def _words(self, container: dict[str, Any], command: list[str]) -> list[str]:
        """Return a command with Kubernetes' escapes undone and its own folders for what it mounts."""
        places = {one["mountPath"]: str(self._folder / one["name"]) for one in container["volumeMounts"]}
        mounted = re.compile(rf"(?<![\w/.-])({'|'.join(map(re.escape, places))})(?![\w.-])")
        return [mounted.sub(lambda found: places[found[1]], word.replace("$$", "$")) for word in command]


@asynccontextmanager
async def kubernetes_runner(
    folder: Path, documents: list[dict[str, Any]], pods: int = 100
) -> AsyncIterator[KubernetesRunner]:
    """Serve the API at a port of loopback, and end all pods at the end."""
    runner = KubernetesRunner(folder, documents, pods)
    app = web.Application()
    app.router.add_route("*", "/{api:apis?}/{group:.*}/namespaces/antiphon/{path:.*}", runner.answer)
    serving = web.AppRunner(app)
    await serving.setup()
    site = web.TCPSite(serving, "127.0.0.1", 0)
    await site.start()
    runner.url = f"http://127.0.0.1:{serving.addresses[0][1]}"
    control = asyncio.create_task(runner.control())
    try:
        yield runner
    finally:
        control.cancel()
        for pod in runner.pods.values():
            pod.delete()
        await asyncio.gather(*(pod.task for pod in runner.pods.values()))
        await serving.cleanup()


@contextmanager
def kubernetes_in_thread(folder: Path) -> Iterator[KubernetesRunner]:
    """Do what `kubernetes_runner` does in a thread of its own, without manifests."""
    loop, made = asyncio.new_event_loop(), list[KubernetesRunner]()
    there, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with kubernetes_runner(folder, []) as runner:
            made.append(runner)
            there.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    there.wait(START_S)
    try:
        yield made[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(END_S)
        loop.close()
