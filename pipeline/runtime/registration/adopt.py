"""Makes a run this user's: its key, and a record signed by the key, from the run's topics."""

import contextlib
import json
from dataclasses import replace

from penstock.infra.errors import ConfigError, RunNotFound
from penstock.infra.log import Log
from penstock.pipeline.config.load import from_json
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.registration.run_key import make_key
from penstock.pipeline.runtime.registration.run_registry import registration, write
from penstock.pipeline.runtime.registration.trust import as_block, user_code
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics.catalogue import RUNS_TOPIC, control_topics_of, topic_name, topics_of
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import Unusable


def shown(log: Log, run: str) -> str | None:
    """The record to be signed: the code that it names, and its source; None if the run's key has signed it already."""
    if registration(log, run).signed:
        return None
    record, topic = _record(log, run)
    config = from_json(record.config)
    code = user_code(config)
    text = as_block(run, code) if code else f"run {run} names no code"
    return f"{text}\nfrom {topic}; model {config.model.path!r}, data {', '.join(map(repr, config.data_sources))}"


def adopt_run(log: Log, run: str) -> None:
    """Make the run's key on this machine and write its record, signed. Raises `ConfigError`."""
    (record, _), own = _record(log, run), topic_name(run, "run")
    from_json(record.config)  # a configuration that this release cannot read is not signed
    make_key(run)
    log.create_topics({own: topics_of(run, partitions=1)[own], **control_topics_of(run)})
    write(log, record)


def _record(log: Log, run: str) -> tuple[RunRecord, str]:
    """The run's record and the topic it is from: the run's own, else its ledger, which the users of other runs cannot write to.

    For a run of an earlier release whose trainer has never started it comes from the register.
    """
    registered = registration(log, run)
    if registered.record is None:
        raise RunNotFound(run)
    if registered.own:
        return registered.record, topic_name(run, "run")
    ledger_state = LedgerState(run)
    for record in scan(log, topic_name(run, "ledger")):
        with contextlib.suppress(Unusable):
            ledger_state.apply(record)
    if ledger_state.opened is None:
        return registered.record, RUNS_TOPIC
    details = json.loads(ledger_state.opened.details or "{}")
    if not all(isinstance(details.get(name), dict) for name in ("config", "info")):
        raise ConfigError(f"{run}.ledger: its first entry has no configuration; the run cannot be signed")
    return replace(registered.record, config=json.dumps(details["config"]), info=json.dumps(details["info"])), topic_name(run, "ledger")
