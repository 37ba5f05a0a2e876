"""How an audit begins: with what the register of runs, the run's own topic or the ledger's first entry say that was agreed."""

import contextlib
from typing import Any

from penstock.pipeline.audit.facts import Facts
from penstock.pipeline.audit.kept.samples import Samples
from penstock.pipeline.audit.rules import as_object, terms_of
from penstock.pipeline.audit.source import Source, Unreadable
from penstock.topics import ledger, runs
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire import errors

JUDGED = ("prompts", "calls", "replies", "rollouts", "groups", "weights", "metrics", "ledger", "dead-letters")
"""Topics in which absent records are distinguished from deleted ones."""
NEEDED = {"ledger": "what became of the run's groups", "dead-letters": "which records nobody was to use"}
"""Without the beginning of these nothing can be judged."""


def begin(source: Source) -> Facts:
    """Facts with the run's terms, from the register or else from the ledger's first entry. Raises `Unreadable`."""
    begins = {(topic, partition): source.begin(topic, partition) for topic in JUDGED for partition in source.partitions(topic)}
    for topic, says in NEEDED.items():
        if first := begins.get((topic, 0), 0):
            raise Unreadable(f"{source.run}.{topic}/0: the records at offsets 0 to {first - 1} were deleted, which said {says}")
    config_and_info: tuple[dict[str, Any], dict[str, Any]] | None = None
    registered, own = _said(source, RUNS_TOPIC), _said(source, "run")
    status = registered[-1].status if registered else None
    # In the topic that all runs share only an earlier release has left a configuration.
    for made in own[-1:] or [said for said in registered[-1:] if said.config != runs.NOTHING]:
        config_and_info = as_object(made.config), as_object(made.info)
    for record in () if config_and_info else source.read("ledger"):
        try:
            entry = ledger.read(record, run=source.run)[1]
        except errors.Unusable:
            continue
        if entry.kind == "run-opened":
            details = as_object(entry.details)
            config_and_info = details.get("config", {}), details.get("info", {})
            break
    if config_and_info is None:
        raise Unreadable(f"neither the register of runs nor the ledger says how run {source.run} was configured")
    config, info = config_and_info
    terms = terms_of(config, info)
    return Facts(
        run=source.run,
        terms=terms,
        samples=Samples(terms.samples_per_prompt + terms.oversample),
        changes=info.get("changes", ()),
        schedule=config.get("schedule"),
        status=status,
        begins=begins,
    )


def _said(source: Source, topic: str) -> list[runs.RunRecord]:
    """The usable records of the run in a topic of what runs are."""
    said = []
    for record in source.read(topic):
        if record.key == source.run.encode():
            with contextlib.suppress(errors.Unusable):
                said.append(runs.read(record, run=source.run)[1])
    return said
