"""Child processes: whatever the code in them does, a call ends in bounded time with a result or a reason."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.infra.sandbox import timed_pool as pooled
from penstock.infra.sandbox.spawn import ChildError
from penstock.infra.sandbox.timed_pool import ChildPool, Done, Failed
from tests.support.children import child, end_in_time, runs, time_that_passes_after
from tests.support.paths import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.costly  # starts processes

SERVED = """
import os, re, signal, subprocess, sys, time

def serve(init):
    if init == "breaks":
        raise LookupError("nothing here")
    if init == "dies":
        os._exit(7)
    def handle(payload):
        what = payload.get("do")
        if what == "hang":
            time.sleep(600)
        if what == "regex":
            re.match("(a+)+$", "a" * 64 + "b")
        if what == "exit":
            os._exit(5)
        if what == "leave":
            sys.exit("bye")
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "raise":
            raise KeyError("missing")
        if what == "odd":
            return object()
        if what == "nested":
            nested = []
            for _ in range(5000):
                nested = [nested]
            return nested
        if what == "print":
            print("to python's stdout" * 1000, flush=True)
            os.write(1, b"to the descriptor\\n")
            subprocess.run(["echo", "from a grandchild"])
            return [sys.stdin.read(), input.__name__]
        if what == "grandchild":
            child = subprocess.Popen(["sleep", "600"])
            open(payload["note"], "w").write(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        if what == "once":
            if not os.path.exists(payload["note"]):
                open(payload["note"], "w").write("tried")
                os._exit(1)
            return "second time"
        heavy = [name for name in ("numpy", "pyarrow", "torch", "pydantic", "asyncio", "kafka") if name in sys.modules]
        return {"echo": payload, "pid": os.getpid(), "heavy": heavy}
    return handle
"""
Pool = Callable[..., ChildPool[Any]]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    (tmp_path / "served_by_test.py").write_text(SERVED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[ChildPool[Any]] = []

    def make(**settings: Any) -> ChildPool[Any]:
        made.append(ChildPool("served_by_test:serve", **{"size": 1, "timeout_s": 60.0, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def collect(pool: ChildPool[Any], within_s: float = 120.0) -> dict[Any, Done[Any] | Failed[Any]]:
    """Everything pending, by key."""
    end = time.monotonic() + within_s
    ended: dict[Any, Done[Any] | Failed[Any]] = {}
    while pool.pending and time.monotonic() < end:
        ended |= {one.key: one for one in pool.poll(0.5)}
    assert not pool.pending, f"still pending after {within_s} s"
    return ended


def called(pool: ChildPool[Any], **payload: Any) -> Any:
    pool.submit("call", payload)
    ended = collect(pool)["call"]
    assert isinstance(ended, Done), ended
    return ended.result


def reason(ended: Done[Any] | Failed[Any]) -> str:
    assert isinstance(ended, Failed), ended
    assert "\n" not in ended.reason
    return ended.reason


def test_calls_are_answered_and_children_live_on(pool: Pool) -> None:
    ours = pool(size=2)
    for key in range(20):
        ours.submit(key, {"number": key, "text": "ä\n🙂"})
    ended = collect(ours)
    assert [ended[key].result["echo"]["number"] for key in range(20)] == list(range(20))  # type: ignore[union-attr]
    assert ended[3].result["echo"]["text"] == "ä\n🙂"  # type: ignore[union-attr]
    assert len({one.result["pid"] for one in ended.values()}) <= 2  # type: ignore[union-attr]
    assert ours.poll(5.0) == []


def test_a_payload_larger_than_the_pipe_goes_through(pool: Pool) -> None:
    assert len(called(pool(), text="x" * 3_000_000)["echo"]["text"]) == 3_000_000


@pytest.mark.parametrize("what", ["hang", "regex"])
def test_a_hung_call_is_killed_and_fails_after_one_retry_in_bounded_time(pool: Pool, what: str) -> None:
    ours = pool(timeout_s=1.0)
    called(ours)
    started = time.monotonic()
    ours.submit("hung", {"do": what})
    ours.submit("after", {})
    ended = collect(ours)
    assert reason(ended["hung"]) == "took longer than 1 s and was killed"
    assert isinstance(ended["after"], Done)
    assert time.monotonic() - started >= 2.0


@pytest.mark.parametrize(("what", "words"), [("exit", "ended with exit status 5"), ("crash", "ended with signal SIGSEGV")])
def test_a_crash_fails_its_own_call_only(pool: Pool, what: str, words: str) -> None:
    ours = pool()
    for key, payload in (("before", {}), ("crash", {"do": what}), ("after", {})):
        ours.submit(key, payload)
    ended = collect(ours)
    assert reason(ended["crash"]) == words
    assert isinstance(ended["before"], Done)
    assert isinstance(ended["after"], Done)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", "KeyError: 'missing' (served_by_test.py line"),
        ("leave", "SystemExit: bye"),
        ("odd", "the result cannot be returned as JSON"),
        ("nested", "the result cannot be returned as JSON"),
    ],
)
def test_an_exception_is_a_failure_with_its_reason_and_the_child_lives_on(pool: Pool, what: str, words: str) -> None:
    ours = pool()
    before = called(ours)["pid"]
    ours.submit("broken", {"do": what})
    ours.submit("after", {})
    ended = collect(ours)
    assert words in reason(ended["broken"])
    assert ended["after"].result["pid"] == before  # type: ignore[union-attr]


def test_a_call_that_succeeds_the_second_time_is_done_and_without_retries_the_first_failure_counts(pool: Pool, tmp_path: Path) -> None:
    once, never = pool(), pool(retries=0)
    for name, ours in (("once", once), ("never", never)):
        ours.submit("call", {"do": "once", "note": str(tmp_path / name)})
    assert collect(once)["call"].result == "second time"  # type: ignore[union-attr]
    assert reason(collect(never)["call"]) == "ended with exit status 1"


def test_prints_and_reads_of_the_code_do_not_touch_the_pipes(pool: Pool) -> None:
    ours = pool()
    ours.submit("prints", {"do": "print"})
    ours.submit("after", {})
    ended = collect(ours)
    assert ended["prints"].result == ["", "input"]  # type: ignore[union-attr]
    assert isinstance(ended["after"], Done)


def test_an_answer_that_waits_while_the_caller_is_busy_is_not_late(pool: Pool) -> None:
    ours = pool(timeout_s=1.0)
    called(ours)
    ours.submit("call", {})
    time.sleep(1.5)
    assert isinstance(collect(ours)["call"], Done)


def test_a_target_that_does_not_load_stops_the_pool_with_its_reason(pool: Pool) -> None:
    for init, words in (("breaks", "nothing here"), ("dies", "3 processes failed during startup; the last one ended with exit status 7")):
        ours = pool(init=init)
        ours.submit("call", {})
        with pytest.raises(ChildError, match=r"cannot (load|start) served_by_test:serve: ") as caught:
            collect(ours)
        assert words in str(caught.value)


def test_a_start_that_hangs_is_not_waited_for_for_ever(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "served_by_test.py").write_text("import time\ntime.sleep(600)\n")
    ours = pool(start_timeout_s=0.3)
    ours.submit("call", {})
    with pytest.raises(ChildError, match=r"took longer than 0.3 s and was killed"):
        collect(ours)


def test_a_killed_call_takes_what_it_started_with_it(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, note = pool(timeout_s=600.0, retries=0), tmp_path / "note"
    called(ours)
    monkeypatch.setattr(pooled, "time", time_that_passes_after(lambda: note.exists() and " " in note.read_text()))
    ours.submit("call", {"do": "grandchild", "note": str(note)})
    reason(collect(ours)["call"])
    assert end_in_time(*map(int, note.read_text().split()))


@pytest.mark.parametrize("what", ["grandchild", "regex"])
def test_children_end_with_a_parent_that_is_killed_even_in_a_hung_regular_expression(tmp_path: Path, what: str) -> None:
    (tmp_path / "served_by_test.py").write_text(SERVED)
    script = (
        "from penstock.infra.sandbox.timed_pool import ChildPool\n"
        "pool = ChildPool('served_by_test:serve', size=1, timeout_s=600)\n"
        "pool.submit('warm', {})\n"
        "print(pool.poll(60)[0].result['pid'], flush=True)\n"
        f"pool.submit('call', {{'do': {what!r}, 'note': {str(tmp_path / 'note')!r}}})\n"
        "print('called', flush=True)\n"
        "pool.poll(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with child([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        assert parent.stdout.readline() == "called\n"
        if what == "grandchild":
            until(lambda: (tmp_path / "note").is_file() and len((tmp_path / "note").read_text().split()) == 2)
            pids = [int(word) for word in (tmp_path / "note").read_text().split()]
        assert any(map(runs, pids))
    assert end_in_time(*pids)


def test_ctrl_c_at_the_terminal_does_not_reach_the_children(pool: Pool) -> None:
    ours = pool()
    pid = called(ours)["pid"]
    assert os.getpgid(pid) == os.getsid(pid) == pid != os.getpgid(0)


def words(process: psutil.Process) -> list[str]:
    """Its command line, empty if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def test_closing_leaves_no_child(pool: Pool) -> None:
    ours = pool(size=2)
    ours.submit("call", {"do": "hang"})
    ours.submit("warm", {})
    ended = ours.poll(120.0)
    mine = [child.pid for child in psutil.Process().children() if "served_by_test:serve" in words(child)]  # other tests' may lie about
    assert len(mine) == 2
    assert len(ended) == 1
    ours.close()
    assert end_in_time(*mine)


def test_a_call_costs_milliseconds_at_most_and_a_child_imports_nothing_heavy(pool: Pool) -> None:
    ours = pool()
    assert called(ours)["heavy"] == []
    calls, started = 50, time.thread_time()
    for number in range(calls):
        ours.submit(number, {"completions": ["some text"] * 16})
        assert ours.poll(60.0)
    assert time.thread_time() - started < 20e-3 * calls


def test_a_cancelled_call_never_ends_and_its_child_is_free_at_once(pool: Pool) -> None:
    one = pool()
    one.submit("hangs", {"do": "hang"})
    one.submit("waits", {})
    one.submit("wanted", {})
    one.poll(1.0)
    one.cancel({"hangs", "waits"})
    results = collect(one)
    assert list(results) == ["wanted"]
    assert one.pending == 0


SIDE_BY_SIDE = """
import asyncio, os, time

def serve(init):
    under_way = set()
    async def handle(payload):
        what = payload.get("do")
        if what == "meet":  # nobody returns before all have come
            under_way.add(payload["number"])
            while len(under_way) < payload["of"]:
                await asyncio.sleep(0.001)
        if what == "wait":
            try:
                await asyncio.sleep(600)
            finally:
                open(payload["note"], "a").write("gave up,")
        if what == "block":
            time.sleep(600)
        if what == "exit":
            os._exit(5)
        if what == "leave":
            raise SystemExit("bye")
        if what == "late":
            await asyncio.sleep(0.1)
        return os.getpid()
    handle.at_once = init
    return handle
"""


@pytest.fixture
def side_by_side(tmp_path: Path, pool: Pool) -> Pool:
    (tmp_path / "served_by_test.py").write_text(SIDE_BY_SIDE)
    return pool


def test_a_coroutine_works_on_many_calls_side_by_side_and_on_no_more_than_it_says(side_by_side: Pool) -> None:
    ours = side_by_side(init=40)
    for number in range(40):
        ours.submit(number, {"do": "meet", "number": number, "of": 40})
    assert len({one.result for one in collect(ours).values()}) == 1  # type: ignore[union-attr]
    narrow = side_by_side(init=2, timeout_s=2.0, retries=0)
    for number in range(3):
        narrow.submit(number, {"do": "meet", "number": number, "of": 3})
    ended = collect(narrow)
    assert [reason(ended[number]) for number in (0, 1)] == ["took longer than 2 s"] * 2


def test_a_call_that_overruns_is_given_up_and_its_neighbours_go_on(side_by_side: Pool, tmp_path: Path) -> None:
    ours, note = side_by_side(init=8, timeout_s=1.5), tmp_path / "note"
    before = called(ours)
    ours.submit("long", {"do": "wait", "note": str(note)})
    ours.submit("late", {"do": "late"})
    ours.submit("leaves", {"do": "leave"})
    ended = collect(ours)
    assert reason(ended["long"]) == "took longer than 1.5 s"
    assert reason(ended["leaves"]).startswith("SystemExit: bye")
    assert ended["late"].result == before  # type: ignore[union-attr]
    assert note.read_text() == "gave up,gave up,"


@pytest.mark.parametrize(("what", "words"), [("block", "took longer than 1 s and was killed"), ("exit", "ended with exit status 5")])
def test_a_call_that_takes_its_child_along_fails_alone(side_by_side: Pool, what: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled, "GRACE_S", 0.3)
    ours = side_by_side(init=8, timeout_s=1.0)
    for number in range(4):
        ours.submit(number, {"do": "late"})
    ours.submit("guilty", {"do": what})
    ended = collect(ours)
    assert reason(ended.pop("guilty")) == words
    assert all(isinstance(one, Done) for one in ended.values())


def test_a_cancelled_call_is_given_up_while_its_neighbours_go_on(side_by_side: Pool, tmp_path: Path) -> None:
    ours, note = side_by_side(init=8), tmp_path / "note"
    before = called(ours)
    ours.submit("void", {"do": "wait", "note": str(note)})
    ours.submit("late", {"do": "late"})
    ours.poll(0.05)
    ours.cancel({"void"})
    ended = collect(ours)
    assert list(ended) == ["late"]
    assert ended["late"].result == before  # type: ignore[union-attr]
    until(note.exists)
    assert note.read_text() == "gave up,"


def test_half_of_the_places_taken_counts_as_half_of_the_time(side_by_side: Pool) -> None:
    ours = side_by_side(init=4)
    called(ours)
    before, started = ours.busy_s, time.monotonic()
    ours.submit("one", {"do": "late"})
    ours.submit("two", {"do": "late"})
    collect(ours)
    assert 0.099 / 2 <= ours.busy_s - before <= (time.monotonic() - started) / 2 + 0.001
