"""Computes, per partition, the offset below which weight chunks can be deleted.

Retained are the chains from the last but one anchor on, and all versions that a restart may read. If versions are adapters, some count as
anchors at the same distances, so that a slow reader has as much time.
"""

from collections.abc import Collection, Mapping

from penstock.topics import weights
from penstock.topics.weights import FIRST, Manifest


def is_anchor(manifest: Manifest, *, every: int) -> bool:
    """True for a full snapshot, or an adapter that counts as an anchor: one of `every` does."""
    return manifest.encoding == "full" or (manifest.encoding == "adapter" and manifest.version % every == 0)


def deletable(manifests: Mapping[int, Manifest], *, ends: Mapping[int, int], every: int, needed: Collection[int] = ()) -> dict[int, int]:
    """Partition -> the offset below which no process needs its chunks, for the partitions of all versions but 0.

    `ends` are the offsets after our newest chunk in each partition, `every` is `weights.anchor_every`, `needed` are versions that somebody
    may still request.

    Two anchors are retained, so that a worker that reads the older one has time until the next is published.
    """
    anchors = sorted(version for version, manifest in manifests.items() if version and is_anchor(manifest, every=every))
    oldest = min([*anchors[-2:], *(_chain_start(manifests, version) for version in needed)], default=0)
    if len(anchors) < 2:
        return {}
    retained = dict(ends)
    for version, manifest in manifests.items():
        if version >= oldest:
            for partition, offset in weights.chunk_places(manifest):
                retained[partition] = min(retained.get(partition, offset), offset)
    return {partition: offset for partition, offset in retained.items() if partition >= FIRST and offset}


def _chain_start(manifests: Mapping[int, Manifest], version: int) -> int:
    """The first version that a version is put together from, but version 0 only where no other is."""
    return next((link.version for link in weights.chain(manifests, version) if link.version), 0)
