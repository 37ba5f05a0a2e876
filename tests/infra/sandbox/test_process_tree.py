"""How long a keeper kills what is left: as long as new processes come, and not for ever what no signal ends."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from penstock.infra.sandbox import keeper
from penstock.infra.sandbox.keeper import STUCK_S, SWEEP_EVERY_S, ProcessTree

BOMB_S = 4 * STUCK_S


class Processes:
    """What sweeps find, with a clock of their own: `found` of the number of the sweep, until `ends_s`; `refused` by the kernel."""

    def __init__(self, found: Callable[[int], set[int]], *, refused: bool = False, ends_s: float = float("inf")) -> None:
        self.found, self.refused, self.ends_s = found, refused, ends_s
        self.now_s, self.sweeps = 0.0, itertools.count()

    def kill(self, pid: int, number: int) -> None:
        raise PermissionError if self.refused else ProcessLookupError

    def sleep(self, _: float) -> None:
        self.now_s += 0.02

    def end(self, monkeypatch: pytest.MonkeyPatch) -> bool:
        """Have a keeper end them; True if it leaves none."""
        monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep))
        monkeypatch.setattr(keeper, "os", SimpleNamespace(kill=self.kill, killpg=self.kill, getpgrp=lambda: 0))
        tree = ProcessTree(0)
        tree.status = 0
        monkeypatch.setattr(tree, "processes", lambda: dict.fromkeys(self.found(next(self.sweeps)), 0))
        monkeypatch.setattr(tree, "reap", lambda: setattr(tree, "empty", self.now_s >= self.ends_s))
        tree.end(0.0)
        return tree.empty


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(Processes(lambda _: {7}, refused=True), id="another user's"),
        pytest.param(Processes(lambda sweep: {sweep}, refused=True), id="another user's that forks"),
        pytest.param(Processes(lambda _: {7}), id="waits for a device"),
        pytest.param(Processes(lambda sweep: {7, 8} if sweep else {7, 8, 9}), id="several wait, one ends"),
        pytest.param(Processes(lambda _: set()), id="not in /proc"),
    ],
)
def test_a_keeper_leaves_what_no_signal_ends(monkeypatch: pytest.MonkeyPatch, left: Processes) -> None:
    assert not left.end(monkeypatch)
    assert STUCK_S <= left.now_s <= STUCK_S + 2 * SWEEP_EVERY_S[1]


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(lambda sweep: {sweep}, id="each sweep another one"),
        pytest.param(lambda sweep: set(range(sweep, sweep + 1000)), id="many"),
        pytest.param(lambda sweep: {100 + sweep % 2}, id="process ids come again"),
        pytest.param(lambda sweep: {sweep} if sweep % 3 else set(), id="missed now and then"),
        pytest.param(lambda sweep: {7, 1000 + sweep}, id="beside one that waits for a device"),
        pytest.param(lambda sweep: {sweep // 3}, id="slow"),
    ],
)
def test_a_keeper_kills_what_forks_until_nothing_is_left(monkeypatch: pytest.MonkeyPatch, found: Callable[[int], set[int]]) -> None:
    bomb = Processes(found, ends_s=BOMB_S)
    assert bomb.end(monkeypatch)
    assert bomb.now_s >= BOMB_S
