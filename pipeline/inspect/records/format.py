"""Text of a record: a line, a page, or a line of JSON; long values are cut and their length is given."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.pipeline.inspect.html.token_texts import TokenTexts
from penstock.pipeline.inspect.records.browse import view
from penstock.topics.wire.record import Record

SHOWN_ITEMS = 24
SHOWN_TEXT = 80
SHOWN_SAMPLE = 24
HIDDEN = frozenset({"run", "schema", "sha256", "crc32", "part", "parts", "tokens", "sample-tokens", "samples", "no-reward", "reward-mean"})
"""Headers that a line leaves out: they are the same for all records or part of the payload's summary."""


def as_json_line(record: Record, *, run: str) -> str:
    """A record as one line of JSON."""
    return json.dumps(view(record, run=run))


def as_line(record: Record, *, run: str, texts: TokenTexts | None = None) -> str:
    """A record as one line: time, partition, offset, headers, and a summary of its payload; `texts` decodes the tokens of samples."""
    fields = view(record, run=run)
    moment = clock("%H:%M:%S", fields["time_s"])
    topic = record.topic.rpartition(".")[2]
    hidden = HIDDEN | {"outcome"} if topic == "rollouts" else HIDDEN
    shown = " ".join(f"{name}={value}" for name, value in fields["headers"].items() if name not in hidden)
    gist = f"UNUSABLE {fields['unusable']}" if fields["unusable"] else _gist(topic, fields["payload"], texts)
    return f"{moment} {record.partition}/{record.offset} {shown}  {gist}".rstrip()


def clock(form: str, time_s: float) -> str:
    """The local time; the seconds if it is outside the calendar, which a record may contain."""
    try:
        return time.strftime(form, time.localtime(time_s))
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.0f} s"


def _gist(topic: str, payload: dict[str, Any], texts: TokenTexts | None) -> str:
    match topic:
        case "prompts":
            gist = repr(payload["prompt"])
        case "rollouts":
            samples = payload.get("samples", [payload])
            gist = ", ".join(f"{_text_of(sample, texts)}{sample['finish']} after {len(sample['token_ids'])} tokens" for sample in samples)
        case "calls":
            gist = f"turn {payload['turn']} after {len(payload['token_ids'])} tokens"
        case "replies":
            gist = f"turn {payload['turn']}: {payload['finish']} after {len(payload['token_ids'])} tokens"
        case "groups":
            scored = " ".join(f"{_number(sample['reward'])} {_quoted(sample['completion'])}" for sample in payload["samples"])
            gist = " · ".join(filter(None, (payload["reason"], scored)))
        case "ledger" | "metrics":
            numbers = payload.get("metrics") or payload.get("values") or {}
            doing = (payload.get("labels") or {}).get("doing", "")
            gist = " ".join(
                [
                    f"step {payload['step']}" if payload["step"] is not None else doing,
                    *(f"{name}={value:.4g}" for name, value in numbers.items()),
                ]
            )
        case "dead-letters":
            gist = f"{payload['topic']}/{payload['partition']}/{payload['offset']}: {payload['reason']}"
        case "weights":
            gist = (
                f"{payload['nbytes']} bytes, chunks: {len(payload['chunk_sizes'])}" if "nbytes" in payload else f"chunk {payload['index']}"
            )
        case _:
            gist = f"{payload['run']} {payload['status']}"
    return gist if len(gist) <= SHOWN_TEXT else gist[:SHOWN_TEXT] + "…"


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"


def _text_of(sample: Mapping[str, Any], texts: TokenTexts | None) -> str:
    text = None if texts is None else texts.completion(sample["token_ids"])
    return "" if text is None else f"{_quoted(text)} "


def _quoted(text: str) -> str:
    return repr(text if len(text) <= SHOWN_SAMPLE else text[:SHOWN_SAMPLE] + "…")


def as_page(data: Mapping[str, Any]) -> str:
    """A record over many lines, long lists cut short."""
    when = clock("%Y-%m-%d %H:%M:%S", data["time_s"])
    lines = [
        f"{data['topic']} partition {data['partition']} offset {data['offset']}, {when}, key {data['key']}, {data['bytes']} bytes",
        "headers",
    ]
    lines += [f"  {name:<20} {value}" for name, value in data["headers"].items()]
    if data["unusable"]:
        return "\n".join([*lines, f"unusable: {data['unusable']}"])
    lines += ["payload", *_nested(data["payload"], indent=2)]
    if data.get("claims_group") is not None:
        lines.append(f"it claims group {data['claims_group']}: `penstock explain RUN {data['claims_group']}` says what became of that")
    if data.get("refused") is not None:
        lines += ["", "the refused record", "", as_page(data["refused"])]
    return "\n".join(lines)


def _nested(value: Mapping[str, Any], *, indent: int) -> list[str]:
    lines = []
    for name, item in value.items():
        if isinstance(item, list) and item and isinstance(item[0], dict):
            for index, inner in enumerate(item):
                lines += [f"{' ' * indent}{name}[{index}]", *_nested(inner, indent=indent + 2)]
        elif isinstance(item, dict) and len(str(item)) > SHOWN_TEXT:
            lines += [f"{' ' * indent}{name}", *_nested(item, indent=indent + 2)]
        else:
            lines.append(f"{' ' * indent}{name:<20} {_short(item)}")
    return lines


def _short(item: Any) -> str:
    return f"[{first_of(item, most=SHOWN_ITEMS)}]" if isinstance(item, list) and len(item) > SHOWN_ITEMS else str(item)


def first_of(items: Sequence[Any], *, most: int) -> str:
    """The items, or the first of them and how many there are.

    Example:
        first_of([3, 4, 5], most=2)  # -> "3, 4, … 3 in all"
    """
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown}, … {len(items)} in all"
