"""Peak resident memory of this process."""

import re
import resource
from pathlib import Path


def peak_rss() -> float:
    """Bytes. Linux's `ru_maxrss` starts with the peak of the parent process, so it is only the fallback."""
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return 1024.0 * (float(match[1]) if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
