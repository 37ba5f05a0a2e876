"""Detects that a topic was deleted, or deleted and created again, while it is read; the client does not report that.

No request is sent while the client's own metadata have the topic that was read first.
"""

import time
from collections.abc import Iterable
from typing import Any

from penstock.infra.errors import LogError
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cluster.admin import Admin

DOUBT_S = 3.0
"""Metadata may lack a topic for a moment, as while a broker starts; after this time the topic is verified, and again after as long."""


class TopicIds:
    """Ids of one reader's topics as its client saw them first; for one thread."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._first: dict[str, str | None] = {}
        """Topic -> its id; None before the client has it."""
        self._doubted = 0.0

    def add(self, topics: Iterable[str]) -> None:
        """Watch these topics too."""
        for topic in topics:
            self._first.setdefault(topic, None)

    def check(self, consumer: Any, *, idle: bool) -> None:
        """Compare with the client's metadata after a poll. Raises `LogError` if an idle topic was deleted or replaced."""
        if not idle and None not in self._first.values():
            return
        doubtful = False
        for topic, first in self._first.items():
            seen = private_api.topic_id(consumer, topic)
            if first is None:
                self._first[topic] = seen
            doubtful |= seen is None or seen != self._first[topic]
        now = time.monotonic()
        if not (doubtful and idle and private_api.connected(consumer)):
            self._doubted = now
        elif now - self._doubted > DOUBT_S:
            self._doubted = now
            self.verify()

    def verify(self) -> None:
        """Compare with the cluster. Raises `LogError` if a topic was deleted, or replaced by another one of the same name."""
        ids = self._admin.ids(list(self._first))
        for topic, first in self._first.items():
            if topic not in ids:
                raise LogError(
                    f"topic {topic} was deleted (or this user may not see it any more): nothing is left to be read; stop this process"
                )
            if first is not None and ids[topic] != first:
                raise LogError(
                    f"topic {topic} was deleted and made again while it was read: start this process again, it would mix the two"
                )
