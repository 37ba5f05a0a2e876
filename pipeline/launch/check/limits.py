"""Bytes of weights that an embedded broker can keep on this machine with its file descriptors and memory maps.

Kafka holds each segment of a partition open, as one file and two mapped indexes ("OS" in its operations guide); a broker without
room for the next one stops.
"""

import resource
from pathlib import Path

from penstock.topics.catalogue import KEPT_SEGMENT_BYTES

FILES_A_SEGMENT, MAPS_A_SEGMENT = 1, 2
RESERVED = 2_000
"""Files and maps of everything else: Java, connections, the other topics of some runs."""
MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")


def open_files() -> int:
    """Files that a process may have open: the hard limit, which Java takes for itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2**63 if hard == resource.RLIM_INFINITY else hard


def memory_maps() -> int | None:
    """Memory maps that a process may have; None where the system has no such limit."""
    return int(MAX_MAP_COUNT.read_text()) if MAX_MAP_COUNT.exists() else None


def kept_bytes(limit: int, *, each: int) -> int:
    """Bytes of weights without deletion for which `limit` is enough if a segment takes `each` of it.

    Example:
        kept_bytes(65_530, each=2)  # -> 8_526_852_259_840
    """
    return max(0, limit - RESERVED) // each * KEPT_SEGMENT_BYTES
