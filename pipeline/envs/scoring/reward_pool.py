"""Scores groups in child processes so that a completion which hangs, crashes or breaks a function costs its own reward only.

A group whose call fails is called again for each completion alone. Those that fail alone have no reward; the rest is scored by one more
call, so that functions which compare completions see them together. `timeout_s` is the limit of one completion: a call for several gets
it once at first, and once for each of its completions if they are known to be only slow.
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
"""Items of a payload that are lists with one element for each completion."""


@dataclass(slots=True)
class _Group:
    """A group whose score is being computed."""

    payload: Payload
    count: int
    reason: str = ""
    """The error of the call for the whole group; empty if it has not failed."""
    calls: set[Members] = field(default_factory=set)
    """The completions of the calls that have not ended."""
    alone: dict[int, Any] = field(default_factory=dict)
    """Completion -> the result of its own call."""
    broken: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def everyone(self) -> Members:
        return tuple(range(self.count))


class RewardPool(Generic[Key]):
    """A `ChildPool` of groups: payloads are those of `reward_child.payload`, results those of `Score.of`."""

    def __init__(self, children: ChildPool[tuple[Key, Members]], *, timeout_s: float) -> None:
        self._calls = children
        self._timeout_s = timeout_s
        self._groups: dict[Key, _Group] = {}
        self._slow = False
        """True once a group took longer than `timeout_s` without a completion that hangs."""

    @property
    def pending(self) -> int:
        """Number of groups that `poll` has not returned yet."""
        return len(self._groups)

    @property
    def busy_s(self) -> float:
        """Seconds of the children at work."""
        return self._calls.busy_s

    def submit(self, key: Key, payload: Payload) -> None:
        """Queue a group."""
        self._groups[key] = group = _Group(payload, len(payload["completions"]))
        self._call(key, group, group.everyone, slow=self._slow)

    def cancel(self, keys: set[Key]) -> None:
        """Drop these groups."""
        self._calls.cancel({(key, members) for key in keys & self._groups.keys() for members in self._groups.pop(key).calls})

    def poll(self, timeout_s: float = 0.0) -> list[Done[Key] | Failed[Key]]:
        """Groups that are done, in the order they ended; waits up to `timeout_s` for the first. Raises `ChildError`."""
        end = monotonic() + timeout_s
        while True:
            calls = self._calls.poll(max(0.0, end - monotonic()))
            ended = [result for call in calls if (result := self._take(call)) is not None]
            if ended or not self._groups or monotonic() >= end:
                return ended

    def close(self) -> None:
        """Kill the children and drop what is pending."""
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
        """The result of a group, if this call was its last one."""
        key, members = call.key
        group = self._groups[key]
        group.calls.remove(members)
        if isinstance(call, Done):
            group.seconds += call.seconds
        if not group.reason:
            if isinstance(call, Done):
                return self._done(key, group, call.result, members)
            group.reason = call.reason
            for number in group.everyone:
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
        """Score those that did not fail alone together."""
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
    """The payload of some of a group's completions."""
    lists = {name: payload.get(name) for name in BY_SAMPLE}
    return {**payload, **{name: [values[number] for number in members] for name, values in lists.items() if values}}


def _spread(result: Mapping[str, Any], members: Members, group: _Group) -> dict[str, Any]:
    """The result of the whole group from that of some of its completions."""
    places, width = {number: place for place, number in enumerate(members)}, len(result["components"][0])

    def whole(values: Sequence[Any], without: Any) -> list[Any]:
        return [values[places[number]] if number in places else without for number in group.everyone]

    return {
        **result,
        "rewards": whole(result["rewards"], None),
        "components": whole(result["components"], [None] * width),
        "logged": whole(result["logged"], {}) if result["logged"] else [],
        "broken": dict(group.broken),
    }
