"""`penstock verify`: verifies the provenance statement of a model (in-toto Statement v1) at three levels. Read-only.

Level 1 checks the files of the model, level 2 the log of its run, level 3 recomputes random steps.
"""

import json
import mmap
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from penstock.infra.checkpoints import MANIFEST, CheckpointStore, Recorded
from penstock.infra.errors import CheckpointError, ConfigError, PenstockError, Unrecoverable
from penstock.infra.log import Log
from penstock.infra.paths import sha256_of
from penstock.infra.tensors.stream import TensorBytes, digest, hash_of
from penstock.pipeline.inspect.report.card import card
from penstock.pipeline.inspect.report.provenance import (
    LEDGER_CLAIMS,
    README,
    STATEMENT,
    audit_claims,
    files_of,
    log_claims,
    read_published,
    read_statement,
    stored_secret,
)
from penstock.pipeline.replay.recording import Recording, prepare
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.registration.trust import Trust, require_trusted, user_code
from penstock.topics import ledger
from penstock.topics.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A difference between a statement and the model, log or step that it describes."""

    level: Literal[1, 2, 3]
    kind: Literal["changed", "missing", "added"]
    name: str
    """Name of the file, claim, audit check, topic or step that differs."""
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.text}"


def check_files(directory: Path, statement: dict[str, Any]) -> Iterator[Problem]:
    """Yield the differences between the files of a directory and the files (subjects) that its statement lists."""
    named = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    files = files_of(directory, named)
    for name, sha256 in named.items():
        if name not in files:
            yield Problem(level=1, kind="missing", name=name, text="the statement lists this file")
            continue
        if not files[name].is_file():
            yield Problem(level=1, kind="changed", name=name, text="not a regular file")
            continue
        if (actual := sha256_of(files[name])) != sha256:
            yield Problem(level=1, kind="changed", name=name, text=f"SHA-256 is {actual[:16]}…, the statement has {sha256[:16]}…")
    for name in files.keys() - named.keys():
        yield Problem(level=1, kind="added", name=name, text="the statement does not list this file")


_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _tensors(directory: Path) -> Iterator[TensorBytes]:
    """Yield the tensors in a directory's safetensors files, memory-mapped. Raises `ValueError` for a damaged file."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            (length,) = struct.unpack_from("<Q", data)
            header = {name: entry for name, entry in json.loads(bytes(data[8 : 8 + length])).items() if name != "__metadata__"}
            for name, entry in header.items():
                low, high = (8 + length + offset for offset in entry["data_offsets"])
                dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
                yield TensorBytes(name=name, dtype=dtype, shape=tuple(entry["shape"]), data=data[low:high])
        except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is not a valid safetensors file: {error}") from error


GROWING = ("metrics/", "run/")
"""Prefixes of topics that may receive records after a run has ended."""
changed = partial(Problem, level=2, kind="changed")
"""Constructor of a difference between statement and log."""


def check_claims(stated: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the claims of a statement that differ from those computed from the log, each with its first difference."""
    for name, value in json.loads(json.dumps(actual)).items():
        if (difference := next(_differences(name, stated.get(name), value), None)) is not None:
            yield changed(name=name, text=difference)


def _differences(path: str, stated: Any, actual: Any) -> Iterator[str]:
    """Yield a sentence for each value at or below `path` that differs between the statement and the log."""
    if isinstance(stated, dict) and isinstance(actual, dict):
        for key in stated | actual:
            yield from _differences(f"{path}.{key}", stated.get(key), actual.get(key))
    elif isinstance(stated, list) and isinstance(actual, list) and len(stated) == len(actual):
        for index, (one, other) in enumerate(zip(stated, actual, strict=True)):
            yield from _differences(f"{path}[{index}]", one, other)
    elif (type(stated), stated) != (type(actual), actual):
        yield f"{path}: the statement has {_short(stated)}, the log {_short(actual)}"


def check_card(directory: Path, predicate: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the first line of README.md that differs from the card of the statement. Raises `ConfigError` without huggingface_hub."""
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
            text = f"line {number} is {_short(line.decode(errors='replace'))}, expected from the statement: {_short(other.decode())}"
            yield Problem(level=1, kind="changed", name=README, text=text)
            return


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"


def check_topics(stated: Mapping[str, Any], digests: Mapping[str, Any], starts: Mapping[str, int]) -> Iterator[Problem]:
    """Yield the partitions whose records differ from the statement; those with a later first retained offset (`starts`) are skipped."""
    for name, claim in stated.items():
        actual = digests.get(name, {"records": 0, "sha256": None})
        if starts.get(name, 0) <= max(claim["first"], 0) and any(
            actual.get(key) != claim[key] for key in ("first", "end", "records", "sha256")
        ):
            same = actual["records"] == claim["records"]
            kind: Any = "changed" if same else "missing" if actual["records"] < claim["records"] else "added"
            counts = f"{actual['records']} records" if same else f"{actual['records']} records, the statement has {claim['records']}"
            yield Problem(
                level=2, kind=kind, name=name, text=f"the records up to offset {claim['end']} differ from the statement: {counts}"
            )


def check_checkpoints(store: CheckpointStore, recorded: Recorded, entries: Sequence[Entry]) -> Iterator[Problem]:
    """Yield the checkpoints on this machine that differ from the ledger; those newer than the entries of a running run are skipped."""
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
    """Yield a problem if the digest of a model's tensors differs from the stated digest of the run's weights.

    `names` are the tensors of the run's weights. If the model's files have other tensors, as for some architectures, `export` writes the
    weights as a model, and the digests of the two models are compared.
    """
    expected = stated
    try:
        if not (tensors := list(_tensors(directory))):
            return
        if sorted(tensor.name for tensor in tensors) != sorted(names):
            with tempfile.TemporaryDirectory() as temporary:
                export(Path(temporary) / "model")
                expected = digest(_tensors(Path(temporary) / "model"), hash_of(stated))
        if (actual := digest(tensors, hash_of(stated))) != expected:
            text = f"the tensors in the safetensors files have digest {actual}, expected {expected} from the statement"
            yield changed(name="model", text=text)
    except (ValueError, PenstockError) as error:
        yield changed(name="model", text=f"the tensors cannot be compared with the weights in the statement: {error}")


Reading = Callable[..., AbstractContextManager[tuple[Log, str]]]
"""Context manager that yields (log, run id); the keyword `executes` is True if code of the run will be executed."""
Auditing = Callable[[Mapping[str, tuple[int, int]]], tuple[dict[str, Any], list[tuple[str, str]], dict[str, Any], Mapping[str, int]]]
"""Audits the run. Takes partition -> (first, end) offsets of the statement; returns the audit's table, the violations as (check, text), the
digest of each span, and partition -> number of records after it."""


@dataclass(slots=True, kw_only=True)
class Verification:
    """Verification of a model directory: runs the three levels, and collects figures and problems."""

    directory: Path
    notify: Callable[[str], None]
    statement: dict[str, Any] | None = None
    """None before level 1, or if the statement cannot be read."""
    problems: list[Problem] = field(default_factory=list)
    levels: list[dict[str, Any]] = field(default_factory=list)

    @property
    def predicate(self) -> dict[str, Any]:
        """Claims of the statement about the run."""
        assert self.statement is not None, "level 1 has read it"
        stated: dict[str, Any] = self.statement["predicate"]
        return stated

    def check_files(self) -> None:
        """Level 1: check that the directory has exactly the files of the statement, and that the card follows from the statement."""
        with self._level(STATEMENT) as figures:
            self.statement = read_statement(self.directory)
            figures["files"] = len(self.statement["subject"])
            self.problems += check_files(self.directory, self.statement)
            try:
                self.problems += check_card(self.directory, self.predicate)
            except ConfigError as error:
                self.notify(f"{README} was not compared with the statement: {error}")

    def check_log(self, log: str, reading: Reading, audit: Auditing) -> None:
        """Level 2: audit the run, and check that claims, topics, model and checkpoints agree with the log."""
        topics = self.predicate["topics"]
        starts_ends = {name: (topic["first"], topic["end"]) for name, topic in topics.items()}
        with self._level(log) as figures:
            with reading() as (_, run):
                if run != self.predicate["run"]:
                    raise ValueError(f"this is the log of {run}, but the statement is about {self.predicate['run']}")
            table, violations, digests, later = audit(starts_ends)
            figures |= {"entries": table["records"].get("ledger", 0), "audit": table["summary"], "topics": len(topics)}
            starts = table["deleted_below"]
            self.problems += check_topics(topics, digests, starts)
            self.problems += (changed(name=check, text=text) for check, text in violations)
            try:
                with reading() as (read_log, run), closing(Recording.open(read_log, run)) as recording:
                    published = read_published(read_log, run, ends={name: end for name, (_, end) in starts_ends.items()})
                    actual = log_claims(published, stored_secret(run))
                    self._check_model(recording)
            except ConfigError as error:  # the audit could read the run, so its registration record is damaged
                raise ValueError(str(error)) from error
            if any(
                starts.get(name, 0) > max(first, 0) for name, (first, _) in starts_ends.items()
            ):  # other claims need the deleted records
                actual = {name: actual[name] for name in LEDGER_CLAIMS}
            elif not later:
                actual["audit"] = audit_claims(table)
            if published.view.closed is None:
                actual.pop("status", None)
            else:
                self.problems += (
                    Problem(level=2, kind="added", name=name, text=f"{count} records follow those of the statement")
                    for name, count in later.items()
                    if not name.startswith(GROWING)
                )
            if actual.get("prompts") is None:
                actual.pop("prompts", None)
            self.problems += check_claims(self.predicate, actual)
            if (store := open_store(recording.config, run, to_read=True)) is not None:
                figures["checkpoints"] = len(store.steps())
                self.problems += check_checkpoints(store, recording.past.recorded(), recording.entries)

    def repeat_steps(self, log: str, reading: Reading, count: int, seed: int, *, trust_code: bool) -> None:
        """Level 3: recompute `count` random steps from the versions published before them, and compare them with the ledger."""
        with self._level(log) as figures, reading(executes=True) as (read_log, run), closing(Recording.open(read_log, run)) as recording:
            code = user_code(recording.config, sections=("algorithm", "trainer"))
            require_trusted(recording.registration, trust=Trust(code=trust_code), notify=self.notify, code=code)
            prepare(recording.config)
            from penstock.pipeline.replay.provenance import single_steps  # imports torch, which reads the environment then

            steps = single_steps.selected(recording, count, seed=f"{self.predicate['ledger']['head']}/{seed}")
            cost_s = sum(entry.metrics.get("compute_s", 0.0) for entry in steps)
            numbers = ", ".join(str(entry.step) for entry in steps)
            self.notify(f"recomputing steps {numbers}, for which the run's trainer took {cost_s:.1f} s")
            figures["steps"] = []
            for repeated in single_steps.repeat_steps(recording, steps, architecture=str(self.directory), notify=self.notify):
                figures["steps"].append(asdict(repeated))
                text = "; ".join(repeated.differences)
                self.notify(f"step {repeated.step}: {text or 'bit-identical'}")
                if not repeated.same:
                    self.problems.append(Problem(level=3, kind="changed", name=f"step {repeated.step}", text=text))

    @contextmanager
    def _level(self, damaged: str) -> Iterator[dict[str, Any]]:
        """Time a level and store its figures. A file or record that cannot be read ends the level with a problem named `damaged`."""
        figures: dict[str, Any] = {"level": len(self.levels) + 1}
        wall, cpu = time.monotonic(), time.process_time()
        try:
            yield figures
        except ConfigError:
            raise
        except (ValueError, Unrecoverable) as error:
            self.problems.append(Problem(level=figures["level"], kind="changed", name=damaged, text=" ".join(str(error).split())))
        self.levels.append({**figures, "seconds": time.monotonic() - wall, "cpu_s": time.process_time() - cpu})

    def _check_model(self, recording: Recording) -> None:
        stated, manifests = self.predicate["weights"], recording.ledger_state.manifests
        version = next((number for number, manifest in manifests.items() if manifest.digest == stated), None)
        if version is None:
            return

        def export(target: Path) -> None:
            from penstock.infra.backends.model import write_model  # imports torch
            from penstock.pipeline.replay.restore_policy import weights_of

            write_model(self.directory, weights_of(recording, version), target)

        self.problems += check_model(self.directory, stated, manifests[version].names, export)
