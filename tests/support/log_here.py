"""The in-memory log as the broker that commands of this process connect to."""

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.launch import broker_keeper

HERE = "here:1"


class LogHere(MemoryLog):
    """The in-memory log as a broker at an address."""

    bootstrap = HERE


def use_log(monkeypatch: pytest.MonkeyPatch, log: MemoryLog) -> None:
    """Let commands connect to this log, and put back what they set for their own process."""
    monkeypatch.setattr(broker_keeper, "connect", lambda *_, **__: log)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
