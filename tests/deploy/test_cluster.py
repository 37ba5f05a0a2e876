"""The Helm chart on a Kubernetes of two nodes, whose kubelets run Penstock's pods: `make cluster-test`.

Each role is a Kafka user of its own with the least rights, on a broker outside the cluster. Every run is strictly on-policy and ends in the
digest of an undisturbed run without Kubernetes.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from penstock.infra.errors import ConfigError
from penstock.pipeline import cli
from penstock.pipeline.runtime.roles import acl_rules
from tests.support.children import child
from tests.support.kubernetes import GATEWAY, IMAGES, NODES, SHARED_FOLDERS, Kubernetes, missing, wait_for
from tests.support.paths import EXAMPLES, ROOT
from tests.support.secured_broker import MECHANISM, SecuredBroker
from tests.support.value_sets import BINARIES, CHART, VALUE_SETS, rendered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif("PENSTOCK_CLUSTER_TEST" not in os.environ, reason="needs its own namespaces: make cluster-test"),
]
STEPS, GROUPS = 240, 4
SMALL = {'"../.penstock/tiny"': '"/models"', "steps = 100": f"steps = {STEPS}", "prompts_per_step = 8": f"prompts_per_step = {GROUPS}"}
CONFIG = (EXAMPLES / "exact.toml").read_text() + "\n[kafka]\nallow_loss = true\n[mlflow]\nenabled = false\n"
for old, new in {**SMALL, "samples_per_prompt = 16": "samples_per_prompt = 8"}.items():
    assert old in CONFIG
    CONFIG = CONFIG.replace(old, new)
ROLES = ("feeder", "rollout", "scorer", "trainer", "evaluator", "tracker")
SERVED_AT = "127.0.0.1:9090"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    assert missing() == [], "make cluster-binaries; and Debian's etcd-server, containerd, runc, containernetworking-plugins, prometheus"
    made = Kubernetes(tmp_path_factory.mktemp("cluster"))
    try:
        made.kubectl("apply", "--server-side", "--filename", str(BINARIES / "crds"))
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def secured(cluster: Kubernetes) -> Iterator[SecuredBroker]:
    """A broker that the pods reach by TLS."""
    (cluster.folder / "broker").mkdir()
    made = SecuredBroker(cluster.folder / "broker", host=GATEWAY)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, readable by other users."""
    return Path(
        shutil.copytree(ROOT / ".penstock" / "tiny", tmp_path_factory.mktemp("models"), copy_function=_readable, dirs_exist_ok=True)
    )


def _readable(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    os.chmod(target, 0o644)


@pytest.fixture(scope="module")
def undisturbed(secured: SecuredBroker, models: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the last weights of a run without Kubernetes."""
    config = tmp_path_factory.mktemp("plain") / "run.toml"
    config.write_text(CONFIG.replace('"/models"', f'"{models}"'))
    command = [sys.executable, "-c", "import sys; from penstock.pipeline.cli import main; sys.exit(main())", "run", str(config), "--json"]
    environment = {**os.environ, "PENSTOCK_HOME": str(secured.home)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["weights"]["digest"])


class Release:
    """One run as a release of the chart."""

    def __init__(
        self,
        cluster: Kubernetes,
        broker: SecuredBroker,
        models: Path,
        name: str,
        *,
        replicas: Mapping[str, int],
        grace_s: int = 120,
        **values: Any,
    ) -> None:
        self.cluster, self.broker, self.name = cluster, broker, name
        folders = {**SHARED_FOLDERS, "models": str(models)}
        small = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}, "startupSeconds": 1800, "graceSeconds": grace_s}
        claim = {"claim": {"size": "1Gi", "storageClass": "test"}}
        self.values: dict[str, Any] = {
            "run": {"config": CONFIG},
            "kafka": {
                "bootstrap": broker.secure,
                "security": {"security_protocol": "SASL_SSL", "sasl_mechanism": MECHANISM, "ssl_cafile": "/etc/kafka/ca.crt"},
                "caSecret": "kafka-ca",
                "userSecrets": True,
            },
            "images": dict.fromkeys(("light", "tracker", "gpu"), IMAGES[0]),
            "imagePullPolicy": "Never",
            "extraVolumes": [{"name": volume, "hostPath": {"path": path}} for volume, path in folders.items()],
            "extraVolumeMounts": [
                {"name": volume, "mountPath": "/models" if volume == "models" else path, "readOnly": True}
                for volume, path in folders.items()
            ],
            "roles": {role: {**small, "replicas": replicas.get(role, int(role != "evaluator"))} for role in ("launcher", *ROLES)},
        }
        for role in ("trainer", "tracker"):
            self.values["roles"][role] |= claim
        self._prepare()
        self.upgrade(**values)

    def _prepare(self) -> None:
        """Kafka users, their Secrets, and the disks that a storage class would make."""
        objects = [_secret("kafka-ca", "ca.crt", self.broker.certificate.read_text())]
        for role, rules in acl_rules(self.name).items():
            user, password = f"{self.name}-{role}", f"pw-{role} \"'\\$(HOME)"
            self.broker.add_user(user, password)
            self.broker.allow(user, rules)
            objects.append(_secret(user, "password", f"{password}\n"))
        for role in ("trainer", "tracker"):
            disk = self.cluster.folder / f"disk-{self.name}-{role}"
            disk.mkdir()
            disk.chmod(0o777)  # the kubelet changes no owner of a hostPath
            claim = {"namespace": "default", "name": f"state-{self.name}-{role}-0"}
            spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "test", "claimRef": claim}
            volume = {"metadata": {"name": disk.name}, "spec": {**spec, "hostPath": {"path": str(disk)}}}
            objects.append({"apiVersion": "v1", "kind": "PersistentVolume", **volume})
        self.cluster.apply(*objects)

    def upgrade(self, **values: Any) -> None:
        self.values |= values
        self.cluster.helm("upgrade", "--install", self.name, str(CHART), values=self.values)

    def pods(self, role: str | None = None) -> list[Any]:
        """Pods of workers that are not being deleted."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component{'!=launcher' if role is None else f'={role}'}"
        return self.cluster.pods(selector)

    def steps(self) -> int:
        try:
            with penstock.open(self.name, bootstrap=self.broker.plain) as run:
                return run.steps().num_rows
        except ConfigError:  # not registered yet
            return 0

    def await_steps(self, count: int) -> None:
        wait_for(lambda: self.steps() >= count, f"step {count} of {self.name}")

    def finish(self) -> str:
        """Wait for the end, audit the run, uninstall the release; returns the digest of the last weights."""

        def report() -> dict[str, Any]:
            with penstock.open(self.name, bootstrap=self.broker.plain) as run:
                return run.report()

        wait_for(lambda: report()["status"] != "running", f"the end of {self.name}")
        ended = report()
        assert (ended["status"], self.steps()) == ("finished", STEPS)
        assert cli.main(["audit", self.name, "--bootstrap", self.broker.plain]) == 0
        self.cluster.kubectl("wait", "--for=condition=Complete", "job", f"--selector=app.kubernetes.io/instance={self.name}")
        time.sleep(15)  # a worker that exited at the end of its run would be started again, more than once
        assert {pod["status"]["phase"] for pod in self.pods()} == {"Running"}
        self.restarts = sum(status["restartCount"] for pod in self.pods() for status in pod["status"]["containerStatuses"])
        self.cluster.kubectl("delete", "pvc", "--all", "--wait=false")
        command = [str(BINARIES / "helm"), "uninstall", self.name, "--wait", "--kubeconfig", str(self.cluster.folder / "kubeconfig")]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        return str(ended["weights"]["digest"])


def _secret(name: str, key: str, text: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {key: text}}


@pytest.fixture(scope="module")
def restricted(cluster: Kubernetes) -> str:
    """A namespace in which the API server warns of every pod that the strictest of Kubernetes' pod security standards forbids."""
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "restricted", "labels": labels}})
    return "restricted"


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_api_server_accepts_every_object_of_ten_sets_of_values_without_a_warning(
    cluster: Kubernetes, restricted: str, name: str
) -> None:
    strict = ("--namespace", restricted, "--server-side", "--dry-run=server", "--validate=strict", "--filename", "-")
    printed = cluster.kubectl("apply", *strict, text=rendered(VALUE_SETS[name]))
    assert len(printed.splitlines()) == len([each for each in yaml.safe_load_all(rendered(VALUE_SETS[name])) if each])


def test_a_run_whose_pods_are_deleted_one_after_another_ends_as_an_undisturbed_one(
    cluster: Kubernetes, secured: SecuredBroker, models: Path, undisturbed: str
) -> None:
    release = Release(cluster, secured, models, "deleted", replicas={"evaluator": 1, "scorer": 2})
    release.await_steps(5)
    for role in ROLES:
        cluster.kubectl("delete", "pod", release.pods(role)[0]["metadata"]["name"])
    assert release.steps() < STEPS
    assert release.finish() == undisturbed


def test_a_run_goes_on_after_the_node_of_its_trainer_is_drained(
    cluster: Kubernetes, secured: SecuredBroker, models: Path, undisturbed: str
) -> None:
    release = Release(cluster, secured, models, "drained", replicas={})
    release.await_steps(5)
    node = release.pods("trainer")[0]["spec"]["nodeName"]
    cluster.kubectl("drain", node, "--delete-emptydir-data", "--force")
    try:
        assert release.steps() < STEPS
        wait_for(lambda: {pod["spec"].get("nodeName") for pod in release.pods()} == {*NODES} - {node}, "all pods are on the other node")
        assert release.finish() == undisturbed
    finally:
        cluster.kubectl("uncordon", node)


def test_an_upgrade_replaces_every_pod_while_the_run_goes_on(
    cluster: Kubernetes, secured: SecuredBroker, models: Path, undisturbed: str
) -> None:
    release = Release(cluster, secured, models, "upgraded", replicas={"rollout": 2})
    release.await_steps(5)
    release.upgrade(images=dict.fromkeys(("light", "tracker", "gpu"), IMAGES[1]))

    def images() -> set[str]:
        return {pod["spec"]["containers"][0]["image"] for pod in release.pods()}

    wait_for(lambda: images() == {IMAGES[1]}, "every pod has the new image")
    assert release.finish() == undisturbed


def test_a_run_with_the_longest_name_a_user_of_the_cluster_and_no_time_to_stop_survives_an_image_that_does_not_exist(
    cluster: Kubernetes, secured: SecuredBroker, models: Path, undisturbed: str
) -> None:
    # OpenShift gives a namespace its user ids; their group is 0.
    user = {"runAsUser": 1000650000, "runAsGroup": 0, "fsGroup": 1000650000}
    release = Release(cluster, secured, models, "m" * 42, replicas={}, podSecurityContext=user, grace_s=1)
    release.await_steps(5)
    release.upgrade(images=dict.fromkeys(("light", "tracker", "gpu"), "localhost/penstock:missing"))

    def waiting() -> list[str]:
        statuses = [status for pod in release.pods() for status in pod["status"].get("containerStatuses", [])]
        return [status["state"].get("waiting", {}).get("reason", "") for status in statuses]

    wait_for(lambda: waiting().count("ErrImageNeverPull") == len(ROLES) - 1, "every role waits for the image")
    assert release.steps() < STEPS
    release.upgrade(images=dict.fromkeys(("light", "tracker", "gpu"), IMAGES[0]))
    assert release.finish() == undisturbed


def test_rollout_workers_follow_kedas_expression_from_one_to_four_to_two(
    cluster: Kubernetes, secured: SecuredBroker, models: Path, undisturbed: str, tmp_path: Path
) -> None:
    # Strictly on-policy, the groups of one step are in flight at most.
    scaling = {"enabled": True, "prometheus": f"http://{SERVED_AT}", "groupsPerWorker": 1}
    release = Release(cluster, secured, models, "scaled", replicas={}, autoscaling=scaling)
    release.await_steps(3)
    counts = [len(release.pods("rollout"))]
    with _prometheus(tmp_path, [f"{pod['status']['podIP']}:9100" for pod in release.pods()]):
        for groups in (GROUPS // 4, GROUPS // 2):
            release.upgrade(autoscaling={**scaling, "groupsPerWorker": groups})
            counts.append(_desired(cluster.get("scaledobject", "scaled-rollout")["spec"]))
            cluster.kubectl("scale", "deployment", "scaled-rollout", f"--replicas={counts[-1]}")
            cluster.kubectl("rollout", "status", "deployment", "scaled-rollout", "--timeout=300s")
            assert release.steps() < STEPS
    assert counts == [1, 4, 2]
    assert release.finish() == undisturbed
    assert release.restarts == 0


def _desired(scaled: Any) -> int:
    """Replicas by the rule of Kubernetes' autoscaler: the most that a value of the last half minute requires."""
    (trigger,) = scaled["triggers"]
    query = urllib.parse.urlencode({"query": f"max_over_time(({trigger['metadata']['query']})[30s:1s])"})
    url = f"{trigger['metadata']['serverAddress']}/api/v1/query?{query}"
    values: list[float] = []

    def answered() -> bool:
        with urllib.request.urlopen(url, timeout=60) as response:
            values[:] = [float(each["value"][1]) for each in json.load(response)["data"]["result"]]
        return bool(values) and values[0] > 0

    wait_for(answered, f"a value of {trigger['metadata']['query']}")
    least, most = scaled["minReplicaCount"], scaled["maxReplicaCount"]
    return max(least, min(most, math.ceil(values[0] / float(trigger["metadata"]["threshold"]))))


@contextmanager
def _prometheus(folder: Path, pods: list[str]) -> Iterator[None]:
    """A Prometheus that reads these pods: Debian's is built without the discovery by the API server."""
    job = {"job_name": "penstock", "honor_labels": True, "static_configs": [{"targets": pods}]}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={SERVED_AT}",
    ]
    with (folder / "log").open("wb") as log, child(command, stdout=log, stderr=log) as prometheus:
        wait_for(lambda: _is_served(f"http://{SERVED_AT}/-/ready") or prometheus.poll() is not None, "Prometheus is ready")
        assert prometheus.poll() is None, (folder / "log").read_text()
        time.sleep(10)  # values of several steps
        yield


def _is_served(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_a_run_goes_on_after_the_node_of_its_trainer_is_lost(
    cluster: Kubernetes, secured: SecuredBroker, models: Path, undisturbed: str
) -> None:
    release = Release(cluster, secured, models, "lost", replicas={"scorer": 2})
    release.await_steps(5)
    node = release.pods("trainer")[0]["spec"]["nodeName"]
    cluster.lose_node(node)
    try:
        wait_for(lambda: not cluster.is_ready(node), "the node counts as lost")
        cluster.kubectl("taint", "node", node, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
        wait_for(lambda: {pod["spec"].get("nodeName") for pod in release.pods()} == {*NODES} - {node}, "all pods are on the other node")
        assert release.steps() < STEPS
        assert release.finish() == undisturbed
    finally:
        cluster.kubectl("taint", "node", node, "node.kubernetes.io/out-of-service-", check=False)
        cluster.start_node(node)
