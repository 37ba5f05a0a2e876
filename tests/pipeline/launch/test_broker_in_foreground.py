"""`penstock broker run`: a broker as a container or a job step, at an address for other machines."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from penstock.infra.kafka.log import KafkaLog, await_broker
from tests.support.children import child
from tests.support.log_helpers import WAIT_S, make_topics, write
from tests.support.paths import ROOT

USER = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "SCRAM-SHA-256", "sasl_plain_username": "ann", "sasl_plain_password": "p4"}


@pytest.mark.parametrize(
    "end", ["workers leave", pytest.param("second signal", marks=pytest.mark.slow), pytest.param("stop file", marks=pytest.mark.slow)]
)
def test_a_broker_that_gets_sigterm_with_its_workers_serves_until_they_have_left(
    end: str, new_home: Callable[[], Path], tmp_path: Path
) -> None:
    home, file = new_home(), tmp_path / "stop"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
    command = [sys.executable, "-m", "penstock", "broker", "run", "--listen", f"127.0.0.1:{address[10:]}", "--advertise", "localhost"]
    options = {"cwd": ROOT, "env": {**os.environ, "PENSTOCK_SECURITY": json.dumps(USER)}, "text": True}
    waits: list[str] = []
    with child(
        [*command, "--data", str(home), "--stop-file", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as broker:
        worker = await_broker(lambda: KafkaLog(address, security=USER, unreachable_after_s=2.0), WAIT_S, notify=waits.append)
        assert waits[0].startswith(f"waiting for a broker, {WAIT_S:.0f} s at most: cannot reach a Kafka broker at {address}")
        (topic,) = make_topics(worker, "r", "t")
        if end != "stop file":
            for process in (*psutil.Process(broker.pid).children(recursive=True), broker):  # as Slurm does
                os.kill(process.pid, signal.SIGTERM)
            assert broker.stderr is not None
            assert any("stop requested: waiting until no client is connected, at most 300 s" in line for line in broker.stderr)
        assert write(worker, topic, [b"last words"]) == [0]
        if end == "second signal":
            broker.send_signal(signal.SIGTERM)
        elif end == "stop file":
            file.touch()
        else:
            worker.close()
        assert broker.wait(WAIT_S) == 0
        worker.close()
    assert (home / "broker" / "data" / ".kafka_cleanshutdown").exists()
