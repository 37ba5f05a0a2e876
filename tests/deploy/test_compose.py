"""The Compose file: each role has a service, commands are the product's, mounted files exist, nothing but volumes can be written."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy.engine import make_url

from penstock.pipeline.config.run_config import Config
from penstock.pipeline.runtime.main import parsed
from penstock.pipeline.runtime.roles import ROLES
from tests.support.paths import ROOT

FOLDER = ROOT / "deploy" / "compose"
TEXT = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", TEXT))["services"]
"""The services with every variable's default."""
WORKERS = {name: service for name, service in SERVICES.items() if service.get("command", [""])[0] == "worker"}


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_each_role_of_a_profile_is_a_worker_that_prometheus_scrapes(profile: str) -> None:
    started = {name: worker for name, worker in WORKERS.items() if profile in worker.get("profiles", [profile])}
    workers = {name: parsed(worker["command"][1:], prog="worker") for name, worker in started.items()}
    without = {"environment"} if profile == "cpu" else {"environment", "evaluator"}  # on GPUs a rollout worker evaluates
    assert sorted(worker.role for worker in workers.values()) == sorted(ROLES.keys() - without)
    assert {worker.run for worker in workers.values()} == {"first"}
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (names,) = job["dns_sd_configs"]
    assert started.keys() <= set(names["names"])
    assert all(worker["environment"]["PENSTOCK_HEALTH"].endswith(f":{names['port']}") for worker in started.values())


def test_what_the_services_mount_and_set_exists() -> None:
    mounts = [mount.partition(":")[0] for service in SERVICES.values() for mount in service.get("volumes", []) if mount.startswith(".")]
    assert {Path(mount).name for mount in mounts} >= {"examples", "grafana", "observe", "prometheus.yml"}
    assert [mount for mount in mounts if Path(mount).name != "tiny" and not (FOLDER / mount).exists()] == []
    for setting in re.findall(r"--set=(\w+)\.(\w+)", TEXT):
        assert setting[1] in Config.model_fields[setting[0]].annotation.model_fields  # type: ignore[union-attr]


def test_the_image_of_mlflow_has_the_driver_of_its_database() -> None:
    dialect = make_url(SERVICES["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"]).get_dialect()
    assert f"{dialect.driver}-binary==" in (ROOT / "deploy" / "image" / "locks" / "tracker.lock").read_text(encoding="utf-8")


def test_our_containers_can_write_to_volumes_only_and_no_port_is_open_beyond_this_machine() -> None:
    ours = [service for service in SERVICES.values() if "penstock" in service["image"]]
    assert len(ours) == len(WORKERS) + 4
    assert all(service["read_only"] and service["cap_drop"] == ["ALL"] for service in ours)
    assert all(port.startswith("127.0.0.1:") for service in SERVICES.values() for port in service.get("ports", []))
