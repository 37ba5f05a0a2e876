"""Writes the in-toto provenance statement of a model: claims computed from the run's log alone, and the SHA-256 of the model's files."""

import contextlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from penstock.infra.errors import ConfigError, LogError, RunNotFound
from penstock.infra.log import Log
from penstock.infra.paths import run_directory, sha256_of, write_complete, write_private
from penstock.pipeline.config.fields import SCHEME, is_hub_name
from penstock.pipeline.config.load import Config, from_json
from penstock.pipeline.inspect.metrics import settled
from penstock.pipeline.inspect.report.inclusion import Chain, leaves, root
from penstock.pipeline.inspect.report.summary import gone_from, summarise
from penstock.pipeline.inspect.run_status import config_of, info_of
from penstock.pipeline.inspect.run_view import Folded, RunView, read_view
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics import ledger, runs
from penstock.topics.metrics import Measurement
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.topics.wire.secrets import without_password

MODEL, CARD = "model", "card"
"""Subdirectories of a run: the final model with its card, and the card of a run without a final model."""
BISECTED = "bisect/result.txt"
"""File in a run's directory with the text of its last bisect."""
STATEMENT, README, SIGNATURE, SALT = "provenance.json", "README.md", "model.sig", "card.salt"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://penstock.dev/run/v1"
PREVIOUS = "README.previous{}.md"
"""New name of a README.md that a card replaces; numbered if the name is taken."""
UNNAMED = ("*.sig", "*.sigstore", "*.sigstore.json", ".git/*", ".gitattributes", ".cache/*", ".*.new")
"""Files that a statement does not list: signatures, files of git and of downloads, and unfinished files."""
SETTINGS = ("run", "schedule", "sampling", "algorithm", "trainer", "rollout")
SPAN = ("first", "end", "records")
"""Numbers that a statement has for each partition."""
PUBLISHED_KEYS = ("run", "step", "version", "digest", "ledger")
"""Facts about a parent run that are published."""
_FOLDERS = re.compile(r"(?<![\w.:/-])(?:~|\.{0,2})/(?:[^/\n]+/)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The parts of a run that a card and a statement describe."""

    reader: RunReader
    view: RunView
    chain: Chain
    evaluations: Mapping[int, str]


def read_published(log: Log, run: str, *, ends: Mapping[str, int] | None = None, alive: Callable[[], None] = lambda: None) -> Published:
    """Read a run up to its current end, or to `ends`: offset by TOPIC/PARTITION, as at an earlier read.

    `alive` is called before every batch. Raises `RunNotFound`, or `LogError` if the ledger has no entry or entries were deleted.
    """
    reader, evaluations = RunReader(log, run, alive=alive, ends=ends), dict[int, str]()

    def note(folded: Folded | None, record: Record) -> None:
        if isinstance(folded, Measurement) and folded.kind == "eval" and folded.version is not None:
            evaluations.setdefault(folded.version, ledger.digest(record.value))

    view = read_view(reader, also=note)
    if view.record is None and view.opened is None:
        raise RunNotFound(run)
    return Published(reader=reader, view=view, chain=read_chain(reader), evaluations=evaluations)


def read_prompts(reader: RunReader, chain: Chain) -> dict[int, str] | None:
    """Return group -> prompt for all trained groups; None if a prompt is missing."""
    trained = {planned.group for entry, _ in chain for planned in entry.plan}
    prompts = {read.payload.group: read.payload.prompt for read in reader.prompts(only=trained) if read.payload is not None}
    return prompts if trained <= prompts.keys() else None


def log_claims(published: Published, secret: bytes | None) -> dict[str, Any]:
    """Compute the claims of a statement from the run's log; `prompts` requires the `secret` for the salts, otherwise it is None."""
    entries, view = [entry for entry, _ in published.chain], published.view
    details = [json.loads(entry.details or "{}") for entry in entries]
    opened = [facts for entry, facts in zip(entries, details, strict=True) if entry.kind in ("run-opened", "rebased")]
    versions = [{"version": entry.version, "step": entry.step, "digest": entry.digest} for entry in entries if entry.kind == "version"]
    listed = {sha256 for entry in entries for sha256 in ledger.evaluations(entry)}
    info, config = info_of(view), from_json(json.dumps(config_of(view)))
    figures, parent = summarise(view, gone=gone_from(published.reader.log, view.run)), runs.parent(info)
    return {
        "run": view.run,
        "status": figures["status"],
        "fingerprint": opened[-1].get("fingerprint") if opened else None,
        "ledger": {"head": ledger.digest(published.chain[-1][1]), "entries": len(entries)},
        "steps": sum(entry.kind == "step" for entry in entries),
        "samples": figures["samples"],
        "tokens": figures["tokens"],
        "weights": versions[-1]["digest"] if versions else None,
        "versions": versions,
        "checkpoints": [
            {"step": entry.step, "version": entry.version, "digest": entry.digest, "manifest": facts.get("manifest")}
            for entry, facts in zip(entries, details, strict=True)
            if entry.kind == "checkpoint"
        ],
        "evaluations": [
            {**measured, "sha256": (sha256 := published.evaluations[measured["version"]]), "in_ledger": sha256 in listed}
            for measured in figures["eval"]
        ],
        "parent": {key: parent.get(key) for key in PUBLISHED_KEYS} if parent else None,
        "base": {**_base(config), "weights": versions[0]["digest"] if versions else None, **info.get("digests", {})},
        "data": [{**each, "source": public(each["source"])} for each in info.get("data", ())],
        "rewards": {public(name): digest for name, digest in (info.get("reward_sources") or {}).items()},
        "reward_weights": config.reward.weights,
        "code": {public(name): digest for name, digest in info.get("code", {}).items()},
        "changed": [{key: public(value) for key, value in change.items()} for change in info.get("changes", ())],
        "settings": settings(config),
        "groups": {**figures["groups"], "filtered_by": figures["filtered"], "samples_without_reward": figures["no_reward"]},
        "dead_letters": figures["dead_letters"]["by_kind"],
        "deleted": figures["gone"],
        "workers": dict(sorted(Counter(worker.role for worker in view.workers.values()).items())),
        "prompts": secret and _prompts(published, secret),
    }


LEDGER_CLAIMS = ("run", "fingerprint", "ledger", "steps", "weights", "versions", "checkpoints")
"""Claims that follow from the ledger alone, which retention never deletes."""


def _prompts(published: Published, secret: bytes) -> dict[str, Any] | None:
    """Return root and size of the salted hash tree over all trained prompts; None if retention deleted a prompt."""
    if (prompts := read_prompts(published.reader, published.chain)) is None:
        return None
    tree = leaves(published.chain, prompts)
    return {"root": root(tree, secret), "leaves": len(tree), "salted": True}


def audit_claims(audited: Mapping[str, Any]) -> dict[str, Any]:
    """Return the claims about a run's audit, from the table of the audit."""
    violations = {each["check"]: len(each["violations"]) for each in audited["checks"] if each["violations"]}
    return {**{key: audited[key] for key in ("clean", "closed", "summary", "notes")}, "violations": violations}


def _base(config: Config) -> dict[str, Any]:
    """Return name and revision of the base model; of a local one only the name of its directory."""
    name, _, revision = config.model.path.removeprefix(SCHEME).partition("@")
    on_hub = is_hub_name(config.model.path)
    return {"name": name if on_hub else public(config.model.path), "on_hub": on_hub, "revision": revision if on_hub else None}


def settings(config: Config) -> dict[str, Any]:
    """Return the effective settings of the sections that affect training."""
    table = settled(config)
    return {section: {key: public(value) for key, value in table[section].items() if value is not None} for section in SETTINGS}


def public(value: Any) -> Any:
    """Remove directories and passwords from a value: `public("/home/me/rewards.py:score")` is "rewards.py:score"."""
    return _FOLDERS.sub("", without_password(value)) if isinstance(value, str) else value


def read_chain(reader: RunReader) -> Chain:
    """Read the ledger entries and their payloads. Raises `LogError` if the ledger is empty or its first entries were deleted."""
    state, chain = LedgerState(reader.run), list[tuple[ledger.Entry, bytes]]()
    for record in reader.records("ledger", partitions=[0]):
        with contextlib.suppress(Unusable):
            if record.id not in reader.poison and isinstance(entry := state.apply(record), ledger.Entry):
                chain.append((entry, bytes(record.value)))
    if not chain:
        raise LogError(f"{reader.run} cannot be published: its ledger has no entry yet, or its first entries were deleted")
    return chain


def stored_secret(run: str) -> bytes | None:
    """Read the run's secret for salts from its directory; None if this machine does not have it. It must not be published."""
    path = run_directory(run) / SALT
    return bytes.fromhex(path.read_text(encoding="utf-8")) if path.exists() else None


def secret_of(run: str) -> bytes:
    """Return the run's secret for salts, generating it on the first call."""
    if (secret := stored_secret(run)) is None:
        run_directory(run).mkdir(parents=True, exist_ok=True)
        write_private(run_directory(run) / SALT, (secret := secrets.token_bytes(32)).hex())
    return secret


def card_directory(run: str) -> Path:
    """Return the directory for a run's card on this machine: that of the final model if it exists."""
    model = run_directory(run) / MODEL
    return model if model.is_dir() else model.with_name(CARD)


def publish(directory: Path, text: str, predicate: Mapping[str, Any], *, notify: Callable[[str], None]) -> Path:
    """Write README.md and then the statement, each atomically; return the statement's path. Raises `ConfigError` if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _keep_other_readme(directory, text, notify)
        write_complete(directory / README, text)
        named = [(name, path) for name, path in sorted(files_of(directory).items()) if path.is_file()]
        subject = [{"name": name, "digest": {"sha256": sha256_of(path)}} for name, path in named]
        statement = {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": PREDICATE_TYPE, "predicate": predicate}
        path, stated = directory / STATEMENT, json.dumps(statement, indent=1, allow_nan=False) + "\n"
        if (old := directory / SIGNATURE).exists() and not (path.is_file() and path.read_bytes() == stated.encode()):
            old.unlink()
            notify(f"removed {old}, the signature of earlier files")
        write_complete(path, stated)
    except OSError as error:
        raise ConfigError(f"cannot write the card to {directory}: {error.strerror}; choose another directory with --out") from error
    return path


def files_of(directory: Path, named: Collection[str] = ()) -> dict[str, Path]:
    """Return relative path -> path of all files in a model's directory that a statement lists (`named`) or has to list."""
    paths = {
        path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_symlink() or not path.is_dir()
    }
    return {
        name: path for name, path in paths.items() if name in named or not any(fnmatch(name, pattern) for pattern in (STATEMENT, *UNNAMED))
    }


def read_statement(directory: Path) -> dict[str, Any]:
    """Read the statement in a model's directory. Raises `ConfigError` if there is none, `ValueError` if it is damaged."""
    path = directory / STATEMENT
    if not path.is_file():
        if not directory.is_dir():
            raise ConfigError(f"directory {directory} does not exist")
        raise ConfigError(f"{directory} has no {STATEMENT}; `penstock card RUN` writes one")
    try:
        statement = json.loads(path.read_bytes())
        named = [(subject["name"], subject["digest"]["sha256"]) for subject in statement["subject"]]
        types = (statement["_type"], statement["predicateType"])
        predicate, topics = statement["predicate"], statement["predicate"]["topics"]
        head, numbers = (
            predicate["ledger"]["head"],
            [predicate["ledger"]["entries"], *(row[key] for row in topics.values() for key in SPAN)],
        )
        texts = [head, *dict(named).values(), *(row["sha256"] for row in topics.values())]
        names = [predicate["run"], *dict(named), *([] if predicate["weights"] is None else [predicate["weights"]])]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid statement ({type(error).__name__}: {error})") from error
    if types != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise ValueError(f"{path}: the types are {types[0]!r} and {types[1]!r}, expected {STATEMENT_TYPE!r} and {PREDICATE_TYPE!r}")
    hexadecimal = re.compile("[0-9a-f]{64}")
    if not all(isinstance(text, str) and hexadecimal.fullmatch(text) for text in texts):
        raise ValueError(f"{path}: a SHA-256 is not 64 hexadecimal digits")
    if not all(type(number) is int for number in numbers) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: a number or name has the wrong type")
    if len(dict(named)) < len(named):
        raise ValueError(f"{path} lists a file twice")
    return statement


def signer(key: Path) -> Callable[[Path], Path]:
    """Return a function that signs all files of a model with a private elliptic-curve key. Raises `ConfigError` without model-signing."""
    try:
        from model_signing import hashing, signing
    except ImportError as error:
        raise ConfigError(f"--sign needs the package model-signing ({error}): pip install model-signing pyopenssl") from error

    def sign(directory: Path) -> Path:
        signature = directory / SIGNATURE
        try:
            hashed = hashing.Config().set_ignored_paths(paths=[signature], ignore_git_paths=True)
            signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(hashed).sign(directory, signature)
        # The errors of the library, including those about keys, have no common base class.
        except Exception as error:
            raise ConfigError(f"--sign {key}: {' '.join(str(error).split())[:200]}; give a private elliptic-curve key in PEM") from error
        return signature

    return sign


def _keep_other_readme(directory: Path, text: str, notify: Callable[[str], None]) -> None:
    """Rename an existing README.md unless the previous card wrote it: it may be the base model's, or edited by the user."""
    path = directory / README
    if not path.is_file() or path.read_bytes() == text.encode():
        return
    try:
        stated = {each["name"]: each["digest"]["sha256"] for each in read_statement(directory)["subject"]}
    except ValueError:
        stated = {}
    if stated.get(README) == sha256_of(path):
        return
    names = (PREVIOUS.format(f"-{number}" if number else "") for number in range(len(list(directory.iterdir())) + 1))
    unused = next(directory / name for name in names if not (directory / name).exists())
    path.rename(unused)
    notify(f"renamed the existing {path} to {unused.name}")
