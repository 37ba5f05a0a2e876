"""Whatever others write to a run's topic, who has the run's key reads what the key signed last."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.infra.errors import ConfigError
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.registration.run_registry import (
    fits,
    key_of,
    key_path,
    make_key,
    newest,
    read_key,
    registration,
    signed,
    write,
    write_status,
)
from penstock.pipeline.runtime.registration.trust import NO_TRUST, require_trusted
from penstock.topics import runs
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.runs import RunRecord
from tests.support import page_records
from tests.support.a_run import CONFIG

RUN = "kept"
OTHER = bytes(32)
MADE = RunRecord(run=RUN, status="created", config=json.dumps(CONFIG), info='{"steps": 3}', created_ns=1, updated_ns=1)


def with_steps(number: int, *, own_code: bool = False) -> RunRecord:
    table = {**CONFIG, "run": {"steps": number + 1}, **({"reward": {"functions": ["os:system?command=id"]}} if own_code else {})}
    return replace(MADE, config=json.dumps(table))


def log_with(records: list[RunRecord]) -> MemoryLog:
    """An in-memory log whose topic RUN.run has these records, in this order."""
    log = page_records.log_with(run=RUN)
    for record in records:
        page_records.register(log, record, topic=f"{RUN}.run")
    write_status(log, MADE)
    return log


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    return home


KINDS = ["own", "unsigned", "other key", "other run", "edited", "raised", "replayed"]
MOVES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=8)


def history(moves: list[tuple[str, int]], key: bytes) -> tuple[list[RunRecord], list[RunRecord]]:
    """What several writers have appended, and what of it the owner has signed."""
    log: list[RunRecord] = []
    own: list[RunRecord] = []
    for move, number in moves:
        evil = with_steps(number, own_code=True)
        if move == "own":
            own.append(signed(with_steps(number), key, revision=len(own) + 1))
            log.append(own[-1])
        elif move == "unsigned":
            log.append(evil)
        elif move == "other key":
            log.append(signed(evil, OTHER, revision=number + 90))
        elif move == "other run":
            log.append(replace(signed(replace(evil, run="another"), key, revision=number + 90), run=RUN))
        elif own:
            seen = own[number % len(own)]
            changes = {"edited": {"config": evil.config}, "raised": {"revision": (seen.revision or 0) + 50}, "replayed": {}}
            log.append(replace(seen, **changes[move]))  # type: ignore[arg-type]
    return log, own


@settings(max_examples=15)
@given(moves=MOVES, random=st.randoms(use_true_random=False), deleted=st.integers(0, 3))
def test_whatever_others_forge_replay_reorder_or_delete_only_what_the_key_signed_counts(moves, random, deleted) -> None:
    key = make_key(RUN)
    records, own = history(moves, key)
    random.shuffle(records)
    kept = records[deleted:]
    remaining = [record for record in kept if record in own]
    found = registration(log_with(kept), RUN)
    assert found.signed is bool(remaining)
    assert len(found.ignored) == sum(record not in own for record in kept)
    said: list[str] = []
    if not remaining:
        with pytest.raises(ConfigError, match=r"is signed with the run's key|has signed no record|has no signed configuration"):
            require_trusted(found, trust=NO_TRUST, notify=said.append)
        return
    record = require_trusted(found, trust=NO_TRUST, notify=said.append)
    assert record.config == max(remaining, key=lambda record: record.revision or 0).config
    assert len(said) == bool(found.ignored)


def test_what_is_written_with_the_key_has_the_next_revision_and_the_register_has_no_signature() -> None:
    log, key = log_with([]), make_key(RUN)
    for number in range(3):
        write(log, with_steps(number))
    found = registration(log, RUN)
    assert found.record and (found.record.revision, found.record.config, found.signed) == (3, with_steps(2).config, True)
    shared = [runs.read(record, run=RUN)[1] for record in log.tail({(RUNS_TOPIC, 0): "earliest"}).read_to_end()]
    assert {(record.config, record.mac, record.revision) for record in shared} == {("{}", None, None)}
    assert newest([replace(found.record, info="{}")], key) is None


def test_a_run_that_a_key_signed_elsewhere_is_not_changed_without_it() -> None:
    log = log_with([signed(MADE, OTHER, revision=1)])
    with pytest.raises(ConfigError, match=r"copy runs/kept/run\.key"):
        write(log, with_steps(4))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "other"), ("revision", 2), ("revision", None), ("created_ns", 2), ("config", "{}"), ("info", "{}"), ("mac", "0" * 64),
        ("mac", "é"), ("mac", None),
    ],
)  # fmt: skip
def test_a_signature_fits_one_record_alone(field: str, value: object) -> None:
    record = signed(MADE, OTHER, revision=1)
    assert fits(record, OTHER)
    assert fits(replace(record, status="running", updated_ns=9), OTHER)
    assert not fits(replace(record, **{field: value}), OTHER)
    assert not fits(record, bytes([1]) * 32)


def test_a_password_that_records_are_read_without_does_not_break_the_signature() -> None:
    record = signed(replace(MADE, config='{"mlflow": {"tracking_uri": "https://me:secret@host/x"}}'), OTHER, revision=1)
    assert fits(runs.decode(runs.encode(record)), OTHER)


def test_a_key_is_made_once_and_is_its_users_alone() -> None:
    assert key_of(RUN) is None
    key = make_key(RUN)
    assert len(key) == 32
    assert make_key(RUN) == key == key_of(RUN)
    assert key_path(RUN).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in key_path(RUN).parent.iterdir()] == ["run.key"]
    assert make_key("second") != key


def key_file(directory: Path, text: str = OTHER.hex(), *, mode: int = 0o600) -> Path:
    file = directory / "key"
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return file


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600])
def test_a_key_of_a_secret_volume_is_accepted(mode: int, tmp_path: Path) -> None:
    assert key_of(RUN, key_file(tmp_path, mode=mode)) == OTHER


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604, 0o640])
def test_a_key_that_others_may_read_or_change_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        key_of(RUN, key_file(tmp_path, mode=mode))


@pytest.mark.parametrize("text", ["", "00", "zz" * 32, "0" * 63, "0" * 66, "é"])
def test_a_file_that_holds_no_key_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run's key"):
        read_key(key_file(tmp_path, text))
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "missing")
