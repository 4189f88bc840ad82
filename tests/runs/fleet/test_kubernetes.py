"""Workers as pods: manifests that are valid and say what is meant, executed behind the calls of the API."""

import importlib.util
import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from antiphon.benchmarks.parts.fleets.kubernetes_runner import TOKEN, KubernetesRunner, kubernetes_runner
from antiphon.core.capacity.order_book import InstanceState
from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.runs.fleet.kubernetes import KubernetesLauncher, instance
from antiphon.runs.fleet.launcher import LaunchSite, Order
from tests.support.light_fleet import SECRET, alive, command, in_loop, make_bundle, told, until

ROOT = Path(__file__).parents[3]
SHOWN = ROOT / "containers"
VERSIONS = ("1.29", "1.31", "1.34", "1.37")
OVERLAYS = ("cpu", "nvidia", "spot")


def launcher_of(
    folder: Path, url: str = "http://127.0.0.1:1", **changes: Any
) -> tuple[KubernetesLauncher, LaunchSite]:
    config = load_config(SHOWN / "kubernetes.yaml", [])
    (one,) = config.provisioning.pool
    (folder / "token").write_text(TOKEN + "\n")
    given = {"server": url, "token_file": str(folder / "token"), **changes}
    one = one.model_copy(update={"launcher": one.launcher.model_copy(update=given)})
    site = LaunchSite("sums-1", "sums-1-abcd", "run.antiphon.svc:7000", folder / "keys", config)
    return KubernetesLauncher(one, one.launcher, site), site  # type: ignore[arg-type]


def documents(files: dict[str, str]) -> list[dict[str, Any]]:
    return [one for text in files.values() for one in yaml.safe_load_all(text) if "metadata" in (one or {})]


class Pods:
    """The manifests of the repository with a light worker, executed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, folder / "keys"
        self.environment = {"LIGHT_FLEET": str(folder)}
        self.launcher, self.site = launcher_of(folder, command=command())
        self.manifests = documents(self.launcher.render(self.order("spot-0")))

    def at(self, runner: KubernetesRunner) -> None:
        self.launcher, self.site = launcher_of(self.folder, runner.url, command=command())

    def order(self, worker: str) -> Order:
        if not (self.keys / worker).exists():
            make_bundle(self.keys / worker)
        return Order(worker, self.site.draft(worker).arguments, self.keys / worker, self.environment)

    async def none(self) -> bool:
        return await self.launcher.running() == ()


@in_loop
async def test_a_start_is_one_pod_with_its_own_bundle_and_a_stop_ends_it_within_its_grace(
    tmp_path: Path,
) -> None:
    pods = Pods(tmp_path)
    async with kubernetes_runner(tmp_path / "node", pods.manifests) as runner:
        pods.at(runner)
        assert await pods.launcher.missing() == []
        assert await pods.launcher.running() == ()
        await pods.launcher.start(pods.order("spot-1"))  # alone: each ordinal is started by itself
        (says,) = await until(lambda: told(tmp_path, "spot-1"))
        assert told(tmp_path, "spot-0") == []
        assert set(says["modes"].values()) == {"0o600"} and len(says["modes"]) == 4
        assert "run.antiphon.svc:7000" in says["given"] and SECRET not in " ".join(says["given"])
        await until(lambda: runner.pods["spot-1-0"].ready)  # once its ready file is there

        # Of another process: nothing is started twice, and what is there is taken up.
        pods.at(runner)
        again = await pods.launcher.start(pods.order("spot-1"))
        assert (again.worker, again.name, again.state) == ("spot-1", "pod spot-1-0", InstanceState.UP)
        assert len(told(tmp_path, "spot-1")) == 1

        # A process that ends is the cluster's to start again.
        os.kill(says["pid"], 9)
        (_, second) = await until(lambda: len(told(tmp_path, "spot-1")) == 2 and told(tmp_path, "spot-1"))
        await pods.launcher.stop("spot-1", 20.0)
        await until(pods.none)
        assert not alive(second["pid"])
        await pods.launcher.stop("spot-1", 20.0)
        await pods.launcher.stop("spot-9", 20.0)  # there is none


@in_loop
async def test_what_waits_says_why_in_the_words_of_the_api(tmp_path: Path) -> None:
    pods = Pods(tmp_path)
    async with kubernetes_runner(tmp_path / "node", pods.manifests, pods=1) as runner:
        pods.at(runner)
        runner.schedules = False
        await pods.launcher.start(pods.order("spot-0"))
        await until(lambda: runner.pods)
        await pods.launcher.start(pods.order("spot-1"))
        await until(lambda: runner.events)
        first, second = await pods.launcher.running()
        assert {first.state, second.state} == {InstanceState.PENDING}
        assert first.reason == "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu."
        assert "exceeded quota" in second.reason
        for worker in ("spot-0", "spot-1"):
            await pods.launcher.stop(worker, 20.0)
        await until(pods.none)


@in_loop
async def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path) -> None:
    pods = Pods(tmp_path)
    async with kubernetes_runner(tmp_path / "node", []) as runner:
        pods.at(runner)
        (sentence,) = await pods.launcher.missing()
        assert "no StatefulSet spot-0, spot-1" in sentence and "kubectl apply -k" in sentence
        with pytest.raises(ConfigError, match="no StatefulSet spot-0"):
            await pods.launcher.start(pods.order("spot-0"))
        (tmp_path / "token").write_text("another")
        with pytest.raises(ConfigError, match="401: Unauthorized"):
            await pods.launcher.running()
        (tmp_path / "token").unlink()
        with pytest.raises(ConfigError, match=r"spot: launcher\.token_file"):
            await pods.launcher.running()
    with pytest.raises(UnavailableError, match=r"Kubernetes at http://127\.0\.0\.1:1 does not answer"):
        await launcher_of(tmp_path)[0].running()
    with pytest.raises(ConfigError, match="rename the class"):
        one = load_config(SHOWN / "kubernetes.yaml", []).provisioning.pool[0]
        site = LaunchSite("sums-1", "sums-1-abcd", "run:7000", None, RunConfig())
        KubernetesLauncher(one.model_copy(update={"name": "Spot_A"}), one.launcher, site)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pod", "state", "reason"),
    [
        (None, InstanceState.PENDING, ""),
        ({"metadata": {}, "status": {}}, InstanceState.PENDING, "Kubernetes has not placed its pod yet"),
        (
            {
                "metadata": {},
                "status": {
                    "startTime": "2026-11-28T09:00:00Z",
                    "containerStatuses": [
                        {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
                    ],
                },
            },
            InstanceState.UP,
            "ErrImagePull: no such image",
        ),
        (
            {"metadata": {"deletionTimestamp": "x"}, "status": {"startTime": "2026-11-28T09:00:00Z"}},
            InstanceState.STOPPING,
            "",
        ),
    ],
)
def test_a_pod_is_read_as_the_port_has_it(pod: Any, state: InstanceState, reason: str) -> None:
    found = instance("spot-0", {"spec": {"replicas": 1}}, pod, datetime(2026, 11, 28, 10, tzinfo=UTC))
    assert (found.state, found.reason) == (state, reason)
    assert found.up_s == (3600.0 if pod and "startTime" in pod["status"] else 0.0)


def test_the_manifests_shown_are_the_generated_ones(tmp_path: Path) -> None:
    config = load_config(SHOWN / "kubernetes.yaml", [])
    (one,) = config.provisioning.pool
    site = LaunchSite("RUN", "RUN-0", "run.antiphon.svc:7000", None, config)
    files = KubernetesLauncher(one, one.launcher, site).render(site.draft("spot-0"))  # type: ignore[arg-type]
    again = "antiphon fleet render containers/kubernetes.yaml --out containers"
    for name, text in files.items():
        assert (SHOWN / name).read_text() == text, f"{name} differs: {again}"
    (tmp_path / "config.yaml").write_text(files["kubernetes/base/config.yaml"])
    assert load_config(tmp_path / "config.yaml", []) == config
    assert not any(one["kind"] == "Secret" for one in documents(files))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_built_overlays_are_those_of_kustomize(overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, whose kustomize builds overlays")
    folder = SHOWN / "kubernetes" / "overlays" / overlay
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    again = f"kubectl kustomize {folder} > containers/kubernetes/built/{overlay}.yaml"
    assert (SHOWN / "kubernetes" / "built" / f"{overlay}.yaml").read_text() == built.stdout, again


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_built_overlays_are_valid_in_four_versions(overlay: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        if os.environ.get("ANTIPHON_CI") == "1":
            pytest.fail("needs kubernetes-validate: requirements/fleet.lock")
        pytest.skip("needs kubernetes-validate")
    import kubernetes_validate

    found = list(yaml.safe_load_all((SHOWN / "kubernetes" / "built" / f"{overlay}.yaml").read_text()))
    for version in VERSIONS:
        for document in found:
            kubernetes_validate.validate(document, version, strict=True)
    (worker,) = [one for one in found if one["metadata"]["name"] == "spot-0"]
    worker["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worker, VERSIONS[0], strict=True)


def test_pods_are_probed_guarded_and_given_time_as_the_run_has_it() -> None:
    config = load_config(SHOWN / "kubernetes.yaml", [])
    found = list(yaml.safe_load_all((SHOWN / "kubernetes" / "built" / "cpu.yaml").read_text()))
    workers = [one for one in found if one["metadata"].get("labels", {}).get("antiphon/role") == "worker"]
    assert [one["metadata"]["name"] for one in workers] == config.provisioning.pool[0].workers
    for one in workers:
        spec = one["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] >= config.rollout.grace_s
        assert spec["automountServiceAccountToken"] is False
        assert spec["volumes"][0] == {"name": "secret", "secret": {"secretName": one["metadata"]["name"]}}
        (container,) = spec["containers"]
        assert "secret" not in [mount["name"] for mount in container["volumeMounts"]]
    kinds = {one["kind"] for one in found}
    assert {"PodDisruptionBudget", "NetworkPolicy", "Role", "Service", "ConfigMap"} <= kinds
    (policy,) = [x for x in found if x["kind"] == "NetworkPolicy" and x["metadata"]["name"] == "workers"]
    assert "Ingress" in policy["spec"]["policyTypes"] and "ingress" not in policy["spec"]


def test_the_guide_shows_the_file_of_the_repository() -> None:
    page = (ROOT / "docs" / "guides" / "fleet-kubernetes.md").read_text()
    shown = page.partition("```yaml\n")[2].partition("```")[0]
    assert (SHOWN / "kubernetes.yaml").read_text().endswith(shown)
