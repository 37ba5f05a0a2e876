"""Checks on policy versions: manifests, chunks, recomputed digests, and the chain of base versions."""

from collections.abc import Container, Iterator, Mapping
from functools import partial

from penstock.pipeline.inspect.audit.check import Violation, check
from penstock.pipeline.inspect.audit.facts import EntryFact, Facts, ManifestFact, Recomputed
from penstock.topics.ledger import Entry
from penstock.topics.weights import Manifest
from penstock.topics.wire.record import RecordId


@check("version-numbers", "versions 0 to n, one manifest each, written with its entry", versions=lambda facts: len(facts.manifests))
def numbers(facts: Facts) -> Iterator[Violation]:
    """Yield versions with a wrong number, manifest or step; a version's ledger entry follows the step that completes the version."""
    manifests, entries = facts.first_manifests(), dict[int, EntryFact]()
    done = 0
    for fact in facts.entries:
        done += fact.entry.kind == "step"
        if fact.entry.kind == "version":
            for text in _entry_flaws(facts, manifests, fact.entry, entries, done=done):
                yield Violation(text=text, version=fact.entry.version, where=fact.where)
            entries.setdefault(fact.entry.version or 0, fact)
    yield from _manifest_flaws(facts, entries)
    if facts.closed is not None:
        newest = facts.terms.newest_version(done)
        for version in sorted(set(range(newest + 1)) - set(entries)):
            yield Violation(text=f"version {version} was never published, although {done} steps require version {newest}", version=version)


def _entry_flaws(
    facts: Facts, manifests: Mapping[int, ManifestFact], entry: Entry, entries: Mapping[int, EntryFact], *, done: int
) -> Iterator[str]:
    """Yield what is wrong with a version's ledger entry, which follows `entries` and `done` committed steps."""
    version, belongs = entry.version or 0, facts.terms.step_of(entry.version or 0)
    if version in entries:
        yield f"version {version} was already published in entry {entries[version].entry.seq}"
    elif version != len(entries):
        yield f"version {version} follows version {len(entries) - 1}"
    if entry.step != belongs or done < belongs:
        yield f"version {version} was published at step {entry.step} with {done} steps committed, expected step {belongs}"
    manifest = manifests.get(version)
    if manifest is None:
        if version >= facts.versions_below:
            yield f"version {version} has a ledger entry but no manifest"
    elif manifest.manifest.step != entry.step:
        yield f"the manifest of version {version} names step {manifest.manifest.step}, the ledger entry step {entry.step}"


def _manifest_flaws(facts: Facts, entries: Mapping[int, EntryFact]) -> Iterator[Violation]:
    """Yield manifests that are in the log twice or have no ledger entry."""
    manifests, newest = facts.first_manifests(), max(entries, default=-1)
    for fact in facts.manifests:
        version, violation = fact.manifest.version, partial(Violation, version=fact.manifest.version, where=fact.where)
        if fact.manifest.digest != manifests[version].manifest.digest:
            yield violation(text=f"version {version} has another manifest at {manifests[version].where}")
        elif version not in entries and (facts.closed is not None or version < newest):
            yield violation(text=f"the manifest of version {version} has no ledger entry")


@check(
    "chunks",
    "chunks are at the offsets of their manifest, with its size and SHA-256",
    chunks=lambda facts: sum(len(fact.manifest.chunk_sizes) for fact in facts.first_manifests().values()),
)
def chunks(facts: Facts) -> Iterator[Violation]:
    for version, fact in sorted(facts.first_manifests().items()):
        manifest = fact.manifest
        listed = zip(manifest.chunk_partitions, manifest.chunk_offsets, manifest.chunk_sizes, manifest.chunk_sha256, strict=True)
        for index, (partition, offset, size, sha256) in enumerate(listed):
            where = RecordId("weights", partition, offset)
            chunk, violation = facts.chunks.get(where), partial(Violation, version=version, where=where)
            if facts.deleted(where):
                continue
            if chunk is None:
                yield violation(text=f"chunk {index} of version {version} is missing")
            elif (chunk.version, chunk.number) != (version, index):
                yield violation(text=f"chunk {index} of version {version} is chunk {chunk.number} of version {chunk.version}")
            elif (chunk.size, chunk.sha256) != (size, sha256):
                text = f"chunk {index} has {chunk.size} bytes and SHA-256 {chunk.sha256[:16]}…, listed are {size} and {sha256[:16]}…"
                yield violation(text=text)


@check(
    "digests",
    "digests recomputed from the chunks are the recorded ones",
    versions=lambda facts: sum(version.digest is not None for version in facts.recomputed.values()),
)
def digests(facts: Facts) -> Iterator[Violation]:
    """Yield versions whose recomputed digest is another one, or whose base versions do not lead to a full snapshot."""
    manifests, broken = facts.first_manifests(), {violation.version for violation in chunks.rule(facts)}
    for version, fact in sorted(manifests.items()):
        recomputed = None if version in broken else facts.recomputed.get(version)
        for text in (_digest_flaw(fact.manifest, recomputed), *_base_flaws(fact.manifest, manifests, facts.versions_below)):
            if text is not None:
                yield Violation(text=text, version=version, where=fact.where)
    for entry, where in [(fact.entry, fact.where) for fact in facts.entries]:
        if entry.kind == "version" and entry.version in manifests and entry.digest != manifests[entry.version].manifest.digest:
            text = f"ledger and manifest of version {entry.version} have different digests"
            yield Violation(text=text, version=entry.version, where=where)


def _digest_flaw(manifest: Manifest, recomputed: Recomputed | None) -> str | None:
    """Return what is wrong with a version's recomputed digest, or None, also if it was not recomputed."""
    if recomputed is None:
        return None
    if recomputed.problem is not None:
        return f"the weights of version {manifest.version} cannot be assembled: {recomputed.problem}"
    if recomputed.digest not in (None, manifest.digest):
        return f"the tensors have digest {(recomputed.digest or '')[:16]}…, the manifest has {manifest.digest[:16]}…"
    return None


def _base_flaws(manifest: Manifest, manifests: Container[int], versions_below: int) -> Iterator[str]:
    """Yield what is wrong with the base version of a delta; manifests of versions below `versions_below` may have been deleted."""
    base = manifest.base_version
    if base is not None and not (base < manifest.version and (base in manifests or base < versions_below)):
        yield f"version {manifest.version} has base version {base}, which is not an earlier version"
    if (base is None) != (manifest.encoding == "full"):
        yield f"encoding {manifest.encoding} with base version {base}"


@check(
    "last-digests",
    "steps, checkpoints and the closing entry have their version's digest",
    entries=lambda facts: sum(fact.entry.kind in ("step", "checkpoint", "run-closed") for fact in facts.entries),
)
def ends(facts: Facts) -> Iterator[Violation]:
    """Yield entries with another digest than that of their version or, after a rebase at their step, of the rebase."""
    versions = [fact.entry for fact in facts.entries if fact.entry.kind == "version"]
    published = {version.step or 0: version for version in versions}
    manifests = {fact.manifest.step: fact.manifest for fact in facts.first_manifests().values()}
    rebased = {(fact.entry.step, fact.entry.digest) for fact in facts.entries if fact.entry.kind == "rebased"}
    done = 0
    for fact in facts.entries:
        entry, manifest = fact.entry, manifests.get(done + (fact.entry.kind == "step"))
        done += entry.kind == "step"
        if entry.kind == "checkpoint":
            text = None if (entry.step, entry.digest) in rebased else _checkpoint_flaw(entry, published.get(entry.step or 0), done=done)
        elif entry.kind == "step" and manifest is not None and entry.digest not in (None, manifest.digest):
            same = (done, manifest.digest) in rebased
            text = None if same else f"the weights digest of step {entry.step} differs from that of version {manifest.version}"
        elif entry.kind == "rebased":
            text = None if entry.step == done else f"rebased after {entry.step} steps when {done} were committed"
        elif entry.kind == "run-closed" and versions and entry.digest != versions[-1].digest:
            text = f"the closing entry has another weights digest than version {versions[-1].version}"
        else:
            text = None
        if text is not None:
            yield Violation(text=text, step=entry.step, version=entry.version, where=fact.where)


def _checkpoint_flaw(entry: Entry, version: Entry | None, *, done: int) -> str | None:
    """Return what is wrong with a checkpoint's entry, or None; `version` is the one published at the checkpoint's step."""
    if (entry.step or 0) > done:
        return f"a checkpoint names step {entry.step}, but {done} steps were committed"
    if version is None or version.digest is None:
        return None
    if entry.digest not in (None, version.digest):
        return f"the checkpoint at step {entry.step} has another digest than version {version.version}"
    if entry.version not in (None, version.version):
        return f"the checkpoint at step {entry.step} has version {entry.version}, expected {version.version}"
    return None


CHECKS = (numbers, chunks, digests, ends)
