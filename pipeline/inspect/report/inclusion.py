"""Proves that a run was trained on a group without revealing other groups: a path in a hash tree (RFC 6962) over all trained prompts, and
the ledger entries from the group's step to the head.

Leaves are salted, because a short prompt could be guessed from an unsalted digest.
"""

import hashlib
import hmac
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from penstock.infra.errors import PenstockError
from penstock.topics import groups, ledger
from penstock.topics.ledger import Entry

PROOF_TYPE = "https://penstock.dev/inclusion/v1"
Chain = Sequence[tuple[Entry, bytes]]
"""(entry, payload) of all ledger entries in order, without repetitions."""


class InvalidProof(PenstockError):
    """A proof is invalid; the message names the part that is wrong."""


class Inclusion(NamedTuple):
    """What a valid proof proves, provided that root and head are those of a published card."""

    run: str
    group: int
    step: int
    prompt: str
    root: str
    head: str
    entries: int
    has_record: bool
    """True if the proof contains the group's record, so that the ledger proves the prompt; otherwise the card's root proves it."""


class Leaf(NamedTuple):
    """A trained group as a leaf of the hash tree."""

    group: int
    step: int
    record: str
    """SHA-256 of the group's record, as in the plan of the step."""
    prompt: str

    def digest(self, salt: bytes) -> bytes:
        """Return the SHA-256 of the leaf and its salt."""
        return _sha256(b"\0", salt, json.dumps(self).encode())

    def salt(self, secret: bytes) -> bytes:
        """Derive the leaf's salt from the run's secret. A published salt reveals neither the secret nor other salts."""
        return hmac.digest(secret, b"%d" % self.group, "sha256")


def leaves(chain: Chain, prompts: Mapping[int, str]) -> list[Leaf]:
    """Return a leaf per trained group, in the order of training. `prompts` maps each trained group to its prompt."""
    return [
        Leaf(planned.group, entry.step or 0, planned.sha256, prompts[planned.group])
        for entry, _ in chain
        if entry.kind == "step"
        for planned in entry.plan
    ]


def root(tree: Sequence[Leaf], secret: bytes) -> str:
    """Return the root of the tree (hexadecimal), which commits to all leaves and reveals none."""
    return _climb([leaf.digest(leaf.salt(secret)) for leaf in tree], 0)[0]


def prove(run: str, group: int, chain: Chain, tree: Sequence[Leaf], secret: bytes, *, parts: Sequence[bytes] = ()) -> dict[str, Any]:
    """Build the proof for one group of `tree`. With `parts`, the payloads of its record, the proof also shows samples and rewards."""
    index, leaf = next((index, leaf) for index, leaf in enumerate(tree) if leaf.group == group)
    top, path = _climb([each.digest(each.salt(secret)) for each in tree], index)
    start = next(number for number, (entry, _) in enumerate(chain) if entry.kind == "step" and entry.step == leaf.step)
    return {
        "_type": PROOF_TYPE,
        "run": run,
        "leaf": leaf._asdict(),
        "salt": leaf.salt(secret).hex(),
        "path": path,
        "root": top,
        "entries": [b64encode(value).decode() for _, value in chain[start:]],
        "ledger": {"head": ledger.digest(chain[-1][1]), "entries": len(chain)},
        "record": [b64encode(part).decode() for part in parts],
    }


def check(proof: Mapping[str, Any]) -> Inclusion:
    """Check a proof by itself; the caller has to compare root and head with a published card. Raises `InvalidProof`."""
    try:
        if not isinstance(proof, Mapping) or proof.get("_type") != PROOF_TYPE:
            raise InvalidProof(f"the file is not a proof of type {PROOF_TYPE}; `penstock card RUN --prove GROUP` prints one")
        leaf, salt = Leaf(**proof["leaf"]), bytes.fromhex(proof["salt"])
        _check_path(leaf.digest(salt), proof["path"], str(proof["root"]))
        head, count = str(proof["ledger"]["head"]), int(proof["ledger"]["entries"])
        _check_chain(leaf, [b64decode(value, validate=True) for value in proof["entries"]], head=head, count=count)
        parts = [b64decode(part, validate=True) for part in proof["record"]]
        if parts:
            _check_record(leaf, parts)
        run = str(proof["run"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:  # the file may be forged
        raise InvalidProof(f"the proof cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from error
    return Inclusion(run, leaf.group, leaf.step, leaf.prompt, str(proof["root"]), head, count, bool(parts))


def _check_path(digest: bytes, path: Sequence[tuple[str, str]], expected: str) -> None:
    """Raise `InvalidProof` unless hashing a leaf's digest with the siblings on its path gives the expected root."""
    for side, other in path:
        pair = (bytes.fromhex(other), digest) if side == "left" else (digest, bytes.fromhex(other))
        digest = _sha256(b"\1", *pair)
    if digest.hex() != expected:
        raise InvalidProof(f"the path from the leaf leads to the root {digest.hex()[:16]}…, but the proof states {expected[:16]}…")


def _check_chain(leaf: Leaf, values: Sequence[bytes], *, head: str, count: int) -> None:
    """Raise `InvalidProof` unless the first entry trains the leaf's record, each names its predecessor, and the last is the head."""
    entries = [ledger.decode(value) for value in values]
    if not entries or entries[0].kind != "step" or entries[0].step != leaf.step:
        raise InvalidProof(f"the first ledger entry is not step {leaf.step}")
    if (leaf.group, leaf.record) not in {(planned.group, planned.sha256) for planned in entries[0].plan}:
        raise InvalidProof(f"the plan of step {leaf.step} has no group {leaf.group} with SHA-256 {leaf.record[:16]}…")
    for (before, value), (entry, _) in pairwise(zip(entries, values, strict=True)):
        if entry.previous != ledger.digest(value) or entry.seq != before.seq + 1:
            raise InvalidProof(f"ledger entry {entry.seq} does not contain the digest of entry {before.seq}")
    if (ledger.digest(values[-1]), entries[-1].seq + 1) != (head, count):
        raise InvalidProof(f"the last ledger entry is {entries[-1].seq}, which is not the head {head[:16]}… of {count} entries")


def _check_record(leaf: Leaf, parts: Sequence[bytes]) -> None:
    """Raise `InvalidProof` unless the payloads `parts` are the record of the leaf's group and prompt."""
    group = groups.decode_parts(parts)
    if (groups.digest(parts), group.group, group.prompt) != (leaf.record, leaf.group, leaf.prompt):
        raise InvalidProof(f"the record in the proof is not that of group {leaf.group} with this prompt")


def _climb(level: list[bytes], index: int) -> tuple[str, list[tuple[str, str]]]:
    """Return the root over these leaves, and (side, digest) of each sibling on the path from the leaf at `index` to the root."""
    path: list[tuple[str, str]] = []
    while len(level) > 1:
        if (sibling := index ^ 1) < len(level):
            path.append(("left" if sibling < index else "right", level[sibling].hex()))
        level = [_sha256(b"\1", *level[low : low + 2]) if low + 1 < len(level) else level[low] for low in range(0, len(level), 2)]
        index //= 2
    return (level[0] if level else _sha256()).hex(), path


def _sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
