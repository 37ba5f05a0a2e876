"""Which chunks of old versions may go, as offsets before which each partition is deleted.

The rule: what the newest two whole versions and everything after them are made of stays, and so does all that a restart may read again.
"""

from collections.abc import Collection, Mapping

from penstock.topics import weights
from penstock.topics.weights import FIRST, Manifest


def deletable(manifests: Mapping[int, Manifest], *, ends: Mapping[int, int], needed: Collection[int] = ()) -> dict[int, int]:
    """Partition -> the offset before which nobody needs its chunks, for the partitions of all versions but 0.

    `ends` are the offsets after our newest chunk in each partition, `needed` versions that somebody may still ask for.

    Two whole versions are kept, so that a worker that reads the older one has as long for it as it takes until the next is out.
    """
    anchors = sorted(version for version, manifest in manifests.items() if manifest.encoding == "full" and version)
    oldest = min([*anchors[-2:], *(weights.chain(manifests, version)[0].version for version in needed)], default=0)
    if len(anchors) < 2:
        return {}
    kept = dict(ends)
    for version, manifest in manifests.items():
        if version >= oldest:
            for partition, offset in weights.chunk_places(manifest):
                kept[partition] = min(kept.get(partition, offset), offset)
    return {partition: offset for partition, offset in kept.items() if partition >= FIRST and offset}
