"""A run leaves its machine: by a backup, made during an open transaction and restored from a store, or by a shared store alone."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.infra.broker import embedded
from penstock.infra.broker.settings import Listener
from penstock.infra.errors import ConfigError, PenstockError, RunNotFound
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline.archive import backup
from penstock.pipeline.archive.archived_log import ArchivedLog, ArchivedSource
from penstock.pipeline.archive.backup import MODEL, download, restore_checkpoints, upload
from penstock.pipeline.archive.export import export
from penstock.pipeline.archive.files import Archive, find_archive
from penstock.pipeline.archive.import_run import import_run
from penstock.pipeline.config.load import from_json, to_json
from penstock.pipeline.config.resume import changed
from penstock.pipeline.inspect.audit.report import as_text, audit
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.runtime.registration.run_registry import registration, write
from penstock.pipeline.runtime.registration.trust import adopt_run
from tests.support.bare_clients import python_client
from tests.support.children import end_in_time
from tests.support.launched import toml_of
from tests.support.log_helpers import open_transaction, outgoing
from tests.support.own_broker import OwnBroker
from tests.support.refusals import one_line
from tests.support.worker_set import WorkerSet, clean, complete, config_of, finish

TOY = {"run": {"steps": 8, "seed": 7}, "rollout": {"workers": 1, "engine": "toy"}, "trainer": {"checkpoint_every": 2}}
LIMIT_S = 400.0
SLOW_UNTIL_TOLD = """
import time
from pathlib import Path

def share(prompts, completions, **columns):
    if not Path(__file__).with_name("quick").exists():
        time.sleep(0.3)
    return [sum(c.isdigit() for c in text) / 8 for text in completions]
"""
"""A reward that takes long until a file is there: a backup is made before the run is over."""


@pytest.mark.slow
def test_a_run_restored_elsewhere_from_a_backup_under_load_and_an_open_transaction_ends_in_the_same_weights(
    broker: str, log: KafkaLog, own_broker: OwnBroker, run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    model, directory, uri = tmp_path / "model", tmp_path / "archive", (tmp_path / "store").as_uri()
    shutil.copytree(tiny_model, model)
    config = config_of(model, tmp_path, **TOY)
    (tmp_path / "digits.py").write_text(SLOW_UNTIL_TOLD)
    (tmp_path / "quick").touch()
    plain = complete(MemoryLog(), f"{run_id}-plain", config)
    (tmp_path / "quick").unlink()
    archive = Archive(directory, run_id)
    with WorkerSet(broker, run_id) as live:
        live.create(config)
        live.start_all(config)
        live.wait(lambda: live.report()["steps"] >= 3)
        groups = f"{run_id}.groups"
        opened = open_transaction(log, [outgoing(groups, b"never committed", partition=1)])
        export(log, run_id, directory, backup=True)
        upload(archive, uri)
        note = archive.note()
        assert note is not None
        assert note.ends["groups"][1] == log.end_offsets([(groups, 1)])[groups, 1]
        assert note.ends["groups"][1] < log.end_offsets([(groups, 1)], committed=False)[groups, 1]
        opened.abort()
        live.wait(lambda: live.report()["steps"] >= 5)
        export(log, run_id, directory, backup=True)  # adds records, and replaces the checkpoint
        upload(archive, uri)
    (tmp_path / "quick").touch()
    shutil.rmtree(run_directory(run_id))
    shutil.rmtree(model)
    shutil.rmtree(directory)

    restored = download(f"{uri}/{run_id}", tmp_path / "elsewhere")
    assert download(f"{uri}/{run_id}", tmp_path / "elsewhere").note() == restored.note()
    archived = audit(ArchivedSource(ArchivedLog(find_archive(restored.path))))
    assert archived.clean, as_text(archived)
    cluster = own_broker.start()
    other = KafkaLog(cluster)
    import_run(other, restored)
    restore_checkpoints(restored, run_id)
    adopt_run(other, run_id)
    record = registration(other, run_id).record
    assert record is not None
    moved = changed(from_json(record.config), [f"model.path={restored.path / MODEL}"], run=run_id)
    write(other, replace(record, config=to_json(moved)))
    report = finish(cluster, run_id, config=moved)
    assert load(other, run_id).workers["trainer"].values["recovered_from_step"] in (4, 6)
    assert report["weights"]["digest"] == plain["weights"]["digest"]
    assert (report["groups"], report["reward"]) == (plain["groups"], plain["reward"])
    other.close()
    clean(cluster, run_id)


def test_folders_that_only_an_unsigned_record_names_are_not_copied(
    broker: str, log: KafkaLog, run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    with WorkerSet(broker, run_id) as created:
        created.create(config_of(tiny_model, tmp_path, **TOY))
    shutil.rmtree(run_directory(run_id))  # with the key, as on another machine
    with pytest.raises(ConfigError, match=f"no key on this machine has signed that record: .* penstock topics adopt {run_id}$"):
        export(log, run_id, tmp_path / "archive", backup=True)
    assert not (tmp_path / "archive" / run_id / MODEL).exists()
    assert export(log, run_id, tmp_path / "archive").rows["run"] == 1


@pytest.mark.parametrize(
    ("uri", "reason"), [("file:///no/such/run", "No such file"), ("nowhere://bucket/run", "nowhere"), ("s3://", "separator")]
)
def test_a_store_that_cannot_be_read_is_one_line(tmp_path: Path, uri: str, reason: str) -> None:
    with one_line(PenstockError, match=f"^--store .*({reason})"):
        download(uri, tmp_path)


def test_hidden_and_unfinished_files_of_a_store_are_left_there(tmp_path: Path) -> None:
    store = tmp_path / "store" / "mine"
    (store / "a").mkdir(parents=True)
    (store / "export.json").write_text("{}")
    (store / "a" / ".hidden").write_text("hidden")
    (store / "a" / "0.parquet.part").write_text("unfinished")
    assert download(store.as_uri(), tmp_path / "here").path == tmp_path / "here" / "mine"
    assert [path.name for path in (tmp_path / "here").rglob("*") if path.is_file()] == ["export.json"]


def test_an_archive_goes_to_an_object_store_and_back_with_what_has_changed(run_id: str, tmp_path: Path) -> None:
    if (s3 := os.environ.get("PENSTOCK_S3")) is None:
        pytest.skip("PENSTOCK_S3 names no folder, as s3://BUCKET/F?region=us-east-1&endpoint_override=HOST:PORT&scheme=http")
    archive = Archive(tmp_path / "here", run_id)
    files = {"export.json": b"{}", "groups/partition=0/00000000000000000000.parquet": b"rows", "checkpoints/step-00000001/state": b"one"}
    for name, data in files.items():
        (archive.path / name).parent.mkdir(parents=True, exist_ok=True)
        (archive.path / name).write_bytes(data)
    upload(archive, s3)
    there = s3.replace("?", f"/{run_id}?")

    def fetched(folder: str) -> dict[str, bytes]:
        copy = download(there, tmp_path / folder).path
        return {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()}

    assert fetched("first") == files
    (archive.path / "checkpoints/step-00000001").rename(archive.path / "checkpoints/step-00000002")
    upload(archive, s3)
    assert fetched("second").keys() == {name.replace("0001", "0002") for name in files}


def test_no_name_in_a_store_leads_out_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store" / "mine"
    store.mkdir(parents=True)
    (store / "export.json").write_text("{}")
    (store.parent / "evil").write_text("x")
    monkeypatch.setattr(backup, "_sizes", lambda *_: {"export.json": 2, "../evil": 1})  # an object store may have such a name
    with pytest.raises(PenstockError, match=r"contains '\.\./evil'"):
        download(store.as_uri(), tmp_path / "here")
    assert not (tmp_path / "here" / "evil").exists()


HOST, GUEST = "10.213.77.1", "10.213.77.2"


@contextmanager
def machine(name: str) -> Iterator[list[str]]:
    """A network namespace that reaches nothing but HOST; yields the words before a command that runs in it. Its processes end with it."""
    inside = ["ip", "netns", "exec", name]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for line in (
            f"link add {name} type veth peer name eth0 netns {name}",
            f"link set {name} up",
            f"route add {GUEST} dev {name}",
            f"-n {name} link set lo up",
            f"-n {name} addr add {GUEST}/32 dev eth0",
            f"-n {name} link set eth0 up",
            f"-n {name} route add {HOST} dev eth0",
        ):
            subprocess.run(["ip", *line.split()], check=True)
        yield inside
    finally:
        running = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True).stdout.split()
        for pid in map(int, running):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert end_in_time(*map(int, running))
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def host_address() -> Iterator[None]:
    """HOST is an address of this machine."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip: each machine is a network namespace")
    subprocess.run(["ip", "addr", "add", f"{HOST}/32", "dev", "lo"], check=True)
    yield
    subprocess.run(["ip", "addr", "del", f"{HOST}/32", "dev", "lo"], check=True)


@pytest.mark.slow
@pytest.mark.usefixtures("host_address")
def test_a_run_whose_machine_is_lost_is_resumed_on_another_that_shares_only_broker_and_store(
    new_home: Callable[[], Path], tiny_model: Path, tmp_path: Path
) -> None:
    served, first, second, store = new_home(), new_home(), new_home(), tmp_path / "store"
    shutil.copytree(tiny_model, store / "model")
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    local, bootstrap = embedded.start(home=served, listener=Listener(HOST, port, f"{HOST}:{port}")).bootstrap, f"{HOST}:{port}"
    config = config_of(store / "model", store, **{**TOY, "run": {"steps": 40, "seed": 7}})
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"checkpoint_dir": str(store / "checkpoints")})})
    plain = complete(MemoryLog(), "plain", config.model_copy(update={"trainer": config.trainer.model_copy(update={"checkpoint_every": 0})}))
    keys = ("security_protocol", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password")
    security = {name: value for name, value in python_client(local).items() if name in keys}

    def command(inside: list[str], home: Path, *words: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, "PENSTOCK_HOME": str(home), "HOME": str(home), "PENSTOCK_SECURITY": json.dumps(security)}
        line = [*inside, sys.executable, "-m", "penstock", "run", *words, "--bootstrap", bootstrap, "--json"]
        return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with WorkerSet(local, "moved") as watching, machine("penstock-lost") as inside:
        launcher = command(inside, first, str(toml_of(config, tmp_path)), "--run-id", "moved")

        def trained() -> bool:
            assert launcher.poll() is None, launcher.communicate()
            with suppress(RunNotFound):  # its topics are made before it is registered
                return watching.report()["steps"] >= 5
            return False

        watching.wait(trained)
    launcher.communicate()
    shutil.rmtree(first)
    (store / "model").rename(store / "same-model")
    with machine("penstock-next") as inside:
        resumed = command(inside, second, "--resume", "moved", "--set", f"model.path={store / 'same-model'}", "--trust-code")
        printed, lines = resumed.communicate(timeout=LIMIT_S)
    assert resumed.returncode == 0, lines
    report = json.loads(printed)
    assert report["weights"]["digest"] == plain["weights"]["digest"]
    log = (second / "runs" / "moved" / "logs" / "trainer.log").read_text()
    assert re.search(r"checkpoint of step \d+ loaded in", log)
    clean(local, "moved")
