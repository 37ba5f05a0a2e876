"""A network namespace of a benchmark's own: its loopback may be slow, and nobody else's bytes pass it.

Needs Linux with `unshare`, `ip` and `tc` (packages util-linux and iproute2), and either root or user namespaces.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

_INSIDE = "PENSTOCK_BENCHMARK_NETWORK"


def enter() -> None:
    """Go on in a namespace of its own: this process is replaced by one that runs the same command there."""
    if os.environ.get(_INSIDE):
        return
    if missing := [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]:
        raise SystemExit(f"{missing[0]} is not installed: it makes the network that this benchmark runs in (util-linux, iproute2)")
    os.environ[_INSIDE] = "1"
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
    os.execvp("unshare", ["unshare", *as_root, "--net", *inside])


def throttle(mbit: float) -> None:
    """Let the loopback carry no more than this, both directions together, in packets of an Ethernet's size."""
    subprocess.run(["ip", "link", "set", "lo", "mtu", "1500"], check=True)
    limit = ["rate", f"{mbit:g}mbit", "burst", "128kb", "latency", "200ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *limit], check=True)


def carried() -> int:
    """Bytes that the loopback has carried so far, headers and acknowledgements included."""
    (line,) = [line for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[0])
