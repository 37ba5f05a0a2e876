"""How long a member may be silent is the configuration's to say, within what the broker allows."""

import pytest

from penstock.infra.errors import LogError
from penstock.infra.kafka.log import KafkaLog
from tests.support.log_helpers import WAIT_S, Heard, listen, make_topics


def test_a_session_that_the_broker_does_not_allow_ends_its_member_with_a_line(broker: str, run_id: str) -> None:
    log = KafkaLog(broker)
    (topic,) = make_topics(log, run_id, "a")
    heard = Heard(log.member(f"{run_id}.group", [topic], session_s=8.0))
    listen(heard, until=lambda: len(heard.owned) == 4)
    heard.member.close()
    refused = log.member(f"{run_id}.group", [topic], session_s=7200.0)
    with pytest.raises(LogError, match=r"kafka\.session_s"):
        refused.take(WAIT_S)
    refused.close()
    log.close()
