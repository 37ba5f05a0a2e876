"""The reference from the code: `python docs/generate.py` rewrites configuration.md and topics.md in docs/reference/."""

import ast
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from penstock.pipeline.config.run_config import Config
from penstock.pipeline.config.schema import ChildSection, PoolSection, SourceSampling
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import CONTROL, RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.internal import owners, state
from penstock.topics.turns import calls, replies
from penstock.topics.wire import headers
from penstock.topics.wire.headers import Headers

PAGES = Path(__file__).resolve().parent / "reference"
TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "table", Any: "value"}
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
MORE = {
    "data": "[Prompts and data](../how-to/data.md) explains sources, mixtures and chat templates.",
    "reward": "[Rewards](../how-to/rewards.md) explains functions, services, failures and isolation.",
    "environment": "[Environments](../how-to/environments.md) and [agents](../how-to/agents.md) explain them. The keys "
    + f"{', '.join(f'`{key}`' for key in ChildSection.model_fields)} are as in [[reward]](#reward).",
    "schedule": "[Schedules](../explanation/schedules.md) explains the modes.",
    "algorithm": "[Algorithms](../explanation/algorithms.md) explains the formulas, and lists the defaults that depend on other keys.",
    "weights": "[Weights](../explanation/weights.md) explains how the trainer publishes versions.",
    "kafka": "[Brokers](../how-to/brokers.md) shows how to use another cluster.",
}
"""Section of the configuration -> sentence that leads to its explanation."""
CODECS = (
    (prompts.CODEC, prompts.Prompt), (calls.CODEC, calls.Call, rollouts.Rollout),
    (replies.CODEC, replies.Reply, rollouts.Rollout), (groups.CODEC, groups.Group, prompts.Prompt, groups.ScoredSample),
    (ledger.CODEC, ledger.Entry, ledger.Planned), (weights.CODEC, weights.Manifest), (weights.CHUNK_CODEC, weights.Chunk),
    (metrics.CODEC, metrics.Measurement), (dead_letters.CODEC, dead_letters.DeadLetter), (runs.CODEC, runs.RunRecord),
    (owners.CODEC, owners.Owner), (state.CODEC, state.State),
)  # fmt: skip
"""Codec of a schema, and the classes whose fields describe its columns."""
STRUCTS = {"turns": rollouts.Turn, "samples": groups.ScoredSample, "plan": ledger.Planned}
"""Column of structs -> the class whose fields describe theirs."""
RECORDS = {
    "run": runs, "prompts": prompts, "rollouts": rollouts, "calls": calls, "replies": replies, "groups": groups, "weights": weights,
    "ledger": ledger, "metrics": metrics, "dead-letters": dead_letters, CONTROL[0]: owners, "state": state, RUNS_TOPIC: runs,
}  # fmt: skip
"""Topic -> the module of its records."""
COMMON = {
    "group": "group number", "sample": "number of the sample in its group", "turn": "index of the policy's turn",
    "attempt": "attempt number of the call", "samples_per_prompt": "K", "epoch": "number of the epoch, from 0",
    "row": "index of the row in the data", "part": "index of the part, from 0", "parts": "number of parts of the group",
    "reward_names": "names of the reward functions", "max_new_tokens": "length limit of the completion, in tokens",
    "temperature": "sampling temperature", "top_p": "nucleus sampling threshold; 1 disables it",
    "version": "policy version", "topic": "topic of the refused record", "partition": "partition of the record",
    "offset": "offset of the record", "timestamp_ms": "timestamp of the record", "key": "key of the record",
    "value": "payload of the record; in `headers`, the value of a header",
    "headers": "headers of the record, in order", "name": "name", "media": "not used", "sha256": "digest", "mime": "media type",
    "uri": "location", "start": "first token", "end": "one past the last token", "chunk_partitions": "partition of each chunk",
    "chunk_offsets": "offset of each chunk", "chunk_sizes": "bytes of each chunk", "worker": "worker that wrote the record",
    "role": "role of the writer", "run": "run id", "created_ns": "time of creation", "started_ns": "start of generation",
    "ended_ns": "end of generation", "asked_ns": "time of the request", "scored_ns": "time of the outcome", "time_ns": "time of the record",
}  # fmt: skip
"""Meanings of columns whose names say nearly everything."""


def table(*rows: Iterable[str]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["|" + "|".join(re.sub(r"\|", r"\\|", cell) for cell in row) + "|\n" for row in rows]
    return lines[0] + "|" + "---|" * (lines[0].count("|") - 1) + "\n" + "".join(lines[1:]) + "\n"


def kind_of(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A key's type with its bounds: `integer > 0`."""
    if annotation in TYPES:
        bounds = [f" {sign} {getattr(item, name):g}" for item in metadata for name, sign in SIGNS.items() if hasattr(item, name)]
        return TYPES[annotation] + ",".join(bounds)
    inner = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return kind_of(inner[0], [item for extra in inner[1:] for item in getattr(extra, "metadata", [extra])])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if get_origin(annotation) in (list, tuple):
        return f"list of {kind_of(inner[0])}"
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    return " or ".join(kind_of(option, metadata) for option in inner if option is not type(None))


def default_of(field: Any) -> str:
    """A key's default as TOML has it; `-` if an absent key has the effect that its meaning describes."""
    value = field.get_default(call_default_factory=True)
    return "required" if value is PydanticUndefined else "-" if value is None else f"`{json.dumps(value)}`"


def configuration() -> str:
    """Every key of a run's configuration."""
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    sections |= {"data.sampling.SOURCE": SourceSampling, "rollout.pools.NAME": PoolSection}
    text = """# Configuration

One TOML file configures a run. `penstock init` writes such a file, `penstock check` validates it, and `--set section.key=value` overrides a
key. Paths are relative to the file; paths in `--set` are relative to the working directory. For an unknown key or a wrong value, the error
names the nearest valid one.
Workers read the complete configuration, except `kafka.security`, from the run's topic `run`.
The default `-` means that the key is absent by default; the column *meaning* describes the effect.

"""
    for name in sorted(sections, key=lambda name: list(Config.model_fields).index(name.partition(".")[0])):
        own = sections[name].__annotations__
        keys = dict(sorted(sections[name].model_fields.items(), key=lambda item: item[0] not in own))
        rows = [
            (f"`{key}`", kind_of(field.annotation, field.metadata), default_of(field), field.description or "")
            for key, field in keys.items()
            if name != "environment" or key not in ChildSection.model_fields
        ]
        text += f"## [{name}]\n\n{MORE[name] + chr(10) * 2 if name in MORE else ''}" + table(("key", "type", "default", "meaning"), *rows)
    return text


@cache
def docstrings(owner: Any) -> dict[str, str]:
    """Field or constant -> its docstring, of a class or a module."""
    tree = ast.parse(inspect.getsource(owner))
    body = tree.body if inspect.ismodule(owner) else tree.body[0].body  # type: ignore[attr-defined]
    texts = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            name = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
            texts[name.id] = " ".join(text.value.value.split()).rstrip(".")  # type: ignore[union-attr]
    return texts


def columns(fields: Iterable[pa.Field], owners_: Iterable[type], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of each column; those of a struct follow it. Raises `KeyError` for a column without a meaning."""
    texts = COMMON | {name: text for owner in reversed([*owners_]) for name, text in docstrings(owner).items()}
    for field in fields:
        kind = field.type.value_type if pa.types.is_list(field.type) else field.type
        meaning = re.sub("`?None`?", "null", texts[field.name])
        yield f"`{prefix}{field.name}`", arrow_type(field), meaning[0].upper() + meaning[1:]
        if pa.types.is_struct(kind):
            inner = [item for item in kind if field.name != "samples" or item not in rollouts.SAMPLE_FIELDS]
            yield from columns(inner, [STRUCTS[field.name]] if field.name in STRUCTS else [], f"{field.name}.")


def arrow_type(field: pa.Field) -> str:
    """A column's type in Arrow's words."""

    def text(kind: pa.DataType) -> str:
        if pa.types.is_list(kind):
            return f"list of {text(kind.value_type)}" + (" or null" if kind.value_field.nullable else "")
        if pa.types.is_map(kind):
            return f"map to {text(kind.item_type)}"
        return "struct" if pa.types.is_struct(kind) else str(kind)

    return text(field.type) + (" or null" if field.nullable else "")


def topics() -> str:
    """Topics, headers, and the columns of every schema."""
    text = """# Topics

The topics of a run are named `RUN.NAME`. All runs share the topic `penstock.runs`. `calls` and `replies` exist only with environment
workers. [The log](../explanation/the-log.md) explains records, transactions, duplicates and dead letters.

"""
    counts = {1: "1", 2: "`kafka.partitions`", 3: "3 + `weights.partitions`"}
    rows = []
    for name, spec in {**topics_of("run", partitions=2, weight_partitions=3, turns=True), RUNS_TOPIC: RUNS_SPEC}.items():
        topic = name.removeprefix("run.")
        if topic not in CONTROL[1:]:
            shown = "control-ROLE" if topic in CONTROL else topic
            gists = re.split(r"[\w ]*`[^`]*`: ", (RECORDS[topic].__doc__ or "").split("\n")[0])
            gist = gists[-1 if topic == RUNS_TOPIC else 1]
            rows.append((f"`{shown}`", gist, counts[spec.partitions], spec.configs["cleanup.policy"]))
    text += table(("topic", "record", "partitions", "cleanup"), *rows)
    meanings = {name.replace("_", "-"): text for name, text in docstrings(Headers).items()}
    meanings[headers.CHECKSUM] = docstrings(headers)["CHECKSUM"]
    text += "## Headers\n\n" + table(("header", "meaning"), *((f"`{name}`", meaning) for name, meaning in meanings.items()))
    head = ("column", "type", "meaning")
    text += "## Columns of a sample\n\n" + table(head, *columns(rollouts.SAMPLE_FIELDS, (rollouts.Rollout,)))
    text += "A record of `rollouts/1` contains the column `group` and these columns of one sample. "
    text += "A record of `rollouts/2` contains such a row for each of up to 64 samples.\n\n"
    for codec, *classes in CODECS:
        text += f"## {codec.name}\n\n" + table(head, *columns(codec.schema, classes))
    return text


WRITTEN = {"configuration.md": configuration, "topics.md": topics}
"""File in docs/reference/ -> function that makes its text."""

if __name__ == "__main__":
    for file, made in WRITTEN.items():
        (PAGES / file).write_text(made(), encoding="utf-8")
