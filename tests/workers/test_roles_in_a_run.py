"""The topics that each role reads and writes in a whole run are those that its row of the table names."""

import importlib
import json
import threading
from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.launch.create import create
from penstock.pipeline.runtime.roles import ROLES, TOPICS
from penstock.pipeline.runtime.session import join
from penstock.topics.catalogue import RUNS_TOPIC, TURNS, topic_name
from penstock.topics.catalogue import TOPICS as TOPICS_OF_A_RUN
from penstock.topics.wire.record import Outgoing
from tests.support.counting_run import counting_run
from tests.support.recording_log import RecordingLog
from tests.support.worker_set import config_of

LIMIT_S = 120.0
EVAL = {"source": "tiny:successor", "size": 16, "limit": 4, "every": 1, "patience": 50}


@pytest.fixture(scope="module")
def topics(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[set[str], set[str]]]:
    """Role -> the topics that it read and wrote, in a run that lends an engine and in one whose turns travel through the log."""
    directory = tmp_path_factory.mktemp("roles")
    lent = {**EVAL, "engine": "rollout"}
    plain = config_of(tiny_model, directory, run={"steps": 2, "seed": 7}, rollout={"workers": 1}, eval=lent)
    turns = counting_run(tiny_model, directory, run={"steps": 1}, environment={"carrier": "log"}, eval=EVAL)
    found: dict[str, tuple[set[str], set[str]]] = {role: (set(), set()) for role in ROLES}
    for run, config in (("roles", plain), ("turns", turns)):
        for role, log in logs_of(run, config).items():
            # A topic may be in a row because its end is asked for and nothing of it is read.
            found[role][0].update(plain_names(run, log.reads), plain_names(run, log.asked) & set(ROLES[role].reads))
            found[role][1].update(plain_names(run, log.writes))
    return found


def logs_of(run: str, config: Config) -> dict[str, RecordingLog]:
    """The log of each role after a run in which every topic held a record that nobody could use."""
    log = MemoryLog()
    create(config, log=log, run_id=run, notify=lambda _: None)
    producer = log.producer()
    for topic in (*TOPICS_OF_A_RUN, *(TURNS if config.turns_by_log else ())):
        producer.send(Outgoing(topic=topic_name(run, topic), partition=0, key=b"0", headers=(), value=b"no record of ours"))
    # As left by three feeders that died while they decoded this record: only then does a feeder write a dead letter.
    attempts = run_directory(run) / "attempts" / "feeder.json"
    attempts.parent.mkdir(parents=True, exist_ok=True)
    attempts.write_text(json.dumps([[topic_name(run, "ledger"), 0, 0, 3]]))
    recording = {name: RecordingLog(log) for name, role in ROLES.items() if role.workers(config)}
    failures: dict[str, BaseException] = {}

    def work(role: str) -> None:
        try:
            worker = ROLES[role].worker(0)
            session = join(run=run, role=role, log=recording[role], worker=worker, model=None, stop=threading.Event())
            assert session is not None
            importlib.import_module(ROLES[role].module).main(session)
            session.close(status="finished")
        except BaseException as error:
            failures[role] = error

    threads = [threading.Thread(target=work, args=(role,), name=role, daemon=True) for role in recording]
    # The feeder starts first: a record that another role has set aside already is not set aside again.
    threads.sort(key=lambda thread: thread.name != "feeder")
    threads[0].start()
    letters = log.tail({(topic_name(run, "dead-letters"), 0): 1})
    assert letters.poll(LIMIT_S), failures
    letters.close()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert failures == {}
    assert not [thread.name for thread in threads if thread.is_alive()]
    return recording


def plain_names(run: str, names: set[str]) -> set[str]:
    return {name if name == RUNS_TOPIC else name.removeprefix(f"{run}.") for name in names}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_reads_and_writes_exactly_the_topics_of_its_row(role: str, topics: dict[str, tuple[set[str], set[str]]]) -> None:
    reads, writes = topics[role]
    assert reads == set(ROLES[role].reads)
    assert writes == set(ROLES[role].writes)
    assert reads <= set(TOPICS)
