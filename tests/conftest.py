"""One embedded broker for a whole test session, in a home of its own, which ends with the session however the session ends."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from penstock.infra.broker import embedded

# Examples are the same in every run, and a machine that is busy makes no example wrong.
settings.register_profile("penstock", deadline=None, derandomize=True)
settings.load_profile("penstock")

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
def new_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Path]]:
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


@pytest.fixture(scope="session", autouse=True)
def penstock_home(new_home: Callable[[], Path]) -> Iterator[Path]:
    """The session's state directory: no test touches the user's own, and `kafka.bootstrap = "embedded"` is the session's broker."""
    home = new_home()
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

    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        deadline = time.monotonic() + 10
        while left := [name for name in admin.list_topics() if name.startswith(prefix)]:
            assert time.monotonic() < deadline, f"topics left behind: {left}"
            try:
                admin.delete_topics(left)
            except UnknownTopicOrPartitionError:
                time.sleep(0.02)  # already deleted, not yet out of the listing
    finally:
        admin.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests, and say which stay together when several processes share them (`pytest -n`)."""
    # An engine of vLLM in this process ends torch.distributed with itself, and DeepSpeed's groups with that: its tests come last.
    items.sort(key=lambda item: ("vllm" in item.nodeid, "test_vllm" not in item.nodeid))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_together(item)))


def _together(item: pytest.Item) -> str:
    """A name that all tests of one process share: those of a file, that look into the recorded run, or at shared memory left behind."""
    file = item.nodeid.partition("::")[0]
    if "recorded" in getattr(item, "fixturenames", ()):
        return "recorded"
    if "test_vllm" in file:
        return "vllm"
    return f"{file} on vllm" if "vllm" in item.nodeid else file
