"""What a test has a worker process do to itself: stop in the middle of a transaction, as a suspended machine does."""

import signal
from typing import Any

from tests.support.signals import signal_self

_AT = 3


def stops_inside_its_third_transaction() -> None:
    """From then on the process is stopped until somebody sends it SIGCONT; its records are written, its commit is not asked for."""
    from penstock.infra.kafka.client_repairs import private_api

    commit, count = private_api.commit_transaction, [0]

    def commit_transaction(producer: Any, timeout_s: float) -> None:
        count[0] += 1
        if count[0] == _AT:
            signal_self(signal.SIGSTOP)
        commit(producer, timeout_s)

    private_api.commit_transaction = commit_transaction
