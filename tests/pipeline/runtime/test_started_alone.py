"""A worker that a pod or a job step starts: it is probed while it waits, has its slot from the environment, and waits for its broker."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

from tests.support.children import child
from tests.support.paths import ROOT

WORKER = [sys.executable, "-m", "penstock.workers", "scorer", "--run", "r", "--bootstrap", "127.0.0.1:1"]


def started(*options: str, **environment: str) -> Any:
    return child(
        [*WORKER, *options], cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_worker_that_waits_for_its_broker_is_alive_and_not_ready_and_ends_with_0_when_it_is_stopped() -> None:
    with started("--wait-broker", "600", "--health", "0", PENSTOCK_SLOT="3") as worker:
        served = re.search(r"scorer-3: health and metrics at (\S+)", worker.stdout.readline())
        assert served is not None
        assert [status_of(f"{served[1]}/{path}") for path in ("livez", "readyz", "metrics")] == [200, 503, 200]
        assert "waiting for a broker, 600 s at most: cannot reach a Kafka broker at 127.0.0.1:1" in worker.stdout.readline()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60.0) == 0


def test_a_worker_ends_with_1_without_a_broker_in_time_and_with_2_before_it_connects_if_its_health_port_is_taken() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        started("--wait-broker", "0.1") as late,
        started("--wait-broker", "600", "--health", str(taken.getsockname()[1])) as second,
    ):
        assert "no broker was reachable within 0.1 s (--wait-broker): cannot reach" in late.communicate(timeout=100.0)[1]
        assert "choose another port" in second.communicate(timeout=100.0)[1]
    assert (late.returncode, second.returncode) == (1, 2)
