"""Checks on policy versions: manifests, chunks, digests and their chain.

The rule: a digest is believed when it was recomputed from the chunks' bytes.
"""

from collections.abc import Iterator
from functools import partial

from penstock.pipeline.audit.checks.registry import Check, Violation
from penstock.pipeline.audit.facts import EntryFact, Facts, Where


def numbers(facts: Facts) -> Iterator[Violation]:
    """Versions are 0 to n, each with one manifest and one entry of the ledger, after the step that completes it."""
    terms, manifests, entries, done = facts.terms, facts.first_manifests(), dict[int, EntryFact](), 0
    for fact in facts.entries:
        done += fact.entry.kind == "step"
        if fact.entry.kind != "version":
            continue
        version, place = fact.entry.version or 0, partial(Violation, version=fact.entry.version, where=fact.where)
        if version in entries:
            yield place(text=f"version {version} was published in entry {entries[version].entry.seq} already")
        elif version != len(entries):
            yield place(text=f"version {version} follows version {len(entries) - 1}")
        if fact.entry.step != terms.step_of(version) or done < terms.step_of(version):
            text = (
                f"version {version} came at step {fact.entry.step} with {done} steps committed, it belongs to step {terms.step_of(version)}"
            )
            yield place(text=text)
        entries.setdefault(version, fact)
        if version not in manifests:
            yield place(text=f"version {version} has an entry in the ledger and no manifest")
        elif manifests[version].manifest.step != fact.entry.step:
            yield place(text=f"the manifest of version {version} says step {manifests[version].manifest.step}")
    for manifest in facts.manifests:
        version, place = manifest.manifest.version, partial(Violation, version=manifest.manifest.version, where=manifest.where)
        if manifest is not manifests[version]:
            yield place(text=f"version {version} has another manifest at {manifests[version].where}")
        elif version not in entries and (facts.closed is not None or version < max(entries, default=-1)):
            yield place(text=f"the manifest of version {version} has no entry in the ledger")
    if facts.closed is not None:
        newest = terms.newest_version(done)
        for version in sorted(set(range(newest + 1)) - set(entries)):
            yield Violation(text=f"version {version} was never published, {done} steps make {newest} versions", version=version)


def chunks(facts: Facts) -> Iterator[Violation]:
    """Every chunk of a manifest lies where it says, with the size and SHA-256 it says."""
    for version, fact in sorted(facts.first_manifests().items()):
        manifest = fact.manifest
        listed = zip(manifest.chunk_partitions, manifest.chunk_offsets, manifest.chunk_sizes, manifest.chunk_sha256, strict=True)
        for index, (partition, offset, size, sha256) in enumerate(listed):
            where = Where("weights", partition, offset)
            found, place = facts.chunks.get(where), partial(Violation, version=version, where=where)
            if offset < facts.begins.get(("weights", partition), 0):
                continue  # released by retention
            if found is None:
                yield place(text=f"chunk {index} of version {version} is not there")
            elif (found.version, found.place) != (version, index):
                yield place(text=f"chunk {index} of version {version} is chunk {found.place} of version {found.version}")
            elif (found.size, found.sha256) != (size, sha256):
                text = f"chunk {index} has {found.size} bytes and SHA-256 {found.sha256[:16]}…, listed are {size} and {sha256[:16]}…"
                yield place(text=text)


def digests(facts: Facts) -> Iterator[Violation]:
    """The digest recomputed from a version's chunks is the one of manifest and ledger; the base versions lead to one that stands alone."""
    manifests, broken = facts.first_manifests(), {violation.version for violation in chunks(facts)}
    for version, fact in sorted(manifests.items()):
        found, place = facts.recomputed.get(version), partial(Violation, version=version, where=fact.where)
        if found is not None and version not in broken:
            if found.problem is not None:
                yield place(text=f"version {version} cannot be put together: {found.problem}")
            elif found.digest is not None and found.digest != fact.manifest.digest:
                yield place(text=f"its tensors have the digest {found.digest[:16]}…, the manifest says {fact.manifest.digest[:16]}…")
        base = fact.manifest.base_version
        if base is not None and not (base < version and base in manifests):
            yield place(text=f"version {version} is to be applied to version {base}, which is not before it")
        if (base is None) != (fact.manifest.encoding == "full"):
            yield place(text=f"encoding {fact.manifest.encoding} with base version {base}")
    for entry in facts.entries:
        told, place = entry.entry, partial(Violation, version=entry.entry.version, where=entry.where)
        if told.kind == "version" and told.version in manifests and told.digest != manifests[told.version].manifest.digest:
            yield place(text=f"the ledger's digest of version {told.version} is not its manifest's")


def ends(facts: Facts) -> Iterator[Violation]:
    """Steps, checkpoints and the closing entry have the digest of the version that was published at their step."""
    manifests = {fact.manifest.step: fact.manifest for fact in facts.first_manifests().values()}
    published: dict[int, tuple[int, str | None]] = {}
    newest: EntryFact | None = None
    done = 0
    for fact in facts.entries:
        entry = fact.entry
        if entry.kind == "version":
            published[entry.step or 0] = (entry.version or 0, entry.digest)
            newest = fact
    for fact in facts.entries:
        entry, place = fact.entry, partial(Violation, step=fact.entry.step, version=fact.entry.version, where=fact.where)
        done += entry.kind == "step"
        if entry.kind == "checkpoint":
            version, digest = published.get(entry.step or 0, (None, None))
            if (entry.step or 0) > done:
                yield place(text=f"a checkpoint of step {entry.step} when {done} steps were committed")
            elif digest is not None and entry.digest is not None and entry.digest != digest:
                yield place(text=f"the checkpoint at step {entry.step} has another digest than version {version}")
            elif digest is not None and entry.version not in (None, version):
                yield place(text=f"the checkpoint at step {entry.step} says version {entry.version}, it is version {version}")
        after = manifests.get(done)
        if entry.kind == "step" and after is not None and entry.digest not in (None, after.digest):
            yield place(text=f"step {entry.step} ended in another digest than version {after.version}")
        if entry.kind == "run-closed" and newest is not None and entry.digest != newest.entry.digest:
            yield place(text=f"the run was closed with another digest than that of version {newest.entry.version}")


def _chunks(facts: Facts) -> int:
    return sum(len(fact.manifest.chunk_sizes) for fact in facts.first_manifests().values())


CHECKS = (
    Check(
        name="version-numbers",
        promise="versions 0 to n, one manifest each, written with its entry",
        counts="versions",
        examined=lambda facts: len(facts.manifests),
        rule=numbers,
    ),
    Check(
        name="chunks",
        promise="chunks lie where manifests say, with their size and SHA-256",
        counts="chunks",
        examined=_chunks,
        rule=chunks,
    ),
    Check(
        name="digests",
        promise="digests recomputed from the chunks are the recorded ones",
        counts="versions",
        examined=lambda facts: sum(found.digest is not None for found in facts.recomputed.values()),
        rule=digests,
    ),
    Check(
        name="last-digests",
        promise="steps, checkpoints and the closing entry have their version's digest",
        counts="entries",
        examined=lambda facts: sum(fact.entry.kind in ("step", "checkpoint", "run-closed") for fact in facts.entries),
        rule=ends,
    ),
)
