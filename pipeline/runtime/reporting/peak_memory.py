"""The most memory that this process has had resident."""

import re
import resource
from pathlib import Path


def peak_rss() -> float:
    """Bytes. Linux's `ru_maxrss` is not that: it begins with the peak of the process that has forked this one."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return 1024.0 * (float(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
