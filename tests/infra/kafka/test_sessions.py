"""Group members: a session within what the broker allows, and an assignment that cannot be looked up at once."""

from typing import Any

import pytest
from kafka import errors

from penstock.infra.errors import LogError
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.log import KafkaLog
from tests.support.log_helpers import WAIT_S, Heard, listen, make_topics, outgoing


def test_a_session_that_the_broker_does_not_allow_ends_its_member_with_a_line(log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    heard = Heard(log.member(f"{run_id}.group", [topic], session_s=8.0))
    listen(heard, until=lambda: len(heard.owned) == 4)
    heard.member.close()
    refused = log.member(f"{run_id}.group", [topic], session_s=7200.0)
    with pytest.raises(LogError, match=r"kafka\.session_s"):
        refused.take(WAIT_S)


def test_a_member_whose_partition_has_another_leader_requests_metadata_and_reads_on(
    log: KafkaLog, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    writer = log.producer()
    writer.send(outgoing(topic, b"first")).offset(WAIT_S)
    writer.close()
    fetch, request, calls = private_api.fetch_committed, private_api.request_metadata, list[str]()

    def refuse_once(*arguments: Any) -> Any:
        calls.append("fetch")
        if len(calls) == 1:
            raise errors.NotLeaderForPartitionError(topic)
        return fetch(*arguments)

    def note(*arguments: Any) -> None:
        calls.append("metadata")
        request(*arguments)

    monkeypatch.setattr(private_api, "fetch_committed", refuse_once)
    monkeypatch.setattr(private_api, "request_metadata", note)
    heard = Heard(log.member(f"{run_id}.group", [topic]))
    listen(heard, until=lambda: [record.value for record in heard.records] == [b"first"])
    assert calls[:3] == ["fetch", "metadata", "fetch"]
