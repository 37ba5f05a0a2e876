"""A dead letter explained: what the record was, who refused it and why, what counted in its place, and what became of its group.

The rule: nothing of the refused record is believed; its group is the one it claims, and what that group came to is read from true records.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.infra.errors import LogError
from penstock.infra.log import Log
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.observe.explain.as_json import letter_facts, tell
from penstock.pipeline.observe.explain.group_history import OF_GROUPS, as_record
from penstock.pipeline.observe.explain.group_records import GroupRecords, Letter, Run, place_of, read_group, read_run, told_by
from penstock.pipeline.observe.records.browse import view
from penstock.topics import dead_letters
from penstock.topics.wire.record import Record

NS = 1e9


def explain_letter(log: Log, run: str, place: str, *, say: Callable[[str], None]) -> dict[str, Any]:
    """All there is to say of one dead letter, ready for JSON: by its offset, or as TOPIC/PARTITION/OFFSET of the refused record.

    Raises `ConfigError` for a place that is none and where there is no such letter, `LogError`.
    """
    found = read_run(log, run)
    mine = pick(found, place)
    (letter,) = log.read(f"{run}.dead-letters", 0, [mine.offset])
    record = as_record(replace(mine, letter=dead_letters.read(letter, run=run)[1]))
    headers = {name: (value or b"").decode("ascii", "replace") for name, value in record.headers}
    topic = record.topic.rpartition(".")[2]
    group = told_by(headers, record.key) if topic in OF_GROUPS else None
    records, life, problem = None, None, None
    if group is not None:
        try:
            records = read_group(log, found, group, say=say)
            life = tell(log, found, records, say=say)
        except (ValueError, LogError) as error:  # it claims a group that there is none of: that is part of the answer
            problem = str(error)
    seen = view(record, run=found.run) if mine.letter.kind != "killer" else None
    return {
        "run": found.run,
        "letter": letter_facts(mine),
        "also": [letter_facts(one) for one in found.letters if one.place == mine.place and one is not mine],
        "record": {
            "place": place_of(mine.letter),
            "time_s": record.timestamp_ms / 1000,
            "key": None if record.key is None else record.key.decode("ascii", "replace"),
            "headers": headers,
            "bytes": len(record.value),
            "readable": seen is not None and seen["unusable"] is None,
            "payload": seen["payload"] if seen else None,
        },
        "counted": counted(found, topic, headers, record, records),
        "claims_group": group,
        "group": life,
        "no_group": problem,
    }


def pick(found: Run, place: str) -> Letter:
    """The letter that a person means. Raises `ConfigError`."""
    topic, partition, offset = (["", "", place] if place.isdigit() else [*place.rsplit("/", 2), "", ""])[:3]
    if not offset.isdigit() or (partition and not partition.isdigit()):
        raise ConfigError(f"--dead-letter {place}: expected the letter's offset, or TOPIC/PARTITION/OFFSET of the refused record")
    for letter in found.letters:
        at = (letter.letter.topic.removeprefix(f"{found.run}."), str(letter.letter.partition), str(letter.letter.offset))
        if at == (topic.removeprefix(f"{found.run}."), partition, offset) if topic else letter.offset == int(offset):
            return letter
    there = ", ".join(f"{one.offset} ({place_of(one.letter)})" for one in found.letters[:5]) or "none"
    more = f" and {len(found.letters) - 5} more" if len(found.letters) > 5 else ""
    raise ConfigError(f"no dead letter {place} in run {found.run}; there are: {there}{more}")


def counted(found: Run, topic: str, headers: dict[str, str], record: Record, records: GroupRecords | None) -> dict[str, Any] | None:
    """The record that counted where this one says the same, None where none did: its place, and whether it is the same word for word."""
    if records is not None:
        return _of_group(records, topic, headers, record)
    if topic == "weights" and record.partition == 0 and headers.get("policy-version-min", "").isdigit():
        version = int(headers["policy-version-min"])
        if version in found.past.story.manifests:
            return {"what": f"version {version} was published", "place": None, "same": None}
    return None


def _of_group(records: GroupRecords, topic: str, headers: dict[str, str], record: Record) -> dict[str, Any] | None:
    sample = headers.get("sample", "")
    first: Record | None = None
    what = ""
    if topic == "prompts" and records.prompts:
        first, what = records.prompts[0][0], f"the prompt of group {records.group}"
    elif topic == "rollouts" and sample.isdigit() and int(sample) in records.drawn:
        first, what = records.drawn[int(sample)][0], f"sample {sample} of group {records.group}"
    elif topic == "groups" and records.outcomes:
        first, what = records.outcomes[0].records[0], f"the outcome of group {records.group}"
    if first is None:
        return None
    itself = (first.topic, first.partition, first.offset) == (record.topic, record.partition, record.offset)
    if itself:
        return {"what": f"this very record, as {what}; it was set aside for what came of it", "place": place_of(first), "same": True}
    return {"what": what, "place": place_of(first), "same": first.value == record.value}
