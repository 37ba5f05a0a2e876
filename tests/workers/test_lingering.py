"""Workers of a restart policy that always restarts: when the run is over they stay, ready and idle."""

import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.support.children import child
from tests.support.log_helpers import WAIT_S
from tests.support.recorded_run import RecordedRun


def test_a_worker_that_lingers_is_ready_after_the_end_of_its_run_and_ends_with_0_on_sigterm(recorded: RecordedRun, tmp_path: Path) -> None:
    options = ["--run", recorded.run, "--bootstrap", recorded.bootstrap, "--health", "0", "--linger"]
    log, deadline = tmp_path / "log", time.monotonic() + WAIT_S
    with (
        log.open("w") as output,
        child([sys.executable, "-m", "penstock.workers", "feeder", *options], stdout=output, stderr=subprocess.STDOUT) as worker,
    ):
        while "waiting for SIGTERM" not in log.read_text():
            assert time.monotonic() < deadline and worker.poll() is None, log.read_text()
            time.sleep(0.05)
        served = re.search(r"health and metrics at (\S+)", log.read_text())
        assert served is not None
        for path in ("livez", "readyz", "metrics"):
            with urllib.request.urlopen(f"{served[1]}/{path}", timeout=60.0) as answer:
                assert answer.status == 200
        worker.terminate()
        assert worker.wait(WAIT_S) == 0
