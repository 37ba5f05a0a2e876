"""Hostile code in child processes: nothing outlives its owner, limits hold, other processes stay out of reach."""

import os
import re
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import ConfigError
from penstock.infra.sandbox import spawn
from penstock.infra.sandbox import timed_pool as pooled
from penstock.infra.sandbox.keeper import limit, scope_signals
from penstock.infra.sandbox.spawn import ChildRules, Isolation
from penstock.infra.sandbox.timed_pool import ChildPool, Done
from tests.support.children import child, end_in_time, runs, time_that_passes_after
from tests.support.least_config import least_config
from tests.support.paths import ROOT

pytestmark = [pytest.mark.costly, pytest.mark.skipif(sys.platform != "linux", reason="/proc and prctl are Linux's")]
HOSTILE = """
import ctypes, os, resource, signal, socket, sys, time

libc = ctypes.CDLL(None)

def left(note):
    with open(note, "a") as file:
        file.write(f"{os.getpid()} ")
    time.sleep(600)

def forked(*steps):
    if os.fork() == 0:
        for step in steps:
            step()
        os._exit(0)

def serve(init):
    def handle(payload):
        what, note = payload["do"], payload.get("note")
        start = lambda: left(note)
        deaf = lambda: [signal.signal(number, signal.SIG_IGN) for number in (1, 2, 15)]
        if what == "setsid": forked(os.setsid, start)
        if what == "daemon": forked(os.setsid, lambda: forked(start))
        if what == "closed": forked(os.setsid, lambda: forked(lambda: os.closerange(0, 256), start))
        if what == "subreaper": libc.prctl(36, 1, 0, 0, 0); forked(os.setsid, lambda: libc.prctl(1, 0, 0, 0, 0), lambda: forked(start))
        if what == "deaf": forked(os.setsid, deaf, lambda: forked(os.setsid, start))
        if what == "group": forked(lambda: os.setpgid(0, 0), start)
        if what == "stopped": forked(os.setsid, lambda: open(note, "a").write(f"{os.getpid()} ") and None, lambda: os.kill(os.getpid(), 19))
        if what == "chain":
            forked(os.setsid, lambda: forked(os.setsid, lambda: forked(os.setsid, start), start), start)
        if note:
            while not os.path.exists(note) or len(open(note).read().split()) < (3 if what == "chain" else 1):
                time.sleep(0.001)
        if payload.get("hang"): time.sleep(600)
        if payload.get("exit"): os._exit(3)
        if what == "memory": block = bytearray(300 << 20); time.sleep(600)
        if what == "memory of many":
            for _ in range(12): forked(lambda: (bytearray(b"x") * (30 << 20), time.sleep(600)))
            time.sleep(600)
        if what == "core":
            resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
            os.chdir(os.path.dirname(payload["path"]))
            os.abort()
        if what == "descriptors":
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            kept = []
            while True: kept.append(open("/dev/null"))
        if what == "raise":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 50, 1 << 50))
        if what == "append":
            with open(payload["path"], "ab", buffering=0) as file:
                while True: file.write(bytes(1 << 20))
        if what == "seek":
            with open(payload["path"], "wb", buffering=0) as file:
                file.seek(1 << 40); file.write(b"x")
        if what == "processes":
            for _ in range(30): forked(lambda: time.sleep(600))
            time.sleep(600)
        if what == "file":
            try:
                with open(payload["path"], "wb") as file:
                    file.truncate(20_000_000)
            except OSError as error:
                return str(error)
        if what == "connect":
            try: socket.create_connection(("127.0.0.1", payload["port"]), 30).close(); return "connected"
            except OSError: return [name for _, name in socket.if_nameindex()]
        if what == "unmount": libc.umount2(payload["path"].encode(), 2)
        if what in ("list", "unmount"): return sorted(os.listdir(payload["path"]))
        if what == "garbage":
            for descriptor in range(3, 30):
                try: os.write(descriptor, payload["bytes"].encode())
                except OSError: pass
            time.sleep(600)
        if what == "reach":
            done = []
            for pid in payload["pids"] + [pid for pid in [os.getppid()] if pid > 1]:  # 1: the first of its own namespace
                for number in (0, 19, 15):
                    try: os.kill(pid, number); done.append(f"signal {number}")
                    except OSError: pass
                for name in ("environ", "mem", "maps", "fd/0"):
                    try: open(f"/proc/{pid}/{name}", "rb"); done.append(name)
                    except OSError: pass
            return done
        return os.getpid()
    return handle
"""
Pool = Callable[..., ChildPool[Any]]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    (tmp_path / "hostile_to_test.py").write_text(HOSTILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[ChildPool[Any]] = []

    def make(timeout_s: float = 60.0, **rules: Any) -> ChildPool[Any]:
        rules = {"isolate": "none", **rules}
        made.append(
            ChildPool("hostile_to_test:serve", size=1, timeout_s=timeout_s, retries=0, rules=ChildRules(section="environment", **rules))
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def result(pool: ChildPool[Any], **payload: Any) -> Any:
    pool.submit(0, payload)
    for _ in range(120):
        for ended in pool.poll(1.0):
            return ended.result if isinstance(ended, Done) else ended.reason
    raise AssertionError("the call does not end")


@pytest.mark.parametrize(
    ("what", "end"),
    [
        *((what, "exit") for what in ("setsid", "daemon", "closed", "subreaper", "deaf", "group", "stopped", "chain")),
        *((what, "close") for what in ("closed", "deaf")),
        *(pytest.param(what, "close", marks=pytest.mark.slow) for what in ("setsid", "daemon", "subreaper", "group", "stopped", "chain")),
    ],
)
def test_nothing_that_a_function_starts_outlives_its_child(pool: Pool, tmp_path: Path, what: str, end: str) -> None:
    ours, note = pool(), tmp_path / "note"
    answer = result(ours, do=what, note=str(note), exit=end == "exit")
    if end == "close":
        assert isinstance(answer, int)
        ours.close()
    else:
        assert answer == "ended with exit status 3"
    pids = list(map(int, note.read_text().split()))
    assert pids
    assert not any(map(runs, pids))


def test_a_daemon_ends_with_a_call_that_hangs(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, note = pool(timeout_s=600.0), tmp_path / "note"
    assert isinstance(result(ours, do="nothing"), int)
    monkeypatch.setattr(pooled, "time", time_that_passes_after(lambda: note.exists() and note.read_text().endswith(" ")))
    assert result(ours, do="deaf", note=str(note), hang=True) == "took longer than 600 s and was killed"
    assert not runs(int(note.read_text()))


def test_a_daemon_ends_with_the_owner_of_the_pool(tmp_path: Path) -> None:
    (tmp_path / "hostile_to_test.py").write_text(HOSTILE)
    script = (
        "from penstock.infra.sandbox.timed_pool import ChildPool\n"
        "pool = ChildPool('hostile_to_test:serve', size=1, timeout_s=600)\n"
        f"pool.submit('call', {{'do': 'deaf', 'note': {str(tmp_path / 'note')!r}}})\n"
        "print(pool.poll(60)[0].result, flush=True)\n"
        "input()\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with child([sys.executable, "-c", script], env=environment, stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline()), int((tmp_path / "note").read_text())]
        assert all(map(runs, pids))
    assert end_in_time(*pids)


@pytest.mark.parametrize(
    ("what", "rules", "words"),
    [
        ("memory", {"memory_gb": 0.2}, r"used [\d.]+ GB of memory and was killed: environment\.memory_gb is 0\.2"),
        ("memory of many", {"memory_gb": 0.2}, r"used [\d.]+ GB of memory and was killed: environment\.memory_gb is 0\.2"),
        ("processes", {"max_processes": 20}, r"had \d+ processes and was killed: environment\.max_processes is 20"),
        ("file", {"file_gb": 0.01}, r"\[Errno 27\] File too large"),
        ("append", {"file_gb": 0.01}, r"OSError: \[Errno 27\] File too large .*"),
        ("seek", {"file_gb": 0.01}, r"OSError: \[Errno 27\] File too large .*"),
        ("raise", {"file_gb": 0.01}, r"ValueError: not allowed to raise maximum limit .*"),
        ("descriptors", {}, r"OSError: \[Errno 24\] Too many open files: .*"),
        ("core", {}, r"ended with signal SIGABRT"),
    ],
)
def test_what_exceeds_a_limit_fails_with_the_key_and_the_next_call_is_answered(
    pool: Pool, tmp_path: Path, what: str, rules: dict[str, Any], words: str
) -> None:
    ours = pool(**rules)
    assert re.fullmatch(words, str(result(ours, do=what, path=str(tmp_path / "file"))))
    assert isinstance(result(ours, do="nothing"), int)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("core")]


@pytest.mark.parametrize(
    "written", ["garbage\n", "[]\n", "17\n", '{"call": 99}\n', '{"broken": "all"}\n', "[" * 5000 + "\n", "\udcff\x00\n"]
)
def test_what_a_function_writes_to_the_pipe_of_answers_costs_its_call(pool: Pool, written: str) -> None:
    ours = pool()
    assert result(ours, do="garbage", bytes=written.replace("\udcff", "ÿ")) == "wrote to the pipe that carries results and was killed"
    assert isinstance(result(ours, do="nothing"), int)


def _landlock() -> bool:
    """True if this kernel can scope signals; asked in a process of its own, as it cannot be undone."""
    with child([sys.executable, "-c", f"from {scope_signals.__module__} import scope_signals; print(scope_signals())"], stdout=-1) as asked:
        assert asked.stdout is not None
        return bool(asked.stdout.read() == b"True\n")


def _skip_without(isolate: Isolation) -> None:
    if spawn.bwrap_fault(ChildRules(section="reward", isolate_network=True)) if isolate == "bwrap" else not _landlock():
        pytest.skip(f"{isolate} does not work here")


@pytest.mark.parametrize("isolate", ["landlock", "bwrap"])
def test_an_isolated_child_reaches_neither_its_owner_nor_its_keeper_nor_a_sibling(pool: Pool, isolate: Isolation) -> None:
    _skip_without(isolate)
    with child(["sleep", "600"]) as bystander:
        ours, sibling = pool(isolate=isolate), pool(isolate=isolate)
        pids = [os.getpid(), bystander.pid, result(sibling, do="nothing")]
        reached = result(ours, do="reach", pids=pids if isolate == "landlock" else pids[:2])
        assert reached == []
        assert bystander.poll() is None


@pytest.mark.parametrize(("isolate", "network"), [("bwrap", True), ("bwrap", False), ("auto", False)])
def test_a_child_has_the_network_unless_it_is_isolated(pool: Pool, isolate: Isolation, network: bool) -> None:
    _skip_without("bwrap")
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = result(pool(isolate=isolate, isolate_network=not network), do="connect", port=server.getsockname()[1])
    assert answer == ["lo"] if not network else answer == "connected"


@pytest.mark.parametrize("link", [None, "home", "home/broker"])
def test_under_bwrap_the_files_of_the_embedded_broker_are_hidden(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str | None
) -> None:
    _skip_without("bwrap")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    if link is not None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "home" / "broker").mkdir(parents=True, exist_ok=True)
    (tmp_path / "home" / "broker" / "password").write_text("hunter2")
    (tmp_path / "home" / "seen").write_text("")
    ours = pool(isolate="bwrap")
    assert result(ours, do="list", path=str(tmp_path / "home")) == ["broker", "seen"]
    assert result(ours, do="list", path=str(tmp_path / "home" / "broker")) == []
    assert result(ours, do="unmount", path=str(tmp_path / "home" / "broker")) == []


@pytest.mark.parametrize("home", ["loop", "file/home", "absent", "\udcff"])
def test_a_state_directory_without_a_broker_hides_nothing_under_bwrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / home))
    assert "--tmpfs" not in spawn.bwrap_command(ChildRules(section="reward", isolate="bwrap"))


@pytest.mark.parametrize(("isolate", "section"), [("bwrap", "reward"), ("bwrap", "environment"), ("auto", "reward")])
def test_bwrap_where_it_does_not_work_is_a_line_and_auto_does_without(
    isolate: Isolation, section: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    spawn.chosen_isolation.cache_clear()
    rules = ChildRules(section=section, isolate=isolate)
    if isolate == "bwrap":
        with pytest.raises(ConfigError, match=rf'^{section}\.isolate = "bwrap": bwrap is not installed: apt-get install bubblewrap'):
            spawn.chosen_isolation(rules)
    else:
        assert [spawn.chosen_isolation(rules) for _ in range(3)] == ["landlock"] * 3
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == ['reward.isolate = "auto"']
        with pytest.raises(ConfigError, match=r"^reward\.isolate_network = true: bwrap is not installed: apt-get .*; or set it to false$"):
            spawn.chosen_isolation(replace(rules, isolate_network=True))
    spawn.chosen_isolation.cache_clear()


@pytest.mark.parametrize(
    ("section", "keys", "words"),
    [
        ("reward", {}, 'needs reward.isolate = "bwrap" or "auto"'),
        ("reward", {"isolate": "none"}, 'needs reward.isolate = "bwrap" or "auto"'),
        ("environment", {"isolate": "landlock"}, 'needs environment.isolate = "bwrap" or "auto"'),
        (
            "reward",
            {"isolate": "auto", "functions": ["exact_match", "http://judge:8000/x"]},
            "http needs the network",
        ),
        ("environment", {"isolate": "bwrap", "source": "openenv:ws://game:80"}, "openenv needs the network"),
        ("environment", {"isolate": "bwrap", "source": "agent:python a.py"}, "agent needs the network"),
    ],
)
def test_an_isolated_network_needs_bwrap_and_code_that_does_without(section: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.isolate_network: {re.escape(words)}"):
        least_config(**{section: {**keys, "isolate_network": True}})


def test_the_limits_are_keys_of_both_sections() -> None:
    keys = {"memory_gb": 2.0, "max_processes": 7, "file_gb": 1.5, "isolate": "auto", "isolate_network": True}
    config = least_config(reward=keys, environment={**keys, "max_processes": 9})
    assert config.reward.rules() == ChildRules(section="reward", **keys)  # type: ignore[arg-type]
    assert config.environment.rules().max_processes == 9


FREE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("hard", "most", "for_good", "expected"),
    [
        (FREE, 100, True, (100, 100)),
        (FREE, 100, False, (100, FREE)),
        (50, 100, True, (50, 50)),
        (50, 100, False, (50, 50)),
        (100, 100, True, (100, 100)),
        (200, 100, True, (100, 100)),
        (200, 100, False, (100, 200)),
        (0, 100, False, (0, 0)),
    ],
)
def test_a_limit_is_never_above_the_hard_limit(
    monkeypatch: pytest.MonkeyPatch, hard: int, most: int, for_good: bool, expected: tuple[int, int]
) -> None:
    limits = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (0, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    limit(resource.RLIMIT_DATA, most, for_good=for_good)
    assert limits == [expected]
