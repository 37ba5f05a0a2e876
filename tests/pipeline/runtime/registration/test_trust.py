"""Who may make code run: the owner by the run's key, the operator by --trust-code; and which run `latest` is."""

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.infra.errors import ConfigError
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.load import from_json
from penstock.pipeline.launch.run_lock import folder_of
from penstock.pipeline.replay.rescore import RescoreRequest, score_run
from penstock.pipeline.runtime.registration.run_registry import (
    key_path,
    make_key,
    own_runs,
    registration,
    resolve,
    signed,
    write,
    write_status,
)
from penstock.pipeline.runtime.registration.trust import (
    MLFLOW_SECRETS,
    NO_TRUST,
    Trust,
    adopt_run,
    as_block,
    require_own_server,
    require_trusted,
    shown,
)
from penstock.pipeline.runtime.session import join
from penstock.topics.catalogue import topic_name
from penstock.topics.runs import RunRecord
from tests.support.a_run import CONFIG, RUN, RecordBuilder
from tests.support.page_records import log_with, register

OWN = json.dumps({**CONFIG, "reward": {"functions": ["os:system?command=touch /tmp/x\x1b[2J"]}})
PLAIN = RunRecord(run=RUN, status="created", config=json.dumps(CONFIG), info='{"steps": 3}', created_ns=1, updated_ns=1)
CODE = replace(PLAIN, config=OWN)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    return tmp_path


def described(record: RunRecord) -> MemoryLog:
    log = log_with()
    write(log, record)
    return log


def tried(log: MemoryLog, trust: Trust = NO_TRUST, *, role: str = "scorer") -> str | None:
    """Join as a worker: the error, or None."""
    try:
        session = join(run=RUN, role=role, log=log, worker=f"{role}-0", model=None, stop=threading.Event(), trust=trust)
    except ConfigError as error:
        return str(error)
    assert session is not None
    session.close(status="finished")
    return None


def test_a_worker_without_the_key_runs_a_configuration_without_code() -> None:
    log = described(PLAIN)
    assert tried(log) is None


def test_a_worker_without_the_key_shows_the_code_in_one_block_and_asks_for_trust(capsys: pytest.CaptureFixture[str]) -> None:
    log = described(CODE)
    refused = tried(log)
    assert refused and "--trust-code" in refused and "--run-key FILE" in refused and "\n" not in refused
    assert "reward.functions  os:system?command=touch /tmp/x\\x1b[2J" in capsys.readouterr().out
    assert tried(log, Trust(code=True)) is None


def test_the_key_in_the_state_directory_or_in_a_file_vouches_for_code(tmp_path: Path) -> None:
    log = log_with([])
    make_key(RUN)
    write(log, CODE)
    assert tried(log) is None
    moved = key_path(RUN).rename(tmp_path / "elsewhere.key")
    assert "would execute code that no key on this machine has signed" in (tried(log) or "")
    assert tried(log, Trust(run_key=moved)) is None
    make_key("another")
    assert "no record of" in (tried(log, Trust(run_key=key_path("another"))) or "")


def test_records_that_the_key_does_not_fit_are_named_once_and_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    log = log_with([])
    make_key(RUN)
    write(log, PLAIN)
    for evil in (CODE, signed(CODE, bytes(32), revision=9)):
        register(log, evil, topic=f"{RUN}.run")
    assert tried(log) is None
    said = capsys.readouterr().out
    assert said.count("ignoring 2 records that the run's key did not sign, at offsets 1, 2") == 1


def test_the_register_configures_nothing_and_only_a_run_that_exists_is_refused_for_it() -> None:
    log = log_with([])
    register(log, CODE)
    refused = tried(log, Trust(code=True)) or ""
    assert "penstock topics adopt" in refused and "has no signed configuration" in refused
    log.delete_topics([topic_name(RUN, name) for name in ("run", "ledger")])
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()  # a run that is only in the register is waited for
    assert join(run=RUN, role="scorer", log=log, worker="scorer-0", model=None, stop=stop) is None


def test_a_run_of_an_earlier_release_is_adopted_as_its_ledger_says_it_is() -> None:
    old = RecordBuilder()
    log = log_with([old.record(), old.opened()])
    log.delete_topics([topic_name(RUN, "run")])
    register(log, CODE)
    text = shown(log, RUN)
    assert text and "executes no user code" in text and f"from {RUN}.ledger" in text
    adopt_run(log, RUN)
    found = registration(log, RUN)
    assert found.record and (found.signed, json.loads(found.record.config)) == (True, old.config)
    assert shown(log, RUN) is None
    assert tried(log) is None


def test_an_unsigned_run_is_adopted_as_its_own_topic_says_and_its_code_is_shown() -> None:
    log = described(CODE)
    assert "os:system?command=touch" in (shown(log, RUN) or "")
    adopt_run(log, RUN)
    assert tried(log) is None


@pytest.mark.parametrize("run", [RUN, "unheard-of"])
def test_what_no_record_says_is_not_adopted(run: str) -> None:
    log = log_with([])
    if run == RUN:
        write_status(log, PLAIN)
    with pytest.raises(ConfigError):
        adopt_run(log, run)
    assert not key_path(run).exists()


def test_scoring_again_loads_what_the_record_names_only_when_it_is_trusted() -> None:
    log = log_with([RecordBuilder().opened()])
    write(log, CODE)
    said: list[str] = []
    with pytest.raises(ConfigError, match="--trust-code"):
        score_run(log, RUN, RescoreRequest(), notify=said.append)
    assert [line.startswith(f"run {RUN} would execute this code") for line in said] == [True]
    for request in (
        RescoreRequest(functions=["exact_match"]),
        RescoreRequest(overrides=['reward.functions=["exact_match"]']),
        RescoreRequest(trust=Trust(code=True)),
    ):
        assert score_run(log, RUN, request, notify=lambda _: None)["written"] is None
    register(log, replace(CODE, config=json.dumps({**CONFIG, "algorithm": {"advantage": "os:getcwd"}})), topic=f"{RUN}.run")
    assert score_run(log, RUN, RescoreRequest(), notify=said.append)["written"] is None
    with pytest.raises(ConfigError, match="--trust-code"):  # the new run would be signed as a whole
        score_run(log, RUN, RescoreRequest(write="new"), notify=said.append)


def test_shown_code_is_one_line_each_and_of_bounded_length() -> None:
    block = as_block("r", [("reward.functions", "a:b\nrun r is safe\u202e"), ("data.source", "x" * 5000)])
    assert block.splitlines()[1] == "  reward.functions  a:b\\nrun r is safe\\u202e"
    assert block.splitlines()[2].endswith("… and 4000 more characters")
    assert len(block.splitlines()) == 3


def test_a_configuration_is_judged_as_a_whole_unless_less_is_executed() -> None:
    log = described(CODE)
    found = registration(log, RUN)
    assert require_trusted(found, trust=NO_TRUST, notify=print, code=[]).config == OWN
    with pytest.raises(ConfigError, match="would execute code that no key on this machine has signed"):
        require_trusted(found, trust=NO_TRUST, notify=lambda _: None)


def registered(log: MemoryLog, run: str, created_ns: int) -> None:
    register(log, replace(PLAIN, run=run, config="{}", created_ns=created_ns))


def test_latest_is_this_users_newest_run_whatever_date_others_register() -> None:
    log, now_ns = log_with([]), time.time_ns()
    for run, created_ns in (("mine-1", 5), ("theirs", now_ns), ("mine-2", 4), ("mallory", now_ns + 10**18)):
        registered(log, run, created_ns)
    with pytest.raises(ConfigError, match="pass a run id"):
        resolve(log, "latest", executes=True)
    assert resolve(log, "latest") == "theirs"
    for number, run in enumerate(("mine-1", "mine-2", "elsewhere")):
        make_key(run)
        os.utime(key_path(run), (100.0 + number, 100.0 + number))
    assert own_runs() == ["mine-1", "mine-2", "elsewhere"]
    assert (resolve(log, "latest", executes=True), resolve(log, "latest")) == ("mine-2", "theirs")
    late = time.time() + 1e6
    os.utime(key_path("mine-2"), (late, late))
    assert resolve(log, "latest", executes=True) == "mine-1"
    assert resolve(log, "mal", executes=True) == "mallory"


def test_the_folder_of_latest_has_a_key_or_a_launchers_lock(home: Path) -> None:
    with pytest.raises(ConfigError, match="no run on this machine"):
        folder_of("latest")
    (home / "runs" / "seen" / "logs").mkdir(parents=True)
    (home / "runs" / "old").mkdir()
    (home / "runs" / "old" / "launcher.lock").touch()
    (home / "runs" / "link").symlink_to(home / "runs" / "old")
    assert folder_of("latest").name == "old"
    assert folder_of("see").name == "seen"


@pytest.mark.parametrize(
    ("mlflow", "environment", "trust", "refused"),
    [
        ({"tracking_uri": "https://me@elsewhere/x"}, {"MLFLOW_TRACKING_TOKEN": "hush"}, NO_TRUST, True),
        ({"tracking_uri": "HTTP://elsewhere/x"}, {"MLFLOW_TRACKING_PASSWORD": "hush", "MLFLOW_TRACKING_URI": "http://own"}, NO_TRUST, True),
        ({"tracking_uri": "https://own/x"}, {"MLFLOW_TRACKING_TOKEN": "hush", "MLFLOW_TRACKING_URI": "https://own/x"}, NO_TRUST, False),
        ({"tracking_uri": "https://elsewhere/x"}, {"MLFLOW_TRACKING_TOKEN": "hush"}, Trust(code=True), False),
        ({"tracking_uri": "https://elsewhere/x"}, {"MLFLOW_TRACKING_TOKEN": ""}, NO_TRUST, False),
        ({"tracking_uri": "https://elsewhere/x", "enabled": False}, {"MLFLOW_TRACKING_TOKEN": "hush"}, NO_TRUST, False),
        ({"tracking_uri": "sqlite:////x/mlflow.db"}, {"MLFLOW_TRACKING_TOKEN": "hush"}, NO_TRUST, False),
        ({}, {"MLFLOW_TRACKING_TOKEN": "hush"}, NO_TRUST, False),
    ],
)
def test_a_tracker_without_the_key_sends_its_credentials_to_no_server_that_the_record_names(
    monkeypatch: pytest.MonkeyPatch, mlflow: dict[str, object], environment: dict[str, str], trust: Trust, *, refused: bool
) -> None:
    for name in (*MLFLOW_SECRETS, "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    log = described(replace(PLAIN, config=json.dumps({**CONFIG, "mlflow": mlflow})))
    found = registration(log, RUN)
    assert found.record is not None
    config = from_json(found.record.config)
    if not refused:
        require_own_server(found, config, trust=trust)
        return
    with pytest.raises(ConfigError, match=r"mlflow\.tracking_uri = .*elsewhere.*--run-key") as caught:
        require_own_server(found, config, trust=trust)
    assert "hush" not in str(caught.value) and "\n" not in str(caught.value)
    adopt_run(log, RUN)
    require_own_server(registration(log, RUN), config, trust=trust)


def test_only_a_tracker_is_refused_for_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hush")
    log = described(replace(PLAIN, config=json.dumps({**CONFIG, "mlflow": {"tracking_uri": "https://elsewhere/x"}})))
    assert tried(log) is None
    assert "MLFLOW_TRACKING_TOKEN" in (tried(log, role="tracker") or "")
