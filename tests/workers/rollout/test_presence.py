"""A process that was stopped knows it; one that only computes for long was there."""

import signal
import subprocess
import sys
import time

from penstock.workers.rollout.presence import Presence

WATCHED = """
import sys, time
from penstock.workers.rollout.presence import Presence
presence = Presence(away_s=1.5)
print("here", flush=True)
for line in sys.stdin:
    print(presence.was_away(), flush=True)
"""


def test_a_process_notices_that_it_was_stopped_once_and_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            process.stdin.write("\n")
            return process.stdout.readline().strip()

        assert process.stdout.readline().strip() == "here"
        assert ask() == "False"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.stdin.write("\n")  # waits for it when it goes on, before its threads can have run
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline().strip() == "True"
        assert ask() == "False"


def test_a_thread_that_is_busy_for_long_was_not_away() -> None:
    presence = Presence(away_s=1.2)
    busy_until = time.monotonic() + 1.5
    while time.monotonic() < busy_until:
        sum(range(1000))
    assert not presence.was_away()
    presence.close()
