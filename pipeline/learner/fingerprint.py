"""Fingerprint of a step's arithmetic, and its changes since the run was opened.

Under equal fingerprints on a CPU, a repeated step gives the same bits.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.infra.backends.base import Backend
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.plugins import source_digest, split_options
from penstock.topics.ledger import Entry


def arithmetic_of(backend: Backend, config: Config) -> dict[str, str | int]:
    """The backend's fingerprint, and a digest of the source of each user function."""
    names = {"algorithm.loss": config.algorithm.loss, "algorithm.advantage": config.advantage}
    return backend.fingerprint() | {key: source_digest(split_options(name)[0])[:16] for key, name in names.items() if ":" in name}


def changed_arithmetic(entries: Sequence[Entry], now: Mapping[str, str | int]) -> dict[str, tuple[Any, Any]]:
    """Differences from the newest fingerprint in the ledger, of the opening or of a rebase: name -> (recorded, now)."""
    details = [json.loads(entry.details or "{}") for entry in entries if entry.kind in ("run-opened", "rebased")]
    recorded: Mapping[str, Any] = details[-1].get("fingerprint", {}) if details else {}
    if recorded and "forward" in now:
        recorded = {"forward": "padded rows, logits whole", **recorded}  # the default of fingerprints without this key
    return {name: (recorded[name], now.get(name)) for name in recorded if recorded[name] != now.get(name)}


def rebases(config: Config, changed: Mapping[str, Any], now: Mapping[str, str | int]) -> bool:
    """True if a trainer continues after a repeated step gave other bits: as configured, else on GPUs and under changed arithmetic."""
    action = config.trainer.on_mismatch
    return action == "rebase" if action is not None else bool(changed) or now.get("device", "cpu") != "cpu"
