"""The embedded broker asks for its password at every port: other users and older clients get nothing, its user notices nothing."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.infra.broker import access, embedded, settings
from penstock.infra.broker.access import Login
from penstock.infra.errors import BrokerError, LogError
from penstock.infra.kafka.bulk import BulkReader
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.kafka.settings import Connection, librdkafka
from penstock.infra.paths import write_private
from tests.support.log_helpers import make_topics, values_in, write
from tests.support.paths import ROOT
from tests.support.refusals import one_line

NOBODY = 65534
OPEN = {
    "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "listener.name.client.plain.sasl.jaas.config": "",
    "listener.name.controller.plain.sasl.jaas.config": "",
}
"""What a broker of a release without a password was started with."""

# Told the two ports and nothing else: prints what it was allowed to do.
STRANGER = """
import struct, sys
from contextlib import closing
from penstock.infra.broker.access import Login
from penstock.infra.broker.access import Refused, Session
APIS = {"produce": (0, 12), "fetch": (1, 12), "offsets": (2, 6), "list topics": (3, 2), "create": (19, 5), "delete": (20, 5),
        "acls": (30, 2), "settings": (33, 1), "groups": (16, 3), "passwords": (51, 0), "vote": (52, 0),
        "fetch a snapshot": (59, 0), "register": (62, 0)}
LOGINS = {
    "scram": [("penstock", ""), ("penstock", "wrong"), ("broker", ""), ("", "")],
    "plain": [("penstock", ""), ("penstock", "wrong"), ("broker", ""), ("broker", "wrong"), ("broker", "broker"), ("", "")],
}
for port in map(int, sys.argv[1:]):
    for what, api in APIS.items():
        try:
            with closing(Session("127.0.0.1", port, timeout_s=30)) as session:
                print(port, what, session.request(api, struct.pack(">i", 0), flexible=api[0] in (51, 52, 59, 62)))
        except (OSError, struct.error):
            pass
    for way, logins in LOGINS.items():
        for user, password in logins:
            try:
                with closing(Session("127.0.0.1", port, timeout_s=30)) as session:
                    (session.log_in if way == "scram" else session.log_in_plainly)(Login(user, password))
                    print(port, way, user, password)
            except (Refused, OSError, struct.error, ValueError, KeyError):
                pass
print("done")
"""


def without_password(**given: object) -> str:
    text = STOCK(**given)  # type: ignore[arg-type]
    lines = {**dict(line.split("=", 1) for line in text.splitlines()), **OPEN}
    return "".join(f"{name}={value}\n" for name, value in lines.items() if value)


STOCK = settings.server_properties


@pytest.fixture(scope="module")
def upgraded(new_home: Callable[[], Path]) -> Iterator[tuple[Path, str, KafkaLog]]:
    """A broker whose directory was made without a password, started with one; its topic, and a log that was opened before."""
    home = new_home()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "server_properties", without_password)
        before = embedded.start(home=home)
        assert access.read_login(home / "broker") is None
        old = KafkaLog(before.bootstrap, give_up_s=3)
        (topic,) = make_topics(old, "kept", "a", partitions=1)
        write(old, topic, [b"before"])
        assert embedded.start(home=home).pid == before.pid  # it is used as it is until it is started again
    embedded.stop(home)
    assert embedded.start(home=home).bootstrap == before.bootstrap
    yield home, topic, old
    old.close()
    embedded.stop(home)


def test_a_broker_without_a_password_gets_one_at_its_next_start_and_both_clients_read_its_topics(
    upgraded: tuple[Path, str, KafkaLog],
) -> None:
    home, topic, _ = upgraded
    log = KafkaLog(embedded.status(home).bootstrap)
    assert values_in(log, topic) == [b"before"]
    (records,) = BulkReader(log.connection).read(topic, 0, first=0, end=1)
    assert [record.value for record in records] == [b"before"]
    log.close()


def test_a_log_that_was_opened_without_a_password_gives_up_in_one_line(upgraded: tuple[Path, str, KafkaLog]) -> None:
    home, topic, old = upgraded
    with one_line(LogError) as refused:
        old.end_offsets([(topic, 0)])
    assert embedded.status(home).bootstrap in str(refused.value)


def test_what_holds_a_password_is_its_users_alone_and_no_log_or_argument_has_it(upgraded: tuple[Path, str, KafkaLog]) -> None:
    home, _, _ = upgraded
    directory, pid = home / "broker", embedded.status(home).pid
    user, own = access.read_login(directory), settings.own_password((directory / "server.properties").read_text())
    assert user is not None
    assert own is not None
    for name in (access.LOGIN_FILE, "server.properties", "ports.json"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600, name
    logged = b"".join(file.read_bytes() for file in (directory / "logs").iterdir())
    shown = logged + Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    for password in (user.password, own):
        assert password.encode() not in shown
        assert len(password) >= 43
    assert user.password not in repr(user)


@pytest.mark.parametrize("uid", [None, NOBODY], ids=["without the state directory", "of another user"])
def test_a_process_that_knows_the_ports_can_do_nothing(upgraded: tuple[Path, str, KafkaLog], uid: int | None) -> None:
    home, topic, _ = upgraded
    command, chosen = [sys.executable, "-c", STRANGER], access.remembered_ports(home / "broker")
    if uid is not None:
        command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]
        if (
            os.geteuid()
            or subprocess.run([*command[:-2], "-c", "import penstock.infra"], cwd="/", check=False, capture_output=True).returncode
        ):
            pytest.skip("needs root, and a Python that others may run")
    assert chosen is not None
    environment = {"PATH": os.environ["PATH"], "HOME": "/", "PENSTOCK_HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, str(chosen.client), str(chosen.controller)],
        cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("done\n", "")
    log = KafkaLog(f"127.0.0.1:{chosen.client}")
    assert log.topics() == [topic]
    assert values_in(log, topic) == [b"before"]
    log.close()


def test_a_password_that_was_removed_or_changed_is_replaced_while_the_broker_runs(upgraded: tuple[Path, str, KafkaLog]) -> None:
    home, topic, _ = upgraded
    before, file = embedded.status(home), home / "broker" / access.LOGIN_FILE
    for lost in (True, False):
        old = file.read_text()
        file.unlink()
        if not lost:
            write_private(file, re.sub("password=.*", "password=another", old))
        assert embedded.start(home=home).pid == before.pid
        assert file.read_text() != old
        log = KafkaLog(before.bootstrap)
        assert values_in(log, topic) == [b"before"]
        log.close()


@pytest.mark.parametrize(
    ("rotated", "listens"),
    [
        ({}, True),
        ({"broker.log.1": "line"}, True),  # its first part, which is the newest file but one
        ({"broker.log.1": "line", "broker.log.2": "other"}, True),
        ({"broker.log.1": "other"}, None),
        ({"broker.log.1": "other", "broker.log.2": "other"}, None),
        ({"old/broker.log.1": "line"}, False),  # of a broker that ran before
    ],
)
def test_the_proof_of_the_port_is_looked_for_in_rotated_logs_too_and_its_loss_is_one_line(
    tmp_path: Path, rotated: dict[str, str], *, listens: bool | None
) -> None:
    files, said = embedded._Files(tmp_path), {"line": "before" * 9 + "Awaiting socket connections on 127.0.0.1:9\n", "other": "before" * 20}
    files.log.parent.mkdir(parents=True)
    files.pid_file.write_text(json.dumps({"pid": 1, "started": "x", "log_bytes": 54}))
    os.utime(files.pid_file, (1000, 1000))
    files.log.write_text(said["other"] if rotated else said["line"])
    for number, (name, text) in enumerate(rotated.items()):
        file = files.log.parent / Path(name).name
        file.write_text(said[text])
        os.utime(file, (at := 900 if name.startswith("old/") else 1000 + number, at))
    if listens is None:
        with one_line(BrokerError, match=r"log has been rotated.*`penstock broker stop`, then start it again"):
            embedded._listens(files, 9)
        return
    assert embedded._listens(files, 9) == listens
    assert not embedded._listens(embedded._Files(tmp_path / "none"), 9)


def test_another_program_at_the_brokers_port_learns_no_password_and_is_not_the_broker() -> None:
    heard = b""
    user = Login("penstock", "hunter2-of-the-broker")

    def serve(server: socket.socket) -> None:
        nonlocal heard
        handshake = b"\0\0\0\1" + b"\0\0" + b"\0\0\0\1" + b"\0\5PLAIN"
        connection, _ = server.accept()
        with connection:
            heard += connection.recv(1000)
            connection.sendall(len(handshake).to_bytes(4, "big") + handshake)
            heard += (message := connection.recv(1000))
            nonce = message.rpartition(b"r=")[2]
            for text in (b"r=" + nonce + b"x,s=c2FsdA==,i=1", b"v=d3Jvbmc="):
                response = b"\0\0\0\1" + b"\0\0" + b"\xff\xff" + len(text).to_bytes(4, "big") + text
                connection.sendall(len(response).to_bytes(4, "big") + response)
                heard += connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        assert access.cluster_id("127.0.0.1", server.getsockname()[1], timeout_s=30, login=user) is None
        thread.join()
    assert b"p=" in heard
    assert b"hunter2" not in heard


@pytest.mark.parametrize(
    ("bootstrap", "own"),
    [
        ("127.0.0.1:20001", True), ("localhost:20001", True), (" 127.0.0.1:20001 ", True), ("127.0.0.1:20002", False),
        ("127.0.0.2:20001", False), ("broker:20001", False), ("127.0.0.1:20001,127.0.0.1:20001", False), ("127.0.0.1:120001", False),
        ("[::1]:20001", False), ("0.0.0.0:20001", False),
    ],
)  # fmt: skip
def test_the_login_goes_to_the_address_of_the_own_broker_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bootstrap: str, *, own: bool
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setattr(access, "started", set())
    directory = tmp_path / "broker"
    directory.mkdir()
    write_private(directory / "ports.json", '{"client": 20001, "controller": 20002}')
    assert access.login_at(bootstrap) is None
    made = access.ensure_login(directory)
    assert access.ensure_login(directory) == made
    assert access.login_at(bootstrap) == (made if own else None)
    if own:
        settings_of_c = librdkafka(Connection(bootstrap=bootstrap.strip(), client_id="c", security={"ssl_cafile": "/no/such"}))
        assert settings_of_c["sasl.password"] == made.password
        assert "ssl.ca.location" not in settings_of_c


@pytest.mark.parametrize("text", ["", "sasl.username=penstock\n", "sasl.password=x\n", "\n\n", "\x00", "pässword"])
def test_a_damaged_file_of_the_password_is_one_line_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / access.LOGIN_FILE).write_text(text, encoding="utf-8")
    with one_line(BrokerError) as refused:
        access.read_login(tmp_path)
    assert re.search(r"client\.properties .*: remove it, then", str(refused.value))


def test_a_private_file_is_private_whatever_was_there_and_whatever_the_umask(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("open to all")
    file.chmod(0o666)
    child = "import os, sys, pathlib, penstock.infra.paths as p; os.umask(0); p.write_private(pathlib.Path(sys.argv[1]), 'x')"
    subprocess.run([sys.executable, "-c", child, str(file)], cwd=ROOT, check=True)
    assert file.read_text() == "x"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]
