"""The Helm chart without a cluster: what it makes of values, and which values it refuses."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.pipeline.config.security import PASSWORDS
from penstock.pipeline.runtime.main import parsed
from penstock.pipeline.runtime.roles import ROLES, acl_rules
from tests.support.paths import ROOT
from tests.support.value_sets import BINARIES, CHART, CONFIG, HELM, STRIMZI, VALUE_SETS, helm, rendered

pytestmark = pytest.mark.costly
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed: make cluster-binaries")


def objects(values: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    made = [each for each in yaml.load_all(rendered(values), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def pods(values: Mapping[str, Any]) -> dict[str, Any]:
    """The pod template of each role."""
    templates = [each["spec"]["template"] for each in objects(values).values() if "template" in each.get("spec", {})]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in templates}


def job_of(made: Mapping[tuple[str, str], Any]) -> str:
    (name,) = [name for kind, name in made if kind == "Job"]
    return name


def variables(pod: Mapping[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in pod["spec"]["containers"][0]["env"]}


@needs_helm
@pytest.mark.parametrize("name", VALUE_SETS)
def test_ten_sets_of_values_pass_helms_checks(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), values=VALUE_SETS[name])
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "run.config is empty"),
        ({"run": {"id": "Math"}}, "run.id|/run/id"),
        ({"runs": {}}, "runs"),
        ({"roles": {"trainer": {"replicas": 2}}}, "trainer"),
        ({"roles": {"rollout": {"replicas": -1}}}, "rollout"),
        ({"roles": {"scorer": {"replica": 2}}}, "replica"),
        ({"roles": {"critic": {}}}, "critic"),
        ({"roles": {"rollout": {"claim": {"size": "1Gi"}}}}, "rollout"),
        ({"roles": {"trainer": {"claim": {"size": "many"}}}}, "size"),
        ({"kafka": {"bootstrap": "broker"}}, "bootstrap"),
        *(({"kafka": {"security": {name: "secret"}}}, f"kafka.security.{name}") for name in PASSWORDS),
        ({"run": {**CONFIG["run"], "files": {"run.toml": ""}}}, "files"),
        ({"run": {**CONFIG["run"], "files": {"code/rewards.py": ""}}}, "files"),
        ({"run": {**CONFIG["run"], "id": "latest"}}, "latest"),
        ({"roles": {"scorer": {"annotations": {"sidecar.istio.io/inject": False}}}}, "annotations"),
        ({"healthPort": 0}, "healthPort"),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_its_name(values: Mapping[str, Any], named: str) -> None:
    done = helm("template", "math", str(CHART), values=values if not values else {**CONFIG, **values})
    assert done.returncode != 0
    assert any(part in done.stderr for part in named.split("|")), done.stderr


@needs_helm
@pytest.mark.parametrize("name", ["math.2", "20261127", "m" * 43])
def test_the_name_of_a_release_is_refused_if_the_names_of_its_objects_would_be(name: str) -> None:
    done = helm("template", name, str(CHART), values=CONFIG)
    assert (done.returncode != 0, f'the release\'s name is "{name}" (expected at most 42' in done.stderr) == (True, True)
    assert "StatefulSet" in rendered(CONFIG, name="m" * 42)


@needs_helm
def test_texts_and_names_reach_the_objects_as_they_are_whatever_yaml_makes_of_them() -> None:
    text = 'a = "\'" # {{ .Values }}\n\tb: [%s]\\n \u2028é\n\n  \n'
    secrets = {"caSecret": "1e3", "userSecrets": True}
    trainer = {"claim": {"size": "1", "storageClass": "true"}, "serviceAccountName": "null", "annotations": {"note": text}}
    values = {
        "run": {"config": text, "files": {"1": text, "true": text, "rewards.py": text}, "keySecret": "0x1"},
        "kafka": {"bootstrap": "[2001:db8::1]:19092", **secrets},
        "model": {"claim": "0123"},
        "queue": "1.5",
        "roles": {"trainer": trainer, "scorer": {"securitySecret": "2026", "env": [{"name": "NOTE", "value": text}]}},
    }
    made, pod = objects(values), pods(values)["trainer"]
    assert made["ConfigMap", "math"]["data"] == {"run.toml": text, "1": text, "true": text, "rewards.py": text}
    claim = made["StatefulSet", "math-trainer"]["spec"]["volumeClaimTemplates"][0]["spec"]
    assert (claim["storageClassName"], made["Job", job_of(made)]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]) == ("true", "1.5")
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    named = [volumes["kafka-ca"]["secret"]["secretName"], volumes["run-key"]["secret"]["secretName"]]
    assert [*named, volumes["model"]["persistentVolumeClaim"]["claimName"], pod["spec"]["serviceAccountName"]] == [
        "1e3",
        "0x1",
        "0123",
        "null",
    ]
    assert (pod["metadata"]["annotations"]["note"], variables(pods(values)["scorer"])["NOTE"]) == (text, text)
    assert variables(pods(values)["scorer"])["PENSTOCK_SECURITY"] == {"secretKeyRef": {"name": "2026", "key": "security"}}
    ports = made["NetworkPolicy", "math-trainer"]["spec"]["egress"][1]["ports"]
    assert [each["port"] for each in ports] == [19092, 9092, 9093]


@needs_helm
def test_a_role_that_the_table_of_roles_has_is_a_role_of_the_chart_and_its_command_line_is_accepted() -> None:
    replicas = {role: {"replicas": 1} for role in ROLES}
    made = pods({**VALUE_SETS["agents"], "roles": replicas})
    assert set(made) == {*ROLES, "launcher"}
    for role in ROLES:
        command, *arguments = made[role]["spec"]["containers"][0]["args"]
        assert (command, parsed(arguments, prog="penstock worker").role) == ("worker", role)


@needs_helm
@pytest.mark.parametrize("name", ["agents", "openshift"])
def test_no_pod_may_change_its_image_or_gain_rights(name: str) -> None:
    for role, pod in pods(VALUE_SETS[name]).items():
        (container,) = pod["spec"]["containers"]
        expected = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert (container["name"], container["securityContext"]) == (role, expected)
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and pod["spec"]["securityContext"]["seccompProfile"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"/var/lib/penstock", "/tmp", "/dev/shm"}


@needs_helm
def test_each_role_has_its_own_kafka_user_and_only_a_secret_holds_a_password() -> None:
    made = pods({**CONFIG, "kafka": STRIMZI})
    for role, pod in made.items():
        given = variables(pod)
        settings = json.loads(given["PENSTOCK_SECURITY"])
        assert given["PENSTOCK_PASSWORD"] == {"secretKeyRef": {"name": f"math-{role}", "key": "password"}}
        assert settings.pop("sasl_plain_username") == f"math-{role}"
        assert settings == STRIMZI["security"]
    assert variables(pods(VALUE_SETS["secrets"])["trainer"])["PENSTOCK_SECURITY"] == {
        "secretKeyRef": {"name": "run-trainer", "key": "security"}
    }


@needs_helm
def test_the_job_that_registers_the_run_is_a_new_one_if_its_pod_changes_and_the_same_otherwise() -> None:
    other = {**CONFIG, "images": {"light": "penstock:next"}}
    same = {**CONFIG, "roles": {"rollout": {"replicas": 5}}}
    assert job_of(objects(CONFIG)) == job_of(objects(same)) != job_of(objects(other))


@needs_helm
def test_an_autoscaled_deployment_leaves_its_number_of_pods_to_keda() -> None:
    made = objects(VALUE_SETS["autoscaling"])
    assert "replicas" not in made["Deployment", "math-rollout"]["spec"]
    assert made["ScaledObject", "math-rollout"]["spec"]["scaleTargetRef"]["name"] == "math-rollout"


def users_of(run: str) -> str:
    """Strimzi's objects for the users of a run, as JSON."""
    acls = [sys.executable, "-c", "import sys; from penstock.pipeline.cli import main; sys.exit(main())", "topics", "acls", run, "--json"]
    rights = subprocess.run(acls, cwd=ROOT, capture_output=True, check=True, timeout=180).stdout
    script = [sys.executable, str(ROOT / "deploy/strimzi/users.py")]
    return subprocess.run(script, input=rights, capture_output=True, check=True, timeout=180).stdout.decode()


def test_strimzi_users_have_the_rights_of_their_roles_and_no_others() -> None:
    users = json.loads(users_of("math"))["items"]
    made = {
        user["metadata"]["name"]: sorted(
            (acl["resource"]["type"], acl["resource"]["name"], acl["resource"]["patternType"], operation)
            for acl in user["spec"]["authorization"]["acls"]
            for operation in acl["operations"]
        )
        for user in users
    }
    kinds = {"topic": "topic", "group": "group", "transactional-id": "transactionalId"}
    patterns = {"literal": "literal", "prefixed": "prefix"}
    operations = {"READ": "Read", "WRITE": "Write", "CREATE": "Create", "DESCRIBE": "Describe", "DESCRIBE_CONFIGS": "DescribeConfigs"}
    assert made == {
        f"math-{role}": sorted((kinds[rule.resource], rule.name, patterns[rule.pattern], operations[rule.operation]) for rule in rules)
        for role, rules in acl_rules("math").items()
    }


@pytest.mark.slow
@pytest.mark.skipif(not (BINARIES / "strimzi").is_dir() or shutil.which("java") is None, reason="needs make cluster-binaries and a JDK")
def test_strimzis_own_model_knows_every_property_of_its_objects(tmp_path: Path) -> None:
    brokers, users, misspelt = ROOT / "deploy/strimzi/kafka.yaml", tmp_path / "users.json", tmp_path / "misspelt.yaml"
    users.write_text(users_of("math"))
    misspelt.write_text(brokers.read_text().replace("replicas: 3", "replica: 3"))
    command = ["java", "-cp", f"{BINARIES}/strimzi/*", str(ROOT / "tests/deploy/Strimzi.java"), str(brokers), str(users), str(misspelt)]
    printed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400).stdout.splitlines()
    pool = ["read KafkaNodePool", "read Kafka"]
    assert printed == [*pool, *["read KafkaUser"] * len(acl_rules("math")), "unknown in KafkaNodePool.Spec: [replica]", *pool]


@needs_helm
def test_monitoring_has_the_alerts_and_the_dashboard_as_they_are() -> None:
    made = objects(VALUE_SETS["monitoring"])
    rules = yaml.safe_load((ROOT / "deploy/observe/rules.yml").read_text())
    assert made["PrometheusRule", "math-penstock"]["spec"] == rules
    assert made["ConfigMap", "math-dashboard"]["data"]["penstock.json"] == (ROOT / "deploy/observe/dashboard.json").read_text()
