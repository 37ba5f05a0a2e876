"""Rebases of a run as plain data and text: repeated steps gave other bits than the ledger, and the run continued from them."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.topics.ledger import Entry


def rebased_fields(entry: Entry) -> dict[str, Any]:
    """Fields of a "rebased" ledger entry, for JSON; `steps` is the number of committed steps."""
    details = json.loads(entry.details or "{}")
    return {
        "entry": entry.seq,
        "time_s": entry.time_ns / 1e9,
        "steps": entry.step,
        "digest": entry.digest,
        "changed": details.get("changed", {}),
        "differences": details.get("differences", []),
    }


def rebased_line(rebased: Mapping[str, Any]) -> str:
    """A rebase as one line, with the first number that differs."""
    changed = ", ".join(f"{name} {recorded} -> {here}" for name, (recorded, here) in rebased["changed"].items())
    differences, parts = rebased["differences"], [f"arithmetic {changed}"] if changed else []
    if differences:
        steps, first = sorted({difference["step"] for difference in differences}), differences[0]
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        parts.append(f"{which} repeated with other bits, first {first['name']} {first['found']} where the ledger says {first['recorded']}")
    return f"rebased after {rebased['steps']} steps (ledger entry {rebased['entry']}): {'; '.join(parts)}"
