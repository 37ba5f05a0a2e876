"""Notices that a topic was deleted under its reader, or deleted and made again, of which the client says nothing.

The rule: it costs no request while the client's own metadata name the topic that was read first; what they miss, the cluster is asked.
"""

import time
from collections.abc import Iterable
from typing import Any

from penstock.infra.errors import LogError
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cluster.admin import Admin

DOUBT_S = 3.0
"""Metadata may miss a topic for a moment, as while a broker starts; when they do for so long, the cluster is asked, and so often."""


class TopicIds:
    """The ids of one reader's topics as its client saw them first; for one thread."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._first: dict[str, str | None] = {}
        """Topic -> its id; None before the client knows it."""
        self._doubted = 0.0

    def add(self, topics: Iterable[str]) -> None:
        """Watch these topics as well."""
        for topic in topics:
            self._first.setdefault(topic, None)

    def look(self, consumer: Any, *, idle: bool) -> None:
        """Compare with the client's metadata after a poll; raises LogError once a topic that brings nothing is another one, or gone."""
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
            self.ask()

    def ask(self) -> None:
        """Ask the cluster; raises LogError if a topic is gone, or is another one of the same name."""
        now = self._admin.ids(list(self._first))
        for topic, first in self._first.items():
            if topic not in now:
                raise LogError(
                    f"topic {topic} was deleted (or this user may not see it any more): nothing is left to be read; stop this process"
                )
            if first is not None and now[topic] != first:
                raise LogError(
                    f"topic {topic} was deleted and made again while it was read: start this process again, it would mix the two"
                )
