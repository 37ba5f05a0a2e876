"""Prometheus and the files of `deploy/observe/` on a live run: panels have data, alerts are silent until something happens to it."""

import json
import os
import re
import shutil
import signal
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.topics.wire.record import Outgoing
from tests.support import waiting
from tests.support.children import child
from tests.support.launched import launched, pids, toml_of
from tests.support.paths import ROOT
from tests.support.promtool import promtool
from tests.support.worker_set import config_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus, of the Debian package of that name"),
]
OBSERVE = ROOT / "deploy" / "observe"
LIMIT_S = 240.0
WORKERS = 7
SOON = {"30m": "30s", "10m": "20s", "5m": "5s", "2m": "2s", "1m": "1s", "1h": "60s", "1800": "30", "15m": "15s"}
"""Times of the rules -> those of a run that takes minutes."""


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(20_000, 50_000, 97):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
        return first
    raise AssertionError("no free ports")


def get(url: str, **query: str) -> str:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=60.0) as response:
        return response.read().decode()


until = partial(waiting.until, limit_s=LIMIT_S, every_s=1.0)


class Prometheus:
    """A server that scrapes every second; its rules are those of the folder, and again as `Soon…` with short times."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def result(self, expression: str) -> list[Any]:
        return json.loads(get(f"{self.url}/api/v1/query", query=expression))["data"]["result"]

    def firing(self) -> set[str]:
        alerts = json.loads(get(f"{self.url}/api/v1/alerts"))["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@contextmanager
def prometheus(folder: Path, targets: list[str], port: int) -> Iterator[Prometheus]:
    rules = (OBSERVE / "rules.yml").read_text()
    (folder / "rules.yml").write_text(rules)
    soon = re.sub(r"\b(?:30m|10m|5m|2m|1m|15m|1h|1800)\b", lambda match: SOON[match[0]], rules)
    (folder / "soon.yml").write_text(soon.replace("alert: Penstock", "alert: Soon").replace("name: penstock", "name: soon"))
    text = (OBSERVE / "prometheus.yml").read_text()
    text = re.sub(r"10s", "1s", text).replace("[rules.yml]", "[rules.yml, soon.yml]")
    (folder / "prometheus.yml").write_text(re.sub(r"targets: \[.*\]", f"targets: {json.dumps(targets)}", text))
    command = ["prometheus", "--config.file", str(folder / "prometheus.yml"), "--storage.tsdb.path", str(folder / "series")]
    with (
        (folder / "prometheus.log").open("w") as output,
        child([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=output) as process,
    ):
        server = Prometheus(port)
        until(lambda: _answers(server) or process.poll() is not None, lambda: "no answer")
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        yield server


def _answers(server: Prometheus) -> bool:
    try:
        return bool(get(f"{server.url}/-/ready"))
    except OSError:
        return False


def panel_expressions() -> list[str]:
    panels = json.loads((OBSERVE / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [text.replace("$run", ".*").replace("$__rate_interval", "30s") for text in expressions]


def test_panels_have_data_and_alerts_fire_for_what_happens_to_a_run_and_are_silent_before(
    new_home: Callable[[], Path], tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, port = new_home(), free_ports(WORKERS + 1)
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    config = config_of(
        tiny_model, tmp_path, run={"steps": 100_000, "health_port": port}, data={"limit": 30}, trainer={"checkpoint_every": 5, "lr": 1e-6},
        eval={"source": str(tmp_path / "data.jsonl"), "start": 30, "every": 5, "limit": 4, "samples": 1},
    )  # fmt: skip
    broker = embedded.start().bootstrap
    targets = [f"127.0.0.1:{port + number}" for number in range(WORKERS)]
    (tmp_path / "served").mkdir()
    with (
        launched(str(toml_of(config, tmp_path)), "--run-id", "seen", "--json"),
        prometheus(tmp_path / "served", targets, port + WORKERS) as server,
    ):
        until(lambda: len(server.result("penstock_uptime_seconds")) == WORKERS, lambda: server.result("penstock_uptime_seconds"))
        expressions = panel_expressions()
        assert len(expressions) > 20
        until(lambda: all(map(server.result, expressions)), lambda: [text for text in expressions if not server.result(text)])
        for target in targets:
            assert promtool("check", "metrics", text=get(f"http://{target}/metrics")) == "", target
        assert {alert for alert in server.firing() if alert.startswith("Penstock")} == set()
        counters = 'label_replace({__name__=~"penstock_.*_total"}, "counter", "$1", "__name__", "(.+)")'
        assert server.result(f"resets({counters}[5m:1s]) >= 0")
        assert server.result(f"resets({counters}[5m:1s]) > 0") == [], "a counter fell"
        for pid in (pid for name, pid in pids(home, "seen").items() if name.startswith("rollout")):
            os.kill(pid, signal.SIGSTOP)
        log = KafkaLog(broker)
        writer = log.producer()
        writer.send(Outgoing(topic="seen.rollouts", partition=0, key=b"1", headers=(), value=b"of another program")).offset(60.0)
        writer.close()
        log.close()
        fired: set[str] = set()

        def fire(*alerts: str) -> None:
            until(lambda: fired.update(server.firing()) or fired >= set(alerts), lambda: f"{set(alerts) - fired} of {alerts}")

        fire("SoonWorkerDown", "SoonRoleMissing", "SoonTrainerWaits", "SoonNoStep", "SoonDeadLetters")
        assert "SoonBrokerUnreachable" not in fired
        dead = embedded.status().pid
        assert dead is not None
        os.kill(dead, signal.SIGSTOP)
        try:
            fire("SoonBrokerUnreachable")
        finally:
            os.kill(dead, signal.SIGCONT)
            for pid in (pid for name, pid in pids(home, "seen").items() if name.startswith("rollout")):
                os.kill(pid, signal.SIGCONT)
