"""A launcher's processes, with cheap ones in the workers' places: replaced when they die, ended with their launcher, never two sets."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import PenstockError
from penstock.infra.kafka.settings import Connection
from penstock.pipeline.config.load import from_table
from penstock.pipeline.config.schema import EvalSection
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import GroupFacts, WorkerView
from penstock.pipeline.launch import restart_policy, run_lock
from penstock.pipeline.launch.supervisor import LONGEST_STOP, Failure, Supervisor, Worker
from penstock.topics.ledger import Entry
from tests.support.children import child, end_in_time, runs, time_that_passes_after
from tests.support.waiting import until

pytestmark = pytest.mark.costly  # starts processes

PATIENT = "import time; print('at work', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('at work', flush=True); time.sleep(600)"
FAILING = "import sys; print('the reason'); sys.exit(1)"
BROKEN_REWARD = "import sys; print('penstock: evaluator: reward f broke: mend it'); print('1 more dead letter'); sys.exit(3)"
MISTAKEN = "import sys; print('sampling.top_p = 3'); sys.exit(2)"


class CheapSupervisor(Supervisor):
    """Everybody runs `PATIENT`, but for the worker whose program is given."""

    programs: dict[str, str]

    def _worker(self, role: str, slot: int) -> Worker:
        worker = super()._worker(role, slot)
        worker.command = [sys.executable, "-c", self.programs.get(worker.name, PATIENT)]
        return worker


def worker_set_of(directory: Path, *, said: list[str], programs: dict[str, str] | None = None, **run: Any) -> CheapSupervisor:
    table = {"run": {"steps": 1, **run}, "model": {"path": "m"}, "data": {"source": "tiny:successor"}, "rollout": {"workers": 1}}
    worker_set = CheapSupervisor("r", Connection(bootstrap="127.0.0.1:1", client_id="tests"), from_table(table), directory, said.append)
    worker_set.programs = programs or {}
    return worker_set


@contextmanager
def working(worker_set: Supervisor) -> Iterator[Supervisor]:
    worker_set.start()
    try:
        yield worker_set
    finally:
        worker_set.stop(limit_s=5.0)


def at_work_in(directory: Path, *, said: list[str], programs: dict[str, str]) -> CheapSupervisor:
    """Workers that have all begun, for a test that stops them itself."""
    worker_set = worker_set_of(directory, said=said, programs=programs)
    worker_set.start()
    until(lambda: at_work(worker_set))
    return worker_set


def seen(*, over: bool = False, progress: int = 0) -> RunView:
    """A run with so many outcomes of groups, closed or not."""
    closed = Entry(seq=0, kind="run-closed", time_ns=0) if over else None
    return RunView(run="r", closed=closed, groups={group: GroupFacts("scored", 1, 1, 0.0, 0) for group in range(progress)})


def tend(worker_set: Supervisor, view: RunView | None = None, *, later_s: float = 0.0, reachable: bool = True) -> Failure | None:
    return worker_set.poll(view or seen(), now_s=time.monotonic() + later_s, reachable=reachable)


def at_work(worker_set: Supervisor) -> bool:
    return all("at work" in worker.last_words() for worker in worker_set.workers)


def worker_named(worker_set: Supervisor, name: str) -> Worker:
    return next(worker for worker in worker_set.workers if worker.name == name)


def pids(directory: Path) -> dict[str, int]:
    return json.loads((directory / "workers.json").read_text())["workers"]


def test_a_killed_worker_is_replaced_at_once_and_the_list_and_the_log_say_so(tmp_path: Path):
    said: list[str] = []
    with working(worker_set_of(tmp_path, said=said)) as worker_set:
        until(lambda: at_work(worker_set))
        before = pids(tmp_path)
        os.kill(before["scorer-0"], signal.SIGKILL)
        until(lambda: tend(worker_set) or pids(tmp_path) != before)
        after = pids(tmp_path)
        assert {name for name in before if before[name] != after[name]} == {"scorer-0"}
        assert said == ["scorer-0 was killed by SIGKILL and is restarted (start 2)"]
        log = (tmp_path / "logs" / "scorer-0.log").read_text()
        assert "scorer-0: start 1\n" in log
        assert "scorer-0: start 2, scorer-0 was killed by SIGKILL before\n" in log
    assert end_in_time(*before.values(), *after.values())
    assert not (tmp_path / "workers.json").exists()


def test_a_worker_that_fails_again_and_again_is_given_up_with_the_last_words_of_its_last_process(tmp_path: Path):
    said: list[str] = []
    with working(worker_set_of(tmp_path, said=said, programs={"feeder": FAILING}, max_restarts=2)) as worker_set:
        failure = until(lambda: tend(worker_set))
        assert "feeder exited with status 1 (3 times in a row, run.max_restarts = 2)" in failure.line
        assert str(tmp_path / "logs" / "feeder.log") in failure.line
        assert failure.last_words == "  | the reason"
        assert said == [f"feeder exited with status 1 and is restarted (start {start}): the reason" for start in (2, 3)]
        assert len(pids(tmp_path)) == 5


def test_a_persons_mistake_is_given_up_at_once_in_the_workers_own_words(tmp_path: Path):
    with working(worker_set_of(tmp_path, said=[], programs={"feeder": MISTAKEN})) as worker_set:
        failure = until(lambda: tend(worker_set))
        assert (failure.line, failure.last_words) == ("feeder: sampling.top_p = 3", "")
        assert worker_named(worker_set, "feeder").starts == 1


def test_nobody_is_started_without_a_broker_and_what_died_meanwhile_is_excused(tmp_path: Path):
    said: list[str] = []
    with working(worker_set_of(tmp_path, said=said, max_restarts=0)) as worker_set:
        until(lambda: at_work(worker_set))
        os.kill(pids(tmp_path)["trainer"], signal.SIGKILL)
        until(lambda: worker_named(worker_set, "trainer").status is not None)
        assert tend(worker_set, reachable=False) is None
        assert tend(worker_set, reachable=False) is None
        assert worker_named(worker_set, "trainer").starts == 1
        assert "was killed by SIGKILL" in worker_set.notes(now_s=time.monotonic())["trainer"]
        assert tend(worker_set) is None
        assert worker_named(worker_set, "trainer").starts == 2


def test_who_leaves_too_early_is_missed_and_who_leaves_a_closed_run_is_not(tmp_path: Path):
    with working(worker_set_of(tmp_path, said=[], programs={"scorer-0": "pass", "feeder": FAILING})) as worker_set:
        until(lambda: worker_named(worker_set, "scorer-0").status == 0 and worker_named(worker_set, "feeder").status == 1)
        assert tend(worker_set, seen(over=True)) is None
        assert worker_named(worker_set, "feeder").starts == 1, "the run is closed: there is nothing left for a feeder"
        assert tend(worker_set) is None
        assert "scorer-0 exited although the run is not finished" in str(tend(worker_set, later_s=11.0))


@pytest.mark.parametrize("name", ["tracker", "rollout-0"])
def test_a_tracker_and_a_rollout_worker_that_evaluates_are_still_started_again_after_the_end(tmp_path: Path, name: str):
    with working(worker_set_of(tmp_path, said=[])) as worker_set:
        worker_set.config = worker_set.config.model_copy(update={"eval": EvalSection(source="tiny:successor", engine="rollout")})
        os.kill(pids(tmp_path)[name], signal.SIGKILL)
        until(lambda: worker_named(worker_set, name).status is not None)
        assert tend(worker_set, seen(over=True)) is None
        assert worker_named(worker_set, name).starts == 2


def test_a_run_goes_on_without_a_helper_that_is_given_up(tmp_path: Path):
    said: list[str] = []
    with working(worker_set_of(tmp_path, said=said, programs={"tracker": MISTAKEN})) as worker_set:
        until(lambda: worker_named(worker_set, "tracker").status == 2)
        assert tend(worker_set) is None
        assert tend(worker_set) is None
        assert worker_set.missing == ["tracker"]
        assert said == ["warning: tracker: sampling.top_p = 3; the run continues without it"]
        assert not worker_set.ended
    assert worker_set.ended


def test_a_helper_whose_reward_is_broken_ends_the_run_with_its_line(tmp_path: Path):
    with working(worker_set_of(tmp_path, said=[], programs={"tracker": BROKEN_REWARD.replace("evaluator", "tracker")})) as worker_set:
        assert until(lambda: tend(worker_set)) == Failure("reward f broke: mend it")


def test_what_a_worker_still_finishes_is_said_once_while_it_is_stopped_and_one_that_does_not_end_is_killed(tmp_path: Path):
    said: list[str] = []
    worker_set, trainer = at_work_in(tmp_path, said=said, programs={"trainer": DEAF}), {"doing": "commits step 3", "activity": "compute"}
    before, feeder = pids(tmp_path), {"doing": "no version is new", "activity": "full_window"}
    worker_set.stop(limit_s=1.0, labels=lambda: {"trainer": trainer, "feeder": feeder})
    finishes, killed = [line for line in said if line.startswith("trainer")]
    assert finishes == "trainer: commits step 3"
    assert re.fullmatch(r"trainer did not exit within \d+ s: killed", killed)
    assert not any(line.startswith("feeder:") for line in said)
    assert [line.split()[0] for line in said if line.endswith(" s: killed")] == ["trainer"]
    assert end_in_time(*before.values())


def test_a_worker_that_goes_on_while_it_is_stopped_has_more_time_than_one_that_stands_still(tmp_path: Path):
    said: list[str] = []
    worker_set = at_work_in(tmp_path, said=said, programs={"trainer": DEAF})
    steps = itertools.count()
    worker_set.stop(limit_s=0.3, labels=lambda: {"trainer": {"doing": f"training step 3, micro-batch {next(steps)}"}})
    (found,) = filter(None, (re.fullmatch(r"trainer did not exit within (\d+) s: killed", line) for line in said))
    assert int(found[1]) >= round(LONGEST_STOP * 0.3)


def test_a_worker_begins_a_new_row_of_failures_only_if_it_served_while_the_run_moved(tmp_path: Path):
    with working(worker_set_of(tmp_path, said=[], max_restarts=0)) as worker_set:
        trainer = worker_named(worker_set, "trainer")
        report = WorkerView(worker="trainer", role="trainer", values={"startup_s": 1.0}, labels={"pid": str(trainer.pid)})
        trainer.on_report(report, now_s=0.0)
        for now_s, moved, progress in ((9.0, 5, False), (11.0, 0, False), (11.0, 5, True)):
            trainer.on_exit(-9, now_s=now_s, moved=moved, excused=False)
            assert trainer.exits[-1].progress == progress


def test_a_stopped_process_that_was_ready_is_killed_after_two_stalls_and_a_silent_one_that_computes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(restart_policy, "IDLE_SHARE", 1e-4)  # so much it computes on the busiest machine
    said: list[str] = []
    busy = "print('at work', flush=True)\nwhile True: pass"
    with working(worker_set_of(tmp_path, said=said, programs={"trainer": busy})) as worker_set:
        until(lambda: at_work(worker_set))
        view = seen()
        for name in ("trainer", "scorer-0"):
            view.workers[name] = WorkerView(worker=name, role="x", values={"startup_s": 1.0}, labels={"pid": str(pids(tmp_path)[name])})
        tend(worker_set, view)
        os.kill(pids(tmp_path)["scorer-0"], signal.SIGSTOP)
        began = time.monotonic()

        def looked() -> bool:
            silent = {name: 10.0 + time.monotonic() - began for name in view.workers}
            worker_set.kill_hung(silent, now_s=time.monotonic(), stall_s=0.5, reachable=True)
            return bool(said)

        until(looked)
        until(lambda: worker_named(worker_set, "scorer-0").status == -signal.SIGKILL)
        until(lambda: looked() and time.monotonic() - began > 1.5)
        assert worker_named(worker_set, "trainer").status is None
        assert all("scorer-0 has sent no report" in line for line in said)


def test_a_second_ctrl_c_kills_what_is_left_at_once(tmp_path: Path):
    worker_set = at_work_in(tmp_path, said=[], programs={"feeder": DEAF})
    before = pids(tmp_path)

    def interrupted() -> dict[str, str]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker_set.stop(limit_s=60.0, labels=interrupted)
    assert end_in_time(*before.values())


ATTENDED = """
import sys, time
from pathlib import Path
from penstock.pipeline.launch.run_lock import attending
with attending(Path(sys.argv[1]), "r"):
    print("in", flush=True)
    time.sleep(600)
"""


def test_a_run_has_one_launcher_and_a_killed_one_makes_room(tmp_path: Path):
    with child([sys.executable, "-c", ATTENDED, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(PenstockError, match=f"run r already has a launcher, process {other.pid}"), run_lock.attending(tmp_path, "r"):
            pass
    with run_lock.attending(tmp_path, "r"):
        pass


def test_workers_of_a_killed_launcher_are_ended_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    worker = ["-m", "penstock.workers", "rollout", "--run", "r", "--bootstrap", "b", "--slot", "0"]
    stranger = ["-m", "penstock.workers", "rollout", "--run", "r2", "--bootstrap", "b", "--slot", "0"]
    left, foreign, deaf = (
        subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE)
        for program, words in ((PATIENT, worker), (PATIENT, stranger), (DEAF, worker))
    )
    try:
        for process in (left, foreign, deaf):
            assert process.stdout is not None
            process.stdout.readline()
        os.kill(left.pid, signal.SIGSTOP)
        names = {"rollout-0": left.pid, "rollout-1": foreign.pid, "rollout-2": deaf.pid, "feeder": os.getpid(), "tracker": 2**22 - 1}
        run_lock.note(tmp_path, {"workers": names})
        monkeypatch.setattr(run_lock, "time", time_that_passes_after(lambda: not runs(left.pid)))
        run_lock.end_leftovers(tmp_path, "r", notify=said.append, limit_s=600.0)
        assert (left.wait(120), deaf.wait(120)) == (-signal.SIGTERM, -signal.SIGKILL)
        assert foreign.poll() is None
        assert said == ["ending workers that an earlier launcher of run r left running: rollout-0, rollout-2"]
    finally:
        for process in (left, foreign, deaf):
            process.kill()
            process.communicate(timeout=60)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"workers": {"a": "x"}}', '{"workers": 3}'])
def test_a_list_that_a_power_cut_left_half_written_is_no_list(tmp_path: Path, text: str):
    (tmp_path / "workers.json").write_text(text)
    run_lock.end_leftovers(tmp_path, "r", notify=pytest.fail, limit_s=0.1)


LASTING = """
import sys, threading
from penstock.pipeline.launch.shutdown import stop_requested, lasting_output
with lasting_output(), stop_requested() as stop:
    print("ready", flush=True)
    while not stop.wait(0.05):
        print("talking", flush=True)
    for _ in range(3):
        print("stopping", flush=True)
        print("stopping", file=sys.stderr, flush=True)
sys.exit(130)
"""


def test_a_closed_terminal_ends_in_the_orderly_stop():
    ours, theirs = os.openpty()
    program = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{LASTING}"
    with child([sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        while b"talking" not in os.read(ours, 4096):
            pass
        os.close(ours)  # the kernel sends SIGHUP, and every write fails from now on
        assert process.wait(120) == 130


SLOW_TO_STOP = """
import sys
from penstock.pipeline.launch import shutdown
shutdown.SAME_S = 600.0  # on a busy machine any two signals are half a second apart
with shutdown.stop_requested() as stop:
    print("ready", flush=True)
    stop.wait()
    print("stopping", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("second", "ends_at_once"), [(signal.SIGINT, True), (signal.SIGHUP, False)])
def test_two_ctrl_c_within_half_a_second_are_two_and_two_signals_of_one_closed_terminal_are_one(second: int, ends_at_once: bool):
    command = [sys.executable, "-c", SLOW_TO_STOP]
    with child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"stopping\n"
        time.sleep(0.3)
        process.send_signal(second)
        _, said = process.communicate(timeout=60)
    assert (b"KeyboardInterrupt" in said) == ends_at_once


def test_a_signal_that_is_ignored_from_the_start_stays_ignored():
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{LASTING}"
    with child([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        for _ in range(5):
            assert process.stdout.readline() == b"talking\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_each_worker_answers_at_a_port_of_its_own_where_the_run_has_one(tmp_path: Path) -> None:
    table = {"run": {"steps": 1, "health_port": 9100}, "model": {"path": "m"}, "data": {"source": "d.jsonl"}}
    worker_set = Supervisor("r", Connection(bootstrap="127.0.0.1:1", client_id="tests"), from_table(table), tmp_path, lambda _: None)
    for slot in range(2):
        worker_set.workers.append(worker_set._worker("rollout", slot))
    assert [worker.environment["PENSTOCK_HEALTH"] for worker in worker_set.workers] == ["9100", "9101"]
    silent = Supervisor("r", worker_set.connection, from_table(table | {"run": {"steps": 1}}), tmp_path, lambda _: None)
    assert "PENSTOCK_HEALTH" not in silent._worker("rollout", 0).environment
