"""Values of the Helm chart for ten kinds of cluster, and the chart rendered with values."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

CHART = ROOT / "deploy" / "chart"
BINARIES = Path(os.environ.get("PENSTOCK_CLUSTER_BIN") or Path.home() / ".cache" / "penstock" / "cluster")
"""Folder of `make cluster-binaries`."""
HELM = shutil.which("helm", path=f"{BINARIES}{os.pathsep}{os.environ.get('PATH', '')}")
KUBERNETES = "1.37.2"
CONFIG = {"run": {"config": "[run]\nsteps = 2\n"}}
STRIMZI = {
    "bootstrap": "penstock-kafka-bootstrap:9093",
    "security": {"security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", "ssl_cafile": "/etc/kafka/ca.crt"},
    "caSecret": "penstock-cluster-ca-cert",
    "userSecrets": True,
}
_GPU = {
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "trainer"}}}
            ]
        }
    },
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}],
    "priorityClassName": "training",
    "runtimeClassName": "nvidia",
    "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
}
VALUE_SETS: Mapping[str, Mapping[str, Any]] = {
    "defaults": CONFIG,
    "strimzi": {**CONFIG, "kafka": STRIMZI},
    "secrets": {**CONFIG, "roles": {role: {"securitySecret": f"run-{role}"} for role in ("launcher", "feeder", "scorer", "trainer")}},
    "gpus": {**CONFIG, "roles": {"rollout": {**_GPU, "replicas": 8}, "trainer": _GPU}},
    "autoscaling": {**CONFIG, "autoscaling": {"enabled": True, "minReplicas": 0}, "roles": {"rollout": {"replicas": 0}}},
    "monitoring": {**CONFIG, "monitoring": {"enabled": True, "labels": {"release": "prometheus"}}},
    "queue": {**CONFIG, "queue": "training"},
    "more workers": {
        "run": {"id": "20261127", "create": False, "keySecret": "run-key"},
        "roles": {
            **{role: {"replicas": 0} for role in ("feeder", "scorer", "trainer", "tracker")},
            "rollout": {"args": ["--pool", "spot"]},
        },
    },
    "openshift": {
        **CONFIG,
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "networkPolicy": {"enabled": False},
        "images": {"light": f"example.com/penstock@sha256:{'0' * 64}"},
        "imagePullSecrets": [{"name": "pull"}],
    },
    "agents": {
        "run": {"config": "[run]\nsteps = 2\n", "files": {"rewards.py": 'def score():\n    return "{{ 1 }}"\n'}, "trustCode": True},
        "model": {"claim": "models"},
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "extraVolumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "extraVolumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
        "roles": {
            "environment": {"replicas": 3, "egress": [{"to": [{"ipBlock": {"cidr": "198.51.100.0/24"}}]}]},
            "evaluator": {"replicas": 1},
            "scorer": {"env": [{"name": "PENSTOCK_REWARD_URL", "value": "http://judge:8000"}]},
            "trainer": {"claim": {"size": "1.5Ti", "storageClass": "fast"}},
        },
    },
}


def helm(*arguments: str, values: Mapping[str, Any]) -> "subprocess.CompletedProcess[str]":
    """Run helm with these values; its outputs are text."""
    assert HELM is not None
    command = [HELM, *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False, timeout=180)


def rendered(values: Mapping[str, Any], *, name: str = "math") -> str:
    """The chart's objects as YAML."""
    done = helm("template", name, str(CHART), "--kube-version", KUBERNETES, values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout
