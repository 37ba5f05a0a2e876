"""Proves that a group was trained without any other group's texts: a path from its leaf to the card's root, and from its step to the head.

A leaf is salted, because a short prompt could be guessed from its plain digest; the tree is that of RFC 6962.
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
"""The entries of a ledger in order, without repetitions, and their payloads."""


class InvalidProof(PenstockError):
    """A proof does not prove what it states; the message names the part that does not fit."""


class Inclusion(NamedTuple):
    """Content of a valid proof, if root and head are those of a card."""

    run: str
    group: int
    step: int
    prompt: str
    root: str
    head: str
    entries: int
    has_record: bool
    """True if the proof has the group's record, so that the ledger itself proves the prompt; else the card's root does."""


class Leaf(NamedTuple):
    """A trained group as the tree contains it."""

    group: int
    step: int
    record: str
    """SHA-256 of the group's record, as in the plan of the step."""
    prompt: str

    def digest(self, salt: bytes) -> bytes:
        """SHA-256 of the leaf under its own salt, which is published with it."""
        return _sha256(b"\0", salt, json.dumps(self).encode())

    def salt(self, secret: bytes) -> bytes:
        """The leaf's salt, from which the run's secret and other salts do not follow."""
        return hmac.digest(secret, b"%d" % self.group, "sha256")


def leaves(chain: Chain, prompts: Mapping[int, str]) -> list[Leaf]:
    """The trained groups in the order of the plans."""
    return [
        Leaf(planned.group, entry.step or 0, planned.sha256, prompts[planned.group])
        for entry, _ in chain
        if entry.kind == "step"
        for planned in entry.plan
    ]


def root(tree: Sequence[Leaf], secret: bytes) -> str:
    """Root of the tree (hex), which commits to all leaves and shows none."""
    return _climb([leaf.digest(leaf.salt(secret)) for leaf in tree], 0)[0]


def prove(run: str, group: int, chain: Chain, tree: Sequence[Leaf], secret: bytes, *, parts: Sequence[bytes] = ()) -> dict[str, Any]:
    """A proof for one group of `tree`; `parts` are the payloads of its record, which show samples and rewards too."""
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
    """Check a proof from itself alone. Raises `InvalidProof`; root and head are for the caller to compare with a card."""
    try:
        if not isinstance(proof, Mapping) or proof.get("_type") != PROOF_TYPE:
            raise InvalidProof(f"it is no proof of type {PROOF_TYPE}: `penstock card RUN --prove GROUP` prints one")
        leaf, salt = Leaf(**proof["leaf"]), bytes.fromhex(proof["salt"])
        _check_path(leaf.digest(salt), proof["path"], str(proof["root"]))
        head, count = str(proof["ledger"]["head"]), int(proof["ledger"]["entries"])
        _check_chain(leaf, [b64decode(value, validate=True) for value in proof["entries"]], head=head, count=count)
        parts = [b64decode(part, validate=True) for part in proof["record"]]
        if parts:
            _check_record(leaf, parts)
        run = str(proof["run"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:  # of a file that anybody may have written
        raise InvalidProof(f"the proof cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})") from error
    return Inclusion(run, leaf.group, leaf.step, leaf.prompt, str(proof["root"]), head, count, bool(parts))


def _check_path(digest: bytes, path: Sequence[tuple[str, str]], expected: str) -> None:
    for side, other in path:
        pair = (bytes.fromhex(other), digest) if side == "left" else (digest, bytes.fromhex(other))
        digest = _sha256(b"\1", *pair)
    if digest.hex() != expected:
        raise InvalidProof(f"the path of the leaf leads to {digest.hex()[:16]}…, the proof has the root {expected[:16]}…")


def _check_chain(leaf: Leaf, values: Sequence[bytes], *, head: str, count: int) -> None:
    """Check that the first entry trains the leaf's record, that each has the digest of the one before, and that the last is the head."""
    entries = [ledger.decode(value) for value in values]
    if not entries or entries[0].kind != "step" or entries[0].step != leaf.step:
        raise InvalidProof(f"the first ledger entry is not step {leaf.step}")
    if (leaf.group, leaf.record) not in {(planned.group, planned.sha256) for planned in entries[0].plan}:
        raise InvalidProof(f"the plan of step {leaf.step} has no group {leaf.group} with SHA-256 {leaf.record[:16]}…")
    for (before, value), (entry, _) in pairwise(zip(entries, values, strict=True)):
        if entry.previous != ledger.digest(value) or entry.seq != before.seq + 1:
            raise InvalidProof(f"ledger entry {entry.seq} does not follow entry {before.seq}")
    if (ledger.digest(values[-1]), entries[-1].seq + 1) != (head, count):
        raise InvalidProof(f"the last ledger entry is {entries[-1].seq}, which is not the head {head[:16]}… of {count} entries")


def _check_record(leaf: Leaf, parts: Sequence[bytes]) -> None:
    group = groups.decode_parts(parts)
    if (groups.digest(parts), group.group, group.prompt) != (leaf.record, leaf.group, leaf.prompt):
        raise InvalidProof(f"the record is not that of group {leaf.group} with this prompt")


def _climb(level: list[bytes], index: int) -> tuple[str, list[tuple[str, str]]]:
    """The root over these leaves, and for the leaf at `index` the side and digest of each sibling on the way to it."""
    path: list[tuple[str, str]] = []
    while len(level) > 1:
        if (sibling := index ^ 1) < len(level):
            path.append(("left" if sibling < index else "right", level[sibling].hex()))
        level = [_sha256(b"\1", *level[low : low + 2]) if low + 1 < len(level) else level[low] for low in range(0, len(level), 2)]
        index //= 2
    return (level[0] if level else _sha256()).hex(), path


def _sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
