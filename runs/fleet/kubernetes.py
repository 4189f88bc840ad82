"""Kubernetes launcher: each worker is a StatefulSet of its own, whose `replicas` are 1 while it is wanted.

One of its own since a StatefulSet of many starts and stops its members in order, and a worker is named. The
manifests are applied once (`render` writes them); a start writes the worker's Secret and scales, a stop
scales. Pods that fail, or are moved, are the cluster's to start again. Five calls of the plain API, with a
token.
"""

import base64
import json
import math
import re
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from string import Template
from typing import Any

import aiohttp
import yaml

from antiphon.core.capacity.launcher_config import KubernetesLauncherSection
from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.runs.fleet.launcher import LaunchSite, Order

CALL_S = 20.0
"""Longest wait for an answer of the API."""
SPARE_S = 10
"""What a pod has beyond the workers' grace time, before it is killed."""
RUN_GRACE_S = 120
"""What the run's pod has to end its services in order."""
_MANIFESTS = Path(__file__).parent / "manifests"
_APPS, _CORE = "apis/apps/v1", "api/v1"


class KubernetesLauncher:
    """Pods of one class, in the namespace that its section names."""

    def __init__(self, one: PoolClass, section: KubernetesLauncherSection, site: LaunchSite) -> None:
        """Launch by the API that `section` names.

        Raises:
            ConfigError: when Kubernetes cannot have the class's name.
        """
        if not re.fullmatch("[a-z][a-z0-9]*", one.name) or one.name == "run":
            raise ConfigError(
                f"provisioning.pool {one.name}: Kubernetes names objects with a-z and 0-9; rename the class"
                + (" (run is the run's own pod)" if one.name == "run" else "")
            )
        self._class, self._section, self._site = one, section, site
        self._owner = f"antiphon/run={site.config.run.name},antiphon/class={one.name}"

    async def start(self, order: Order) -> Instance:
        """Write the worker's Secret and have one replica of its StatefulSet.

        Raises:
            ConfigError: when the StatefulSet is not there.
        """
        name = order.worker
        async with self._session() as session:
            sets, _ = await self._list(session, _APPS, "statefulsets")
            if name not in sets:
                raise ConfigError(self._absent([name]))
            files = {path.name: path.read_bytes() for path in order.bundle.iterdir() if path.is_file()}
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "labels": sets[name]["metadata"]["labels"]},
                "data": {key: base64.b64encode(content).decode() for key, content in files.items()},
            }
            applied = {"fieldManager": "antiphon", "force": "true"}
            await self._call(session, "PATCH", _CORE, f"secrets/{name}", secret, applied, "apply-patch+yaml")
            await self._scale(session, name, 1)
        return next(one for one in await self.running() if one.worker == name)

    async def running(self) -> tuple[Instance, ...]:
        async with self._session() as session:
            sets, _ = await self._list(session, _APPS, "statefulsets")
            pods, now = await self._list(session, _CORE, "pods")
            found = [
                instance(name, one, pods.get(f"{name}-0"), now)
                for name, one in sets.items()
                if one["spec"].get("replicas", 1) or f"{name}-0" in pods
            ]
            return tuple([await self._explained(session, one) for one in found])

    async def stop(self, worker: str, grace_s: float) -> None:
        """Have no replica; its pod's own grace time, in the manifest, is no shorter than the run's."""
        async with self._session() as session:
            with suppress(_AbsentError):
                await self._scale(session, worker, 0)

    async def missing(self) -> list[str]:
        async with self._session() as session:
            sets, _ = await self._list(session, _APPS, "statefulsets")
        absent = [name for name in self._class.workers if name not in sets]
        return [self._absent(absent)] if absent else []

    def render(self, order: Order) -> dict[str, str]:
        """Return what `kubectl apply -k` takes: a base with all classes of this kind, and overlays."""
        config = self._site.config
        others = {one.name for one in config.provisioning.pool if one.launcher.kind == "kubernetes"}
        shared = {
            "namespace": self._section.namespace,
            "run": config.run.name,
            "run_grace": RUN_GRACE_S,
            "port": config.services.coordinator_port,
            "class": self._class.name,
            "grace": math.ceil(config.rollout.grace_s) + SPARE_S,
            "pools": "\n".join(f"  - {name}.yaml" for name in sorted(others)),
            **self._section.model_dump(include={"image", "cpus", "memory", "gpus"}),
        }

        def filled(name: str, **more: Any) -> str:
            return Template((_MANIFESTS / name).read_text()).substitute(shared, **more)

        plain = ("run.yaml", "network.yaml", "kustomization.yaml")
        files = {f"kubernetes/base/{name}": filled(name) for name in plain}
        chosen = json.loads(config.model_dump_json(exclude_defaults=True))
        files["kubernetes/base/config.yaml"] = yaml.safe_dump(chosen, sort_keys=False)
        workers = [filled("worker.yaml", worker=name, line=line) for name, line in self._lines(order)]
        files[f"kubernetes/base/{self._class.name}.yaml"] = filled("disruption.yaml") + "".join(workers)
        for path in sorted(_MANIFESTS.glob("overlays/*/*.yaml")):
            name = str(path.relative_to(_MANIFESTS))
            files[f"kubernetes/{name}"] = filled(name)
        return files

    def _lines(self, order: Order) -> Iterator[tuple[str, str]]:
        for name in self._class.workers:
            arguments = iter(self._site.draft(name).arguments)
            # Without the run's id: manifests are there before it, and serve the next run too.
            kept = [word for word in arguments if word != "--run" or next(arguments) is None]
            given = Order(
                name, (*kept, "--ready-file", "/antiphon/work/ready.json"), order.bundle, order.environment
            )
            line = given.line(self._section.command, '"$0"', '"$1"')
            text = f"{self._section.setup}\nrm -f /antiphon/work/ready.json\n{line}".lstrip()
            yield name, json.dumps(re.sub(r"\$(?=[$(])", "$$", text))  # Kubernetes has its own $(NAME)

    def _absent(self, names: list[str]) -> str:
        return (
            f"namespace {self._section.namespace} has no StatefulSet {', '.join(names)} of {self._owner}; "
            "`antiphon fleet render CONFIG --out FOLDER` writes them, and "
            "`kubectl apply -k FOLDER/kubernetes/overlays/cpu` brings them there"
        )

    def _session(self) -> aiohttp.ClientSession:
        section = self._section
        try:
            token = Path(section.token_file).expanduser().read_text().strip()
            trusted: ssl.SSLContext | bool = True
            if section.server.startswith("https:"):
                trusted = ssl.create_default_context(cafile=Path(section.ca_file).expanduser())
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"provisioning.pool {self._class.name}: launcher.token_file and ca_file must be files that "
                f"can be read: {error}"
            ) from error
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(ssl=trusted),
            timeout=aiohttp.ClientTimeout(total=CALL_S),
        )

    async def _scale(self, session: aiohttp.ClientSession, name: str, replicas: int) -> None:
        wanted = {"spec": {"replicas": replicas}}
        await self._call(
            session, "PATCH", _APPS, f"statefulsets/{name}/scale", wanted, kind="merge-patch+json"
        )

    async def _list(
        self, session: aiohttp.ClientSession, group: str, kind: str
    ) -> tuple[dict[str, Any], datetime]:
        """Return the class's objects by name, and when that was, on the API's clock."""
        told, now = await self._call(session, "GET", group, kind, query={"labelSelector": self._owner})
        return {one["metadata"]["name"]: one for one in told["items"]}, now

    async def _explained(self, session: aiohttp.ClientSession, one: Instance) -> Instance:
        """Add why a StatefulSet makes no pod: a quota says so in an event alone."""
        if one.state != InstanceState.PENDING or one.reason:
            return one
        about = f"involvedObject.kind=StatefulSet,involvedObject.name={one.worker},type=Warning"
        told, _ = await self._call(session, "GET", _CORE, "events", query={"fieldSelector": about})
        said = sorted((event.get("lastTimestamp") or "", event["message"]) for event in told["items"])
        return Instance(one.worker, one.name, one.state, said[-1][1] if said else "its pod is not made yet")

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        group: str,
        path: str,
        body: Any = None,
        query: dict[str, str] | None = None,
        kind: str = "json",
    ) -> tuple[Any, datetime]:
        url = f"{self._section.server.rstrip('/')}/{group}/namespaces/{self._section.namespace}/{path}"
        data = None if body is None else json.dumps(body)
        typed = {"Content-Type": f"application/{kind}"}
        try:
            async with session.request(method, url, data=data, params=query, headers=typed) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"no answer within {CALL_S:g} s"
            raise UnavailableError(f"Kubernetes at {self._section.server} does not answer: {why}") from error
        try:
            told = json.loads(text)
        except ValueError:
            told = {"message": text[:300]}
        if answer.status < 300:
            return told, parsedate_to_datetime(answer.headers["Date"])
        said = (
            f"Kubernetes at {self._section.server}, {method} {path}: {answer.status}: {told.get('message')}"
        )
        if answer.status == 404 and method == "PATCH":
            raise _AbsentError(said)
        if answer.status in (401, 403, 404, 422):
            raise ConfigError(said)
        raise UnavailableError(said)


class _AbsentError(ConfigError):
    """What is to be changed is not there."""


def instance(worker: str, stateful_set: Any, pod: Any, now: datetime) -> Instance:
    """Return what the API says of a worker's StatefulSet and pod (None: there is none) as an instance."""
    name = f"pod {worker}-0"
    if pod is None:
        return Instance(worker, name, InstanceState.PENDING)
    status, wanted = pod["status"], stateful_set["spec"].get("replicas", 1)
    begun = status.get("startTime")
    up_s = max(0.0, (now - datetime.fromisoformat(begun)).total_seconds()) if begun else 0.0
    if not wanted or "deletionTimestamp" in pod["metadata"]:
        return Instance(worker, name, InstanceState.STOPPING, "", up_s)
    held = [
        f"{one['state']['waiting'].get('reason', '')}: {one['state']['waiting'].get('message', '')}"
        for one in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        if one.get("state", {}).get("waiting")
    ]
    refused = [
        f"{one.get('reason', '')}: {one.get('message', '')}"
        for one in status.get("conditions", ())
        if one["type"] == "PodScheduled" and one["status"] == "False"
    ]
    reason = next(iter([*refused, *held]), "")
    if begun is None:  # no node has it
        return Instance(
            worker, name, InstanceState.PENDING, reason or "Kubernetes has not placed its pod yet"
        )
    return Instance(worker, name, InstanceState.UP, reason, up_s)
