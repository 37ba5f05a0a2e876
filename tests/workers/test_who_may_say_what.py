"""What each role may write is the table of docs/explanation/security.md, and a record that is not its to write has no effect."""

from dataclasses import replace

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.leases import WriterLease, new_token
from penstock.pipeline.runtime.roles import TOPICS, acl_rules
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.internal import owners
from penstock.topics.internal.owners import OWNER_KINDS, Owner
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import outgoing, stored
from tests.support.paths import ROOT
from tests.support.strategies import EXAMPLES, MODULES

RUN = "r"
CLAIM = Owner(writer="trainer", token="t", kind="taken", host="here", time_ns=1)
READERS = {**MODULES, "owners": owners}
WRITTEN = {**EXAMPLES, "owners": CLAIM}
WRITES = {
    role: {rule.name for rule in rules if (rule.resource, rule.operation) == ("topic", "WRITE")} for role, rules in acl_rules(RUN).items()
}


def test_the_table_of_the_docs_says_what_the_access_rules_allow() -> None:
    section = (ROOT / "docs/explanation/security.md").read_text(encoding="utf-8").partition("## Who may say what")[2].partition("\n## ")[0]
    _, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    said = {topic.strip("`"): set(roles.split(", ")) for _, topic, roles in rows}
    names = {topic: topic if topic == RUNS_TOPIC else f"{RUN}.{topic}" for topic in TOPICS}
    assert said == {topic: {role for role, written in WRITES.items() if name in written} for topic, name in names.items()}


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_record_in_a_topic_of_another_kind_is_refused_by_its_schema(name: str) -> None:
    record = stored(outgoing(READERS[name], WRITTEN[name], run=RUN))
    assert READERS[name].read(record, run=RUN)[1] == WRITTEN[name]
    for other in READERS.keys() - {name}:
        with pytest.raises(Unusable) as refused:
            READERS[other].read(record, run=RUN)
        assert refused.value.kind == "schema-version"


PLACES = ("launcher", "feeder", "scorer-0", "trainer")


@pytest.mark.parametrize(("user", "writer"), [(user, place) for user in WRITES for place in PLACES if user != place.partition("-")[0]])
def test_a_claim_counts_only_from_the_role_whose_place_it_is(user: str, writer: str) -> None:
    log = MemoryLog()
    log.create_topics({RUNS_TOPIC: RUNS_SPEC, **topics_of(RUN, partitions=1, turns=True)})
    owner = WriterLease(log=log, run=RUN, writer=writer, token=new_token())
    transactions = owner.acquire()
    producer = log.producer()
    for topic in WRITES[user]:
        for kind in OWNER_KINDS:
            claim = Owner(writer=writer, token="forged", kind=kind, host="elsewhere", time_ns=1)
            producer.send(replace(outgoing(owners, claim, run=RUN, key=owners.key(claim)), topic=topic))
    producer.flush(30.0)
    owner.require_held()
    transactions.commit([Outgoing(topic=f"{RUN}.ledger", partition=0, key=None, headers=(), value=b"1")])
    owner.release()
    successor = WriterLease(log=log, run=RUN, writer=writer, token=new_token(), watch_s=600.0)
    successor.acquire().close()
    successor.release()
