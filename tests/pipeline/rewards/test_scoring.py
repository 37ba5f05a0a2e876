"""Rewards run in children as users write them; what hangs, crashes or raises costs its own sample."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.sandbox.timed_pool import ChildPool, Done, Failed
from penstock.pipeline.rewards.functions import Score
from penstock.pipeline.rewards.scoring import CHILD, RewardPool, payload, spec

pytestmark = pytest.mark.costly  # starts processes

MINE = """
import asyncio, ctypes, multiprocessing, os, re, signal, subprocess, sys, threading, time

async def one(text):
    await asyncio.sleep(0.001)
    return float(len(text))

async def every(completions):
    return await asyncio.gather(*map(one, completions))

def runs(completions, **_):
    return asyncio.run(every(completions))

def completes(completions, **_):
    return asyncio.get_event_loop().run_until_complete(every(completions))

def closes(completions, **_):
    loop = asyncio.get_event_loop()
    loop.run_until_complete(every(completions))
    loop.close()
    return [1.0] * len(completions)

def threads(completions, **_):
    found = []
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(every(completions))))
    thread.start()
    thread.join()
    return found

def alarms(completions, **_):
    def rings(number, frame):
        raise TimeoutError("too slow")
    signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        while True:
            time.sleep(0.05)
    except TimeoutError:
        return [0.5] * len(completions)

def forgets(completions, **_):  # an alarm that rings when the function has returned
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return [1.0] * len(completions)

def length(text):
    return float(len(text))

def spawns(completions, **_):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(length, completions)

def forks(completions, **_):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(length, completions)

def prints(completions, **_):
    print("[0, {}]")
    os.write(1, b'{"call": 0, "result": 1}')
    sys.stderr.write("{}")
    subprocess.run(["echo", "from a program"])
    return [1.0] * len(completions)

async def awaited(completions, **_):
    return await every(completions)

def both(completions, **_):
    return every(completions)  # not async itself

def risky(completions, **_):
    for text in completions:
        if text == "hang":
            time.sleep(600)
        if text == "spin":
            re.match("(a+)+$", "a" * 64 + "b")
        if text == "stubborn":
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            while True:
                try:
                    time.sleep(600)
                except BaseException:
                    pass
        if text == "exit":
            os._exit(3)
        if text == "crash":
            ctypes.string_at(0)
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "leave":
            sys.exit("bye")
        if text == "generator":
            raise GeneratorExit("closed")
        if text == "cancel":
            raise asyncio.CancelledError("the request")
        if text == "group":
            raise BaseExceptionGroup("several", [KeyboardInterrupt()])
        if text == "nan":
            return [float("nan") if text == "nan" else 1.0 for text in completions]
    return [len(text) + len(completions) / 10 for text in completions]  # depends on the company

async def risky_async(completions, **_):
    for text in completions:
        if text == "hang":
            await asyncio.sleep(600)
        if text == "block":
            time.sleep(600)
        if text == "interrupt":
            await asyncio.create_task(interrupts())
        if text == "leave":
            sys.exit("bye")
        if text == "cancel":
            raise asyncio.CancelledError("the request")
    return [float(len(text)) for text in completions]

async def interrupts():
    raise KeyboardInterrupt("from a task")

def logs(completions, log_extra, log_metric, **_):
    log_extra("length", [len(text) for text in completions])
    log_metric("longest", max(map(len, completions)))
    return [{"form": 1.0, "size": None if text == "none" else float(len(text))} for text in completions]

def short(completions, **_):
    return [1.0] if len(completions) > 1 else []

def some(completions, **_):
    return [None if text == "none" else 1.0 for text in completions]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rewards")
    (made / "mine.py").write_text(MINE)
    return made


class Scorer:
    """Scores groups by one pool per list of functions, which the tests of a module share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pools = folder, dict[tuple[Any, ...], RewardPool[int]]()

    def pool(self, *names: str, timeout_s: float = 30.0) -> RewardPool[int]:
        if (names, timeout_s) not in self.pools:
            init = spec([f"mine.py:{name}" for name in names], base_dir=self.folder, concurrency=4)
            children: ChildPool[Any] = ChildPool(CHILD, init=init, size=1, timeout_s=timeout_s, retries=0)
            self.pools[names, timeout_s] = RewardPool(children, timeout_s=timeout_s)
        return self.pools[names, timeout_s]

    def __call__(self, *names: str, completions: list[str], timeout_s: float = 30.0) -> Score | str:
        """The score of a group, or why it failed."""
        pool = self.pool(*names, timeout_s=timeout_s)
        pool.submit(0, payload(completions, prompt="p", messages=None, columns={}))
        end, results = time.monotonic() + 120.0, list[Done[int] | Failed[int]]()
        while not results and time.monotonic() < end:
            results = pool.poll(1.0)
        assert pool.pending == 0
        (result,) = results
        return Score.of(result.result) if isinstance(result, Done) else result.reason


@pytest.fixture(scope="module")
def score(folder: Path) -> Iterator[Scorer]:
    scorer = Scorer(folder)
    yield scorer
    for pool in scorer.pools.values():
        pool.close()


STYLES = ("runs", "completes", "closes", "threads", "alarms", "forgets", "prints")


@pytest.mark.parametrize("beside", [(), ("awaited", "both")], ids=["alone", "beside async ones"])
def test_functions_run_as_their_authors_wrote_them(score: Scorer, beside: tuple[str, ...]) -> None:
    for _ in range(2):  # the first call leaves nothing behind that breaks the second one
        found = score(*STYLES, *beside, completions=["ab", "c"])
        assert isinstance(found, Score), found
        assert found.components[0] == (2.0, 2.0, 1.0, 2.0, 0.5, 1.0, 1.0, *(2.0 for _ in beside))
        assert found.components[1] == (1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, *(1.0 for _ in beside))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spawns", "forks"])
def test_functions_may_start_processes_of_their_own(score: Scorer, name: str) -> None:
    found = score(name, completions=["ab", "c"])
    assert isinstance(found, Score), found
    assert found.rewards == (2.0, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("exit", "reward mine.py:risky ended with exit status 3", marks=pytest.mark.slow),
        ("crash", "reward mine.py:risky ended with signal SIGSEGV"),
        ("interrupt", "reward mine.py:risky broke: KeyboardInterrupt (mine.py line "),
        ("leave", "reward mine.py:risky broke: SystemExit: bye (mine.py line "),
        ("generator", "reward mine.py:risky broke: GeneratorExit: closed (mine.py line "),
        ("cancel", "reward mine.py:risky broke: CancelledError: the request (mine.py line "),
        ("group", "reward mine.py:risky broke: BaseExceptionGroup: several (1 sub-exception) (mine.py line "),
        ("nan", "reward mine.py:risky returned nan for completion 0, which is not finite"),
    ],
)
def test_what_breaks_costs_its_own_sample_and_says_why_in_one_line(score: Scorer, text: str, words: str) -> None:
    found = score("risky", completions=["a", text, "bb"])
    assert isinstance(found, Score), found
    assert found.rewards == (1.2, None, 2.2)  # of one call for the two
    assert found.components == ((1.2,), (None,), (2.2,))
    assert list(found.broken) == [1]
    assert found.broken[1].startswith(words) and "\n" not in found.broken[1]


SLOW = pytest.mark.slow  # a hang in C code, and one that ignores signals


@pytest.mark.parametrize("text", ["hang", pytest.param("spin", marks=SLOW), pytest.param("stubborn", marks=SLOW)])
def test_a_completion_that_hangs_costs_its_own_sample_after_the_limit(score: Scorer, text: str) -> None:
    found = score("risky", completions=[text, "bb"], timeout_s=2.0)
    assert isinstance(found, Score), found
    assert found.rewards == (None, 2.1)
    assert found.broken == {0: "reward mine.py:risky took longer than 2 s and was killed"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hang", "reward mine.py:risky_async took longer than 2 s"),
        ("interrupt", "reward mine.py:risky_async broke: KeyboardInterrupt: from a task (mine.py line "),
        ("leave", "reward mine.py:risky_async broke: SystemExit: bye (mine.py line "),
        ("cancel", "reward mine.py:risky_async broke: CancelledError: the request (mine.py line "),
    ],
)
def test_an_async_function_that_breaks_costs_its_own_sample(score: Scorer, text: str, words: str) -> None:
    found = score("risky_async", completions=["a", text, "bb"], timeout_s=2.0)
    assert isinstance(found, Score), found
    assert found.rewards == (1.0, None, 2.0)
    assert found.broken[1].startswith(words)


def test_a_group_in_which_every_sample_breaks_fails_with_the_reason(score: Scorer) -> None:
    assert str(score("risky", completions=["leave", "leave"])).startswith("reward mine.py:risky broke: SystemExit: bye (mine.py line ")
    assert str(score("risky", completions=["exit"])) == "reward mine.py:risky ended with exit status 3"
    assert score("short", completions=["a", "b", "c"]) == "reward mine.py:short returned 1 values for 3 completions"


class Recorded:
    """Stands in for children: calls that take a second for each completion, against their limits; one completion may hang."""

    busy_s = 0.0

    def __init__(self, *, hangs: int | None = None) -> None:
        self.hangs, self.limits, self._waiting = hangs, list[tuple[int, float]](), list[tuple[Any, Any, float]]()

    def submit(self, key: Any, given: Any, *, timeout_s: float) -> None:
        self.limits.append((len(given["completions"]), timeout_s))
        self._waiting.append((key, given, timeout_s))

    def poll(self, _timeout_s: float) -> list[Any]:
        ended, self._waiting = [self._ended(*call) for call in self._waiting], []
        return ended

    def _ended(self, key: Any, given: Any, limit_s: float) -> Done[Any] | Failed[Any]:
        texts = given["completions"]
        if str(self.hangs) in texts or len(texts) > limit_s:
            return Failed(key=key, reason="took too long")
        rewards = [float(text) for text in texts]
        return Done(key=key, result={"rewards": rewards, "components": [[one] for one in rewards], "logged": []}, seconds=1.0)


@pytest.mark.parametrize("hangs", [None, 0, 3])
def test_the_limit_is_of_one_sample_however_many_a_group_has(hangs: int | None) -> None:
    children: Any = Recorded(hangs=hangs)
    pool = RewardPool[int](children, timeout_s=2.5)
    for _ in range(2):
        pool.submit(0, payload(["0", "1", "2", "3"], prompt="p", messages=None, columns={}, completion_ids=[[0], [1], [2], [3]]))
        (done,) = pool.poll(1.0)
        assert isinstance(done, Done)
        assert Score.of(done.result).rewards == tuple(None if number == hangs else float(number) for number in range(4))
    singles = [(1, 2.5)] * 4
    if hangs is None:  # the second group has the time that the first one needed
        assert children.limits == [(4, 2.5), *singles, (4, 10.0), (4, 10.0)]
    else:
        assert children.limits == [(4, 2.5), *singles, (3, 7.5)] * 2


def test_samples_to_which_no_function_applies_have_no_reward(score: Scorer) -> None:
    found = score("some", completions=["a", "none", "none"])
    assert isinstance(found, Score)
    assert (found.rewards, found.scored, found.broken) == ((1.0, None, None), (1.0,), {})


def test_what_functions_log_comes_back_with_the_score(score: Scorer) -> None:
    found = score("logs", completions=["abc", "none"])
    assert isinstance(found, Score)
    assert found.rewards == (4.0, 1.0)
    assert found.logged == ({"length": 3, "mine.py:logs/form": 1.0, "mine.py:logs/size": 3.0}, {"length": 4, "mine.py:logs/form": 1.0})
    assert found.metrics == {"longest": 4.0, "mine.py:logs/form": 1.0, "mine.py:logs/size": 3.0}


def test_cancelled_groups_do_not_come_back_and_others_do(score: Scorer) -> None:
    pool = score.pool("some")
    for key in range(4):
        pool.submit(key, payload(["a", "none"], prompt="p", messages=None, columns={}))
    pool.cancel({1, 3, 9})
    ended = set()
    while pool.pending:
        ended |= {result.key for result in pool.poll(1.0)}
    assert ended == {0, 2}


def test_a_child_process_imports_neither_the_configuration_nor_a_model_library() -> None:
    program = f"import sys, {CHILD.partition(':')[0]}; print([name for name in ('pydantic', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "[]"
