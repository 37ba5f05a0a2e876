"""The statement about a model and its run (in-toto Statement v1), compared with files, ledger, topics and checkpoints."""

import json
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from penstock.infra.checkpoints import MANIFEST, CheckpointStore, Recorded
from penstock.infra.errors import CheckpointError
from penstock.infra.tensors.stream import TensorBytes, digest, hash_of
from penstock.pipeline.inspect.report.provenance import files_of, ledger_claims, sha256_of
from penstock.topics import ledger
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Measurement
from penstock.topics.weights import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A difference from a statement."""

    level: Literal[1, 2, 3]
    kind: Literal["changed", "missing", "added"]
    name: str
    """File, claim, audit check, topic or step."""
    text: str

    def __str__(self) -> str:
        """Format it as `kind: name: text`."""
        return f"{self.kind}: {self.name}: {self.text}"


def check_files(directory: Path, statement: dict[str, Any]) -> Iterator[Problem]:
    """The differences between the files of a directory and the subjects of its statement."""
    named = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    files = files_of(directory, named)
    for name, sha256 in named.items():
        if name not in files:
            yield Problem(level=1, kind="missing", name=name, text="the statement names it")
            continue
        if not files[name].is_file():
            yield Problem(level=1, kind="changed", name=name, text="it is no file")
            continue
        if (actual := sha256_of(files[name])) != sha256:
            yield Problem(level=1, kind="changed", name=name, text=f"its SHA-256 is {actual[:16]}…, the statement has {sha256[:16]}…")
    for name in files.keys() - named.keys():
        yield Problem(level=1, kind="added", name=name, text="the statement does not name it")


_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def weights_digest(directory: Path, *, like: str, names: tuple[str, ...]) -> str | None:
    """The digest of the tensors in a model's safetensors files, by the hash function of the digest `like`.

    None if their names are not `names`: the exported model has other tensors than the trained one. Raises `ValueError` for a damaged file.
    """
    tensors = [tensor for file in sorted(directory.glob("*.safetensors")) for tensor in _tensors(file)]
    return digest(tensors, hash_of(like)) if sorted(tensor.name for tensor in tensors) == sorted(names) else None


def _tensors(file: Path) -> Iterator[TensorBytes]:
    try:
        with file.open("rb") as opened:
            data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(bytes(data[8 : 8 + length]))
        for name, entry in header.items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                content = data[8 + length + low : 8 + length + high]
                yield TensorBytes(name=name, dtype=_DTYPES[entry["dtype"]], shape=tuple(entry["shape"]), data=content)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error


GROWING = ("metrics/", "run/")
"""Topics in which workers and operators write after the end of a run."""
_changed = partial(Problem, level=2, kind="changed")


def check_ledger(
    predicate: Mapping[str, Any], *, run: str, entries: Sequence[tuple[Entry, str]], evaluations: Mapping[str, Measurement]
) -> Iterator[Problem]:
    """The differences between a statement and the ledger, as far as the statement's head.

    `entries` are with their SHA-256, `evaluations` are those in `metrics`, by the SHA-256 of their payload.
    """
    head, count = predicate["ledger"]["head"], predicate["ledger"]["entries"]
    if predicate["run"] != run:
        yield _changed(name="run", text=f"the statement is about {predicate['run']!r}, the log has run {run!r}")
    if not 0 < count <= len(entries):
        yield Problem(level=2, kind="missing", name="ledger/0", text=f"it has {len(entries)} entries, the statement {count}")
    elif entries[count - 1][1] != head:
        text = f"entry {count - 1} has SHA-256 {entries[count - 1][1][:16]}…, the statement's head is {head[:16]}…"
        yield _changed(name="ledger/0", text=text)
    for name, value in ledger_claims([entry for entry, _ in entries[:count]]).items():
        if predicate[name] != value:
            yield _changed(name=name, text=f"the statement has {_short(predicate[name])}, the ledger {_short(value)}")
    for stated in predicate["evaluations"]:
        actual = evaluations.get(stated["sha256"])
        values = {"version": actual.version, **actual.values, "source": actual.labels.get("source")} if actual is not None else {}
        if differing := [key for key in ("version", *stated) if key not in ("sha256", "in_ledger") and stated.get(key) != values.get(key)]:
            what = f"has no evaluation {stated['sha256'][:16]}…" if actual is None else f"has {differing[0]} = {values.get(differing[0])}"
            yield _changed(name="evaluations", text=f"version {stated['version']}: the topic metrics {what}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def check_topics(
    stated: Mapping[str, Any], digests: Mapping[str, Any], *, starts: Mapping[str, int], later: Mapping[str, int]
) -> Iterator[Problem]:
    """The partitions whose records are not those of the statement.

    `starts` are the first retained offsets, `later` the numbers of records after those of the statement in a closed run.
    """
    for name, claim in stated.items():
        actual = digests.get(name, {"records": 0, "sha256": None})
        if starts.get(name, 0) <= claim["first"] and (actual["records"], actual["sha256"]) != (claim["records"], claim["sha256"]):
            same = actual["records"] == claim["records"]
            kind: Any = "changed" if same else "missing" if actual["records"] < claim["records"] else "added"
            counts = f"{actual['records']} records" if same else f"{actual['records']} records, the statement has {claim['records']}"
            yield Problem(level=2, kind=kind, name=name, text=f"other contents up to offset {claim['end']}: {counts}")
    for name, count in later.items() if stated else ():
        if not name.startswith(GROWING):
            yield Problem(level=2, kind="added", name=name, text=f"{count} records follow those of the statement")


def check_checkpoints(store: CheckpointStore, recorded: Recorded, entries: Sequence[Entry]) -> Iterator[Problem]:
    """The checkpoints on this machine that are not as the ledger records them; those of a running run may be newer than the entries."""
    manifests: dict[int | None, set[str]] = {}
    for entry in entries:
        if entry.kind == "checkpoint" and (manifest := json.loads(entry.details or "{}").get("manifest")):
            manifests.setdefault(entry.step, set()).add(manifest)
    closed = any(entry.kind == "run-closed" for entry in entries)
    for steps in store.steps():
        path = store.path(steps)
        try:
            store.verify(steps, recorded)
            if steps in manifests and ledger.digest((path / MANIFEST).read_bytes()) not in manifests[steps]:
                raise CheckpointError(f"{MANIFEST} has another SHA-256 than the ledger")
        except CheckpointError as error:
            if path.is_dir() and (closed or steps in recorded.digests):
                yield _changed(name=f"{path.parent.name}/{path.name}", text=str(error))


def check_model(directory: Path, stated: str, origin: Manifest | None) -> Iterator[Problem]:
    """A model whose tensors are not the statement's weights; one that is exported under other names than in `origin` is not compared."""
    actual = weights_digest(directory, like=stated, names=origin.names) if origin is not None else None
    if actual not in (None, stated):
        yield _changed(name="model", text=f"the tensors of its safetensors files have digest {actual}, the statement has weights {stated}")
