"""Passwords that earlier releases left in records come out of no reader."""

import json

import pytest

from penstock.pipeline.archive.layout import KINDS
from penstock.pipeline.archive.restore import to_records
from penstock.pipeline.archive.rows import to_table
from penstock.pipeline.config.load import from_json, from_table, override, to_json
from penstock.topics import ledger, runs
from penstock.topics.wire.record import Outgoing, Record
from penstock.topics.wire.secrets import without_passwords
from tests.support.a_run import CONFIG, RUN, Teller

SECURITY = {"sasl_plain_password": "hush", "security_protocol": "SASL_SSL"}
OLD = {**CONFIG, "kafka": {"bootstrap": "h:1", "security": SECURITY}, "mlflow": {"tracking_uri": "https://me:hush@host/x"}}


def as_read(outgoing: Outgoing) -> Record:
    return Record(
        topic=outgoing.topic,
        partition=0,
        offset=0,
        timestamp_ms=0,
        key=outgoing.key,
        headers=outgoing.headers,
        value=bytes(outgoing.value),
    )


def test_a_record_of_a_run_and_its_first_entry_are_read_without_passwords() -> None:
    teller = Teller(config=OLD)
    _, state = runs.read(as_read(teller.record()), run=RUN)
    _, opened = ledger.read(as_read(teller.opened()), run=RUN)
    assert opened.details is not None
    for text in (state.config, opened.details):
        assert "hush" not in text
        assert "https://host/x" in text
        assert '"bootstrap": "h:1"' in text


@pytest.mark.parametrize("name", ["runs", "ledger"])
def test_an_archive_of_such_records_holds_no_password(name: str) -> None:
    teller = Teller(config=OLD)
    record = as_read(teller.record() if name == "runs" else teller.opened())
    table = to_table(KINDS[name], [record], run=RUN)
    assert "hush" not in str(table.to_pylist())
    (restored,) = to_records(KINDS[name], table, run=RUN)
    assert (runs if name == "runs" else ledger).read(restored, run=RUN)


def test_what_is_no_configuration_stays_as_it_is() -> None:
    for text in ('"security"', "{", '{"kafka": {"bootstrap": "a@b"}}', "[]", '{"security": 1, "config": 2}'):
        assert without_passwords(text) == text


def test_credentials_do_not_serialise_and_survive_an_override() -> None:
    config = from_table({**CONFIG, "kafka": {"security": SECURITY}})
    assert config.kafka.security == SECURITY
    assert "hush" not in to_json(config) + repr(config) + json.dumps(config.model_dump())
    del config.kafka.security["sasl_plain_password"]
    assert override(config, ["run.steps=3"]).kafka.security == {"security_protocol": "SASL_SSL"}
    assert from_json(json.dumps(OLD)).kafka.security == {}
