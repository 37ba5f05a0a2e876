"""The statement about a model and its run (in-toto Statement v1), compared with files, ledger, topics and checkpoints."""

import json
import mmap
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from penstock.infra.checkpoints import MANIFEST, CheckpointStore, Recorded
from penstock.infra.errors import CheckpointError, ConfigError, PenstockError
from penstock.infra.tensors.stream import TensorBytes, digest, hash_of
from penstock.pipeline.inspect.report.card import card
from penstock.pipeline.inspect.report.provenance import README, files_of, sha256_of
from penstock.topics import ledger
from penstock.topics.ledger import Entry


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


def _tensors(directory: Path) -> Iterator[TensorBytes]:
    for file in sorted(directory.glob("*.safetensors")):
        yield from _tensors_in(file)


def _tensors_in(file: Path) -> Iterator[TensorBytes]:
    try:
        with file.open("rb") as opened:
            data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(bytes(data[8 : 8 + length]))
        for name, entry in header.items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                content = data[8 + length + low : 8 + length + high]
                yield TensorBytes(name=name, dtype=_DTYPES.get(entry["dtype"], entry["dtype"]), shape=tuple(entry["shape"]), data=content)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error


GROWING = ("metrics/", "run/")
"""Topics in which workers and operators write after the end of a run."""
changed = partial(Problem, level=2, kind="changed")
"""A difference from the log."""


def check_ledger(predicate: Mapping[str, Any], *, run: str, sha256s: Sequence[str]) -> Iterator[Problem]:
    """A ledger that does not reach the statement's head, or has another; `sha256s` are those of its entries."""
    head, count = predicate["ledger"]["head"], predicate["ledger"]["entries"]
    if predicate["run"] != run:
        yield changed(name="run", text=f"the statement is about {predicate['run']!r}, the log has run {run!r}")
    if not 0 < count <= len(sha256s):
        yield Problem(level=2, kind="missing", name="ledger/0", text=f"it has {len(sha256s)} entries, the statement {count}")
    elif sha256s[count - 1] != head:
        text = f"entry {count - 1} has SHA-256 {sha256s[count - 1][:16]}…, the statement's head is {head[:16]}…"
        yield changed(name="ledger/0", text=text)


def check_claims(stated: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[Problem]:
    """The claims in which a statement differs from those of the log, each with the first difference."""
    for name, value in json.loads(json.dumps(actual)).items():
        if (difference := next(_differences(name, stated.get(name), value), None)) is not None:
            yield changed(name=name, text=difference)


def _differences(path: str, stated: Any, actual: Any) -> Iterator[str]:
    if isinstance(stated, dict) and isinstance(actual, dict):
        for key in stated | actual:
            yield from _differences(f"{path}.{key}", stated.get(key), actual.get(key))
    elif isinstance(stated, list) and isinstance(actual, list) and len(stated) == len(actual):
        for index, (one, other) in enumerate(zip(stated, actual, strict=True)):
            yield from _differences(f"{path}[{index}]", one, other)
    elif (type(stated), stated) != (type(actual), actual):
        yield f"{path}: the statement has {_short(stated)}, the log {_short(actual)}"


def check_card(directory: Path, predicate: Mapping[str, Any]) -> Iterator[Problem]:
    """A README.md whose text is not that which follows from the statement. Raises `ConfigError` without huggingface_hub."""
    try:
        written, expected = (directory / README).read_bytes().splitlines(), card(predicate).encode().splitlines()
    except ConfigError:
        raise
    except OSError:
        return
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"a claim is malformed or missing ({type(error).__name__}: {error})") from error
    for number, (line, other) in enumerate(zip_longest(written, expected, fillvalue=b""), start=1):
        if line != other:
            text = f"line {number} is {_short(line.decode(errors='replace'))}, by the statement {_short(other.decode())}"
            yield Problem(level=1, kind="changed", name=README, text=text)
            return


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
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
                yield changed(name=f"{path.parent.name}/{path.name}", text=str(error))


def check_model(directory: Path, stated: str, names: Sequence[str], export: Callable[[Path], object]) -> Iterator[Problem]:
    """A model whose tensors are not the statement's weights, the tensors `names`. Raises `ValueError` for a damaged file.

    `export` writes those weights as a model: some architectures have other tensors in files than in training.
    """
    if not (tensors := list(_tensors(directory))):
        return
    expected = stated
    if sorted(tensor.name for tensor in tensors) != sorted(names):
        with tempfile.TemporaryDirectory() as temporary:
            try:
                export(Path(temporary) / "model")
                expected = digest(_tensors(Path(temporary) / "model"), hash_of(stated))
            except PenstockError as error:
                yield changed(name="model", text=f"its tensors have other names than the statement's weights: {error}")
                return
    if (actual := digest(tensors, hash_of(stated))) != expected:
        yield changed(name="model", text=f"the tensors of its safetensors files have digest {actual}, the statement has weights {expected}")
