"""A configuration with a password or token is refused; those that earlier releases left in records come out of no reader."""

import json

import pytest

from penstock.infra.errors import ConfigError
from penstock.launched import configured
from penstock.pipeline.archive.archived_log import to_records
from penstock.pipeline.archive.layout import KINDS
from penstock.pipeline.archive.rows import to_table
from penstock.pipeline.config.load import from_json, from_table, override, to_json
from penstock.pipeline.config.security import refuse_secrets
from penstock.topics import ledger, runs
from penstock.topics.wire.secrets import without_passwords
from tests.support.a_run import CONFIG, RUN, RecordBuilder, stored

SECURITY = {"sasl_plain_password": "hush", "security_protocol": "SASL_SSL"}
OLD = {**CONFIG, "kafka": {"bootstrap": "h:1", "security": SECURITY}, "mlflow": {"tracking_uri": "https://me:hush@host/x"}}


def test_a_record_of_a_run_and_its_first_entry_are_read_without_passwords() -> None:
    builder = RecordBuilder(config=OLD)
    _, state = runs.read(stored(builder.record()), run=RUN)
    _, opened = ledger.read(stored(builder.opened()), run=RUN)
    assert opened.details is not None
    for text in (state.config, opened.details):
        assert "hush" not in text and "https://host/x" in text and '"bootstrap": "h:1"' in text


@pytest.mark.parametrize("name", ["runs", "ledger"])
def test_an_archive_of_such_records_holds_no_password(name: str) -> None:
    builder = RecordBuilder(config=OLD)
    record = stored(builder.record() if name == "runs" else builder.opened())
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


HELD = [
    ("reward", "functions", ["exact_match", "http://me:hush@judge/score"]),
    ("reward", "functions", ["rewards.py:f?api_key=hush"]),
    ("eval", "functions", ["https://judge/score?token=hush"]),
    ("environment", "source", "openenv:ws://me:hush@host:1"),
    ("environment", "source", "openenv:wss://hush@host:1"),
    ("environment", "source", "agent:solve --api-key=hush"),
    ("environment", "source", "agent:solve --token hush"),
    ("environment", "source", "agent:solve --token 'hush' --log x"),
    ("environment", "source", """agent:sh -c 'x --api-key "hush"'"""),
    ("environment", "source", 'agent:sh -c "x --api-key=\\"hush\\""'),
    ("environment", "source", "agent:solve --api-key=-hush"),
    ("environment", "source", "agent:solve --api-key EMPTYhush"),
    ("environment", "source", "agent:solve --api-key none-hush"),
    ("environment", "source", "agent:solve --password <hush"),
    ("environment", "source", "agent:solve --api-key EMPTY --token hush"),
    ("environment", "source", "agent:solve --url https://me:hu$h@host/"),
    ("environment", "source", "agent:env DB_PASSWORD='hush' solve"),
    ("reward", "functions", ["rewards.py:f?api_key=truehush&level=3"]),
    ("rollout", "vllm", {"api_key": "EMPTYhush"}),
    ("environment", "source", "agent:env OPENAI_API_KEY=hush solve"),
    ("data", "source", "hf:org/name?token=hush"),
    ("data", "source", ["rows.jsonl", "hf:org/name?hf_token=hush"]),
    ("eval", "source", "hf:org/name?auth_token=hush"),
    ("kafka", "bootstrap", "me:hush@host:9092"),
    ("kafka", "bootstrap", "host:9092,hush@host:9092"),
    ("mlflow", "tracking_uri", "postgresql+x://me:hush@host/db"),
    ("mlflow", "tracking_uri", "https://hush@host/"),
    ("mlflow", "tracking_uri", "https://host/?access_token=hush"),
    ("rollout", "vllm", {"hf_token": "hush"}),
    ("rollout", "vllm", {"model_loader_extra_config": {"s3_secret_access_key": "hush"}}),
]


@pytest.mark.parametrize(("section", "name", "value"), HELD, ids=lambda value: str(value)[:50])
def test_a_secret_in_a_configuration_is_refused_with_its_key_and_is_not_quoted(section: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_secrets({section: {name: value}})
    assert str(caught.value).startswith(f"{section}.{name}: the value contains a password or token, which the log would record; ")
    assert "hush" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("reward", "functions", ["http://judge:8000/score?level=3", "f.py:f?max_tokens=9&stop_token=x"]),
        ("environment", "source", "agent:solve --api-key $API_KEY --token-limit 3 --password-file pw"),
        ("environment", "source", "agent:mail me@host"),
        ("environment", "source", """agent:sh -c 'x --api-key "$OPENAI_API_KEY"'"""),
        ("environment", "source", 'agent:sh -c "x --api-key \\"$OPENAI_API_KEY\\" --token \\"`cat f`\\""'),
        ("environment", "source", "agent:sh -c x --api-key='$K' --token=\"${K}\" --password '$(cat f)'"),
        ("environment", "source", "agent:solve --api-key={key} --token {columns.token}"),
        ("environment", "source", "agent:solve --api-key EMPTY"),
        ("environment", "source", "agent:solve --api-key 'none' --token=dummy --hf-token null --api-key not-needed"),
        ("environment", "source", "agent:env OPENAI_API_KEY=EMPTY solve; env API_KEY= solve --token '' --token"),
        ("environment", "source", "agent:solve --max-tokens 512 --api-key-env NAME --password-file f --no-password f"),
        ("environment", "source", "agent:sh -c 'solve --url https://me:$TOKEN@host/ --other https://${TOKEN}@host'"),
        ("environment", "source", "agent:solve eos_token=</s> api_key_env=NAME tokenizer=x token_limit=9 keyword=x pass_key=x"),
        ("reward", "functions", ["r.py:f?token=</answer>", "r.py:f?keyword=x&token_limit=3&tokenizer=x", "r.py:f?eos_token=</s>"]),
        ("data", "source", ["hf:org/name?token=true", "hf:org/name?use_auth_token=False&config=main"]),
        ("rollout", "vllm", {"api_key": "EMPTY", "hf_token": "", "token": "$HF_TOKEN", "tokenizer": "x"}),
        ("data", "source", ["/rows/a@b.jsonl", "hf:org/name@main"]),
        ("kafka", "bootstrap", "host:9092,[::1]:9093"),
        ("mlflow", "tracking_uri", "postgresql://me@host/db"),
        ("mlflow", "tracking_uri", "sqlite:////home/me@host/mlflow.db"),
        ("rollout", "vllm", {"hf_token": True, "max_num_batched_tokens": 512}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_addresses_options_and_commands_without_a_secret_are_accepted(section: str, name: str, value: object) -> None:
    refuse_secrets({section: {name: value}})


def test_a_run_that_was_recorded_with_a_secret_goes_on_and_takes_no_other_one() -> None:
    table = {**CONFIG, "environment": {"source": "agent:solve --token hush"}}
    recorded = from_table(table)
    assert override(recorded, ["run.steps=9"]).environment.source == recorded.environment.source
    with pytest.raises(ConfigError, match=r"environment.source: the value contains a password or token"):
        override(recorded, ['environment.source="agent:other --token hush"'])
    with pytest.raises(ConfigError, match=r"environment.source: the value contains a password or token"):
        configured(table, [], None)
