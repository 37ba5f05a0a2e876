"""A worker's answers over HTTP, and the lines of its log."""

import json
import logging
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIServer

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.infra.errors import ConfigError, Fenced
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.reporting import health_and_metrics as module
from penstock.pipeline.runtime.reporting import log_lines
from penstock.pipeline.runtime.reporting.health_and_metrics import HEALTH, TURN_S, Health, address_of, serve
from penstock.pipeline.runtime.reporting.log_lines import LOG_JSON, log_line
from penstock.pipeline.runtime.reporting.reporter import Reporter
from tests.support.log_helpers import WAIT_S, Heard, listen, make_topics, outgoing, write
from tests.support.waiting import until


@pytest.fixture
def health() -> Health:
    log = MemoryLog()
    reporter = Reporter(run="r", role="scorer", worker="scorer-0", log=log, producer=log.producer())
    return Health(reporter, threading.Event())


def stop(server: WSGIServer | None) -> None:
    assert server is not None
    server.shutdown()
    server.server_close()


@pytest.fixture
def url(health: Health, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    server = serve(health, "0")
    yield "http://" + capsys.readouterr().out.rpartition("http://")[2].strip()
    stop(server)


def asked(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_worker_is_ready_once_it_has_said_so_and_until_it_is_asked_to_stop(health: Health, url: str) -> None:
    health.reporter.labels["doing"] = "loading the model"
    assert asked(f"{url}/readyz") == (503, "loading the model\n")
    health.reporter.values["startup_s"] = 3.0
    assert asked(f"{url}/readyz") == (200, "ok\n")
    health.stopping.set()
    assert asked(f"{url}/readyz") == (503, "a stop was requested\n")
    assert asked(f"{url}/what")[0] == 404


def test_a_worker_is_alive_before_it_has_joined_and_alive_and_ready_when_it_lingers_after_its_run(health: Health, url: str) -> None:
    reporter, health.reporter = health.reporter, None
    assert (asked(f"{url}/livez")[0], asked(f"{url}/metrics")) == (200, (200, ""))
    assert asked(f"{url}/readyz") == (503, "waiting for the broker or the run\n")
    health.reporter, health.over = reporter, True
    assert (asked(f"{url}/livez")[0], asked(f"{url}/readyz")[0]) == (200, 200)


@pytest.mark.parametrize("busy", [True, False])
def test_a_loop_that_stands_still_is_dead_unless_its_process_computes(
    health: Health, url: str, monkeypatch: pytest.MonkeyPatch, *, busy: bool
) -> None:
    clock = {"now": health.reporter.turned_s, "spent": 0.0}
    monkeypatch.setattr(module.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(module, "cpu_s", lambda: clock["spent"])
    assert health.hangs() is None
    clock["now"] += TURN_S + 1.0
    clock["spent"] += TURN_S if busy else 1.0
    assert (health.hangs() is None) == busy
    monkeypatch.undo()
    assert asked(f"{url}/livez") == (200, "ok\n")


def test_prometheus_reads_the_numbers_of_the_newest_report_with_run_role_and_worker(health: Health, url: str) -> None:
    health.reporter.add("samples", 12.0)
    health.reporter.values |= {"engine_tokens/s": 7.5, "engine_größe": 1.0, 'outcome_a "b"': 2.0}
    code, text = asked(f"{url}/metrics")
    samples = {one.name: one for family in text_string_to_metric_families(text) for one in family.samples}
    assert code == 200
    assert samples["penstock_samples_total"].value == 12.0
    assert samples["penstock_samples_total"].labels == {"run": "r", "role": "scorer", "worker": "scorer-0"}
    assert samples["penstock_engine_tokens_per_second"].value == 7.5
    assert samples["penstock_engine_gr__e"].value == 1.0
    assert samples["penstock_outcome_total"].labels["name"] == 'a "b"'
    assert samples["penstock_rss_bytes"].value > 2**20


def test_prometheus_reads_what_has_happened_to_the_clients_of_the_log(broker: str, run_id: str) -> None:
    log = KafkaLog(broker)
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    health = Health(Reporter(run="r", role="scorer", worker="scorer-0", log=log, producer=log.producer()), threading.Event())

    def counted(name: str) -> float:
        families = text_string_to_metric_families(health.response("/metrics")[2].decode())
        return next(one.value for family in families for one in family.samples if one.name == f"penstock_{name}")

    first = log.transactions(f"{run_id}.writer")
    assert [counted(name) for name in ("fenced_total", "rebalances_total", "transaction_retries_total")] == [0, 0, 0]
    second = log.transactions(f"{run_id}.writer")
    with pytest.raises(Fenced):
        first.commit([outgoing(topic, b"late")])
    assert (counted("fenced_total"), counted("transaction_retries_total") >= 1) == (1, True)
    write(log, topic, [b"1", b"2", b"3"])
    heard = Heard(log.member(f"{run_id}.group", [topic]))
    until(lambda: counted("lag") == 3, limit_s=WAIT_S)
    listen(heard, until=lambda: len(heard.records) == 3)
    assert (counted("lag"), counted("rebalances_total") >= 1) == (0, True)
    heard.member.close()
    first.close()
    second.close()
    log.close()


def test_a_clients_warning_is_a_dated_line_of_the_worker_and_its_repetitions_are_counted(
    health: Health, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 1000.0}
    monkeypatch.setattr(log_lines.time, "monotonic", lambda: clock["now"])
    end = log_lines.pass_on_warnings(lambda text, level: health.reporter.notify(text, level=level))
    kafka = logging.getLogger("kafka.net.manager")
    for attempt in range(3):
        kafka.warning("Connection %d failed:\n%s", attempt, "ECONNREFUSED")
    kafka.info("nothing to mind")
    clock["now"] += log_lines.EVERY_S
    kafka.warning("Connection %d failed:\n%s", 4, "ECONNREFUSED")
    end()
    kafka.warning("nobody hears this")
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \S+ WARNING r scorer-0: kafka.net.manager: Connection 0 failed: ECONNREFUSED", first)
    assert last.endswith("Connection 4 failed: ECONNREFUSED (2 more like it since the last one)")


def test_without_a_port_nothing_listens_and_a_wrong_or_taken_one_is_an_error_of_one_line(
    health: Health, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HEALTH, raising=False)
    before = threading.active_count()
    assert serve(health) is None
    assert threading.active_count() == before
    assert (address_of("9100"), address_of("0.0.0.0:80"), address_of("[::1]:80")) == (("127.0.0.1", 9100), ("0.0.0.0", 80), ("::1", 80))
    for text in ("http", "host:", "70000"):
        with pytest.raises(ConfigError, match=r"--health .*: expected PORT or HOST:PORT"):
            address_of(text)
    monkeypatch.setenv(HEALTH, url.rpartition(":")[2])
    with pytest.raises(ConfigError, match="Address already in use; choose another port"):
        serve(health)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_a_star_is_every_address_of_both_protocols(health: Health, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(health, "*:0")
    port = capsys.readouterr().out.strip().rpartition(":")[2]
    assert [asked(f"http://{host}:{port}/livez")[0] for host in ("127.0.0.1", "[::1]")] == [200, 200]
    stop(server)


def test_a_line_of_the_log_has_date_level_run_and_worker_as_text_and_as_json(
    health: Health, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    assert log_line("done", run="r", worker="feeder", time_s=0.5).endswith(" INFO r feeder: done")
    found: dict[str, Any] = json.loads(log_line("a\nb", run="r", worker="w", level="error", time_s=0.5, as_json=True))
    assert found == {"time": "1970-01-01T00:00:00.500Z", "level": "error", "run": "r", "worker": "w", "text": "a\nb"}
    monkeypatch.setenv(LOG_JSON, "1")
    health.reporter.notify("hello")
    line = json.loads(capsys.readouterr().out)
    assert (line["level"], line["run"], line["worker"], line["text"]) == ("info", "r", "scorer-0", "hello")
