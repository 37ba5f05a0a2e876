"""Which chunks of old versions may go, as offsets before which each partition is deleted.

The rule: what the newest two anchors and everything after them are made of stays, and so does all that a restart may read again. Where
versions are adapters, some count as anchors at the same distances, so that a slow reader has as long as elsewhere.
"""

from collections.abc import Collection, Mapping

from penstock.topics import weights
from penstock.topics.weights import FIRST, Manifest


def is_anchor(manifest: Manifest, *, every: int) -> bool:
    """Whether a version is whole, or an adapter that counts as an anchor: one of `every` does."""
    return manifest.encoding == "full" or (manifest.encoding == "adapter" and manifest.version % every == 0)


def deletable(manifests: Mapping[int, Manifest], *, ends: Mapping[int, int], every: int, needed: Collection[int] = ()) -> dict[int, int]:
    """Partition -> the offset before which nobody needs its chunks, for the partitions of all versions but 0.

    `ends` are the offsets after our newest chunk in each partition, `every` is `weights.anchor_every`, `needed` are versions that somebody
    may still ask for.

    Two anchors are kept, so that a worker that reads the older one has as long for it as it takes until the next is out.
    """
    anchors = sorted(version for version, manifest in manifests.items() if version and is_anchor(manifest, every=every))
    oldest = min([*anchors[-2:], *(_begin(manifests, version) for version in needed)], default=0)
    if len(anchors) < 2:
        return {}
    kept = dict(ends)
    for version, manifest in manifests.items():
        if version >= oldest:
            for partition, offset in weights.chunk_places(manifest):
                kept[partition] = min(kept.get(partition, offset), offset)
    return {partition: offset for partition, offset in kept.items() if partition >= FIRST and offset}


def _begin(manifests: Mapping[int, Manifest], version: int) -> int:
    """The first version that a version is put together from, but version 0 only where no other is."""
    return next((link.version for link in weights.chain(manifests, version) if link.version), 0)
