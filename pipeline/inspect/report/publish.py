"""Writes a run's card and its in-toto statement next to the model's files, and a signature over all of them."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.infra.errors import ConfigError
from penstock.infra.paths import run_directory, write_private

STATEMENT, README, SIGNATURE, SALT = "provenance.json", "README.md", "model.sig", "card.salt"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://penstock.dev/run/v1"
PREVIOUS = "README.previous{}.md"
"""Name of a README.md that a card replaces; the number is empty for the first one."""


def secret_of(run: str) -> bytes:
    """The run's secret for salts, made at the first call; it is in the run's folder on this machine and never published."""
    path = run_directory(run) / SALT
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, secrets.token_hex(32))
    return bytes.fromhex(path.read_text(encoding="utf-8"))


def publish(directory: Path, text: str, predicate: Mapping[str, Any], *, notify: Callable[[str], None]) -> Path:
    """Write README.md and then the statement, each complete or not at all. Raises `ConfigError` if a file cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _keep_other_readme(directory, text, notify)
        write_private(directory / README, text)
        statement = {
            "_type": STATEMENT_TYPE, "subject": subjects(directory), "predicateType": PREDICATE_TYPE, "predicate": predicate,
        }  # fmt: skip
        write_private(directory / STATEMENT, json.dumps(statement, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the card in {directory}: {error.strerror}; give another --out") from error
    return directory / STATEMENT


def subjects(directory: Path) -> list[dict[str, Any]]:
    """Name and SHA-256 of every file of a model but the statement, signatures and unfinished files."""
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return [
        {"name": name, "digest": {"sha256": sha256_of(path)}}
        for name, path in sorted(files.items())
        if name != STATEMENT and path.suffix != ".sig" and not (path.name.startswith(".") and path.suffix == ".new")
    ]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def published(directory: Path) -> dict[str, Any]:
    """The statement in a folder. Raises `ConfigError`."""
    try:
        statement = json.loads((directory / STATEMENT).read_text(encoding="utf-8"))
        if statement["predicateType"] == PREDICATE_TYPE and statement["predicate"]["ledger"]["entries"] >= 1:
            return dict(statement)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{directory} has no {STATEMENT} of a run; write the card first: penstock card RUN")


def sign(directory: Path, key: Path) -> Path:
    """Sign all files of a model with a private elliptic-curve key, by the package model-signing. Raises `ConfigError`."""
    try:
        from model_signing import hashing, signing
    except ImportError as error:
        raise ConfigError(f"--sign needs the package model-signing ({error}): pip install model-signing pyopenssl") from error
    signature = directory / SIGNATURE
    try:
        hashed = hashing.Config().set_ignored_paths(paths=[signature], ignore_git_paths=True)
        signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(hashed).sign(directory, signature)
    # The boundary to a library: its errors, those of keys included, have no common type.
    except Exception as error:
        raise ConfigError(f"--sign {key}: {' '.join(str(error).split())[:200]}; give a private elliptic-curve key in PEM") from error
    return signature


def _keep_other_readme(directory: Path, text: str, notify: Callable[[str], None]) -> None:
    """Rename a README.md that is not the one of the statement before, such as the base model's or one that was edited."""
    path = directory / README
    if not path.is_file() or path.read_bytes() == text.encode():
        return
    try:
        known = {each["name"]: each["digest"]["sha256"] for each in published(directory)["subject"]}
    except (ConfigError, KeyError, TypeError):
        known = {}
    if known.get(README) == sha256_of(path):
        return
    names = (PREVIOUS.format(f"-{number}" if number else "") for number in range(len(list(directory.iterdir())) + 1))
    kept = next(directory / name for name in names if not (directory / name).exists())
    path.rename(kept)
    notify(f"{path} was another one: it is now {kept.name}")
