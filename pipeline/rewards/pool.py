"""Scores groups in child processes so that a completion on which a function hangs, crashes or raises loses only its own reward.

After a failed call, each completion of the group is scored alone. Those that fail alone have no reward; the rest is scored by one more
call, so that functions which compare completions see them together. `timeout_s` is the limit of one completion: the first call for a
group has this limit once, later ones have it per completion if calls turned out to be slow and not hanging.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from penstock.infra.sandbox.pool import ChildPool, Done, Failed

Key = TypeVar("Key")
Payload = Mapping[str, Any]
Members = tuple[int, ...]
BY_SAMPLE = ("completions", "completion_ids", "episodes")
"""Items of a payload with one element per completion."""


@dataclass(slots=True)
class _Group:
    """A group in flight."""

    payload: Payload
    count: int
    reason: str = ""
    """Error of the call for the full group; empty if it has not failed."""
    calls: set[Members] = field(default_factory=set)
    """Completions of each call in flight."""
    alone: dict[int, Any] = field(default_factory=dict)
    """Completion -> result of its own call."""
    broken: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def all_members(self) -> Members:
        return tuple(range(self.count))


class RewardPool(Generic[Key]):
    """A `ChildPool` of groups: payloads are those of `reward_child.payload`, results those of `Score.of`."""

    def __init__(self, children: ChildPool[tuple[Key, Members]], *, timeout_s: float) -> None:
        self._calls = children
        self._timeout_s = timeout_s
        self._groups: dict[Key, _Group] = {}
        self._slow = False
        """True once a group exceeded `timeout_s` although no completion hangs."""

    @property
    def pending(self) -> int:
        return len(self._groups)

    @property
    def busy_s(self) -> float:
        return self._calls.busy_s

    def submit(self, key: Key, payload: Payload) -> None:
        """Queue a group."""
        self._groups[key] = group = _Group(payload, len(payload["completions"]))
        self._call(key, group, group.all_members, slow=self._slow)

    def cancel(self, keys: set[Key]) -> None:
        self._calls.cancel({(key, members) for key in keys & self._groups.keys() for members in self._groups.pop(key).calls})

    def poll(self, timeout_s: float = 0.0) -> list[Done[Key] | Failed[Key]]:
        """Finished groups in the order of their end; waits up to `timeout_s` for the first. Raises `ChildError`."""
        end = monotonic() + timeout_s
        while True:
            calls = self._calls.poll(max(0.0, end - monotonic()))
            ended = [result for call in calls if (result := self._take(call)) is not None]
            if ended or not self._groups or monotonic() >= end:
                return ended

    def close(self) -> None:
        """Kill the children and drop groups in flight."""
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, key: Key, group: _Group, members: Members, *, slow: bool) -> None:
        group.calls.add(members)
        payload = group.payload if len(members) == group.count else _part(group.payload, members)
        self._calls.submit((key, members), payload, timeout_s=self._timeout_s * (len(members) if slow else 1))

    def _take(self, call: Done[tuple[Key, Members]] | Failed[tuple[Key, Members]]) -> Done[Key] | Failed[Key] | None:
        """The result of a group, if this was its last call."""
        key, members = call.key
        group = self._groups[key]
        group.calls.remove(members)
        if isinstance(call, Done):
            group.seconds += call.seconds
        if not group.reason:
            if isinstance(call, Done):
                return self._done(key, group, call.result, members)
            group.reason = call.reason
            for number in group.all_members:
                self._call(key, group, (number,), slow=False)
            return None
        if len(group.alone) + len(group.broken) == group.count:  # this was the call for the rest
            if isinstance(call, Failed):
                return self._failed(key, call.reason)
            self._slow = self._slow or not group.broken
            return self._done(key, group, call.result, members)
        (number,) = members
        if isinstance(call, Done):
            group.alone[number] = call.result
        else:
            group.broken[number] = call.reason
        if len(group.alone) + len(group.broken) < group.count:
            return None
        return self._rest(key, group)

    def _rest(self, key: Key, group: _Group) -> Done[Key] | Failed[Key] | None:
        """Score the completions that did not fail alone in one call."""
        if not group.alone:
            return self._failed(key, group.reason)
        members = tuple(sorted(group.alone))
        if len(members) == 1:
            return self._done(key, group, group.alone[members[0]], members)
        self._call(key, group, members, slow=True)
        return None

    def _failed(self, key: Key, reason: str) -> Failed[Key]:
        del self._groups[key]
        return Failed(key=key, reason=reason)

    def _done(self, key: Key, group: _Group, result: Mapping[str, Any], members: Members) -> Done[Key]:
        del self._groups[key]
        whole = result if len(members) == group.count else _spread(result, members, group)
        return Done(key=key, result=whole, seconds=group.seconds)


def _part(payload: Payload, members: Sequence[int]) -> dict[str, Any]:
    lists = {name: payload.get(name) for name in BY_SAMPLE}
    return {**payload, **{name: [values[number] for number in members] for name, values in lists.items() if values}}


def _spread(result: Mapping[str, Any], members: Members, group: _Group) -> dict[str, Any]:
    """The result of a group from the result of some of its completions."""
    indices, width = {number: index for index, number in enumerate(members)}, len(result["components"][0])

    def whole(values: Sequence[Any], default: Any) -> list[Any]:
        return [values[indices[number]] if number in indices else default for number in group.all_members]

    return {
        **result,
        "rewards": whole(result["rewards"], None),
        "components": whole(result["components"], [None] * width),
        "logged": whole(result["logged"], {}) if result["logged"] else [],
        "broken": dict(group.broken),
    }
