"""An engine whose samples are trajectories: it runs episodes and requests their turns from an inner engine.

It implements the protocol `Engine`. The random numbers of a turn depend on (run seed, group, sample, turn) alone. Environments run in a
thread and child processes of their own, so that a busy engine does not consume their timeouts.
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.infra.engines.base import Completion, Engine, GroupInFlight, GroupRequest
from penstock.infra.errors import PenstockError
from penstock.infra.sandbox.sessions import Sessions
from penstock.infra.sandbox.spawn import ENVIRONMENT, ChildRules
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.agents.driver import Episode, Limits, seed_of
from penstock.pipeline.agents.environments.sources import AGENT, CHILD
from penstock.pipeline.agents.record import EpisodeRequest, Generate, Generation, Trajectory
from penstock.pipeline.data.conversation.messages import Template

if TYPE_CHECKING:
    from penstock.pipeline.agents.gateway.episode import AgentEpisode


@dataclass(frozen=True, slots=True)
class Episodes:
    """Creates the episodes of a source; used in one asyncio loop."""

    make: "Callable[..., Episode | AgentEpisode]"
    close: Callable[[], Awaitable[None]]
    """Ends what the episodes share: child processes, or the agents' endpoint."""

    def episode(self, request: EpisodeRequest, sample: int, *, generate: Generate, version: int) -> "Episode | AgentEpisode":
        """Return a new episode for one sample of a group; its turns come from `generate`, `version` is the newest policy version."""
        seed = seed_of(request.row, seed=request.seed, group=request.random_group)
        return self.make(request=request, sample=sample, seed=seed, generate=generate, version=version)


async def open_episodes(
    source: str,
    *,
    template: Template,
    limits: Limits,
    processes: int,
    rules: ChildRules = ENVIRONMENT,
    on_loss: Callable[[str], None] = lambda _: None,
) -> Episodes:
    """Return the factory of episodes for `source`, which is used in the running asyncio loop and starts at most `processes` children.

    `on_loss` is called with a line per recovered failure. Raises `PenstockError` if packages for agents are missing.
    """
    shared: dict[str, Any] = {"template": template, "limits": limits, "on_loss": on_loss}
    if source.startswith(AGENT):
        try:
            from penstock.pipeline.agents.gateway.episode import AgentEpisode, Gateway
        except ImportError as error:
            raise PenstockError(f"{source!r} needs the agents' endpoint: pip install '.[agents]' in the checkout ({error})") from error
        gateway, programs = Gateway(), asyncio.Semaphore(processes)
        return Episodes(partial(AgentEpisode, source=source, gateway=gateway, programs=programs, rules=rules, **shared), gateway.close)
    sessions = Sessions(CHILD, size=processes, init={"source": source}, rules=rules)
    return Episodes(partial(Episode, sessions=sessions, **shared), sessions.close)


WAIT_S = 0.02
"""Longest wait of one `step` for an environment while no turn is requested."""
SAMPLE_BITS, TURN_BITS = 12, 12
_COUNTED = (
    *("trajectories", "turns", "dropped", "dropped_turns", "broken", "losses", "environment_s", "segments", "waits_s", "results_cut"),
    "replaced",
)


def turn_number(group: int, sample: int, turn: int) -> int:
    """The number under which the inner engine has a turn as a group, and the stream of its random numbers; ordered by group."""
    return (group << SAMPLE_BITS + TURN_BITS) + (sample << TURN_BITS) + turn


def turn_of(number: int) -> tuple[int, int, int]:
    """Return (group, sample, turn) for a number that `turn_number` has made."""
    return number >> SAMPLE_BITS + TURN_BITS, number >> TURN_BITS & (1 << SAMPLE_BITS) - 1, number & (1 << TURN_BITS) - 1


@dataclass(slots=True, eq=False)
class _TurnRequest:
    """A turn that a trajectory has requested and waits for."""

    key: tuple[int, int]
    """Group and sample of the trajectory."""
    request: GroupRequest
    generation: "asyncio.Future[Generation]"


@dataclass(slots=True, eq=False)
class _Running:
    episode: "Episode | AgentEpisode"
    task: "Future[Trajectory]"
    oldest: int | None = None
    tokens: int = 0
    turns: set[int] = field(default_factory=set)
    """Numbers of its turns in the inner engine; an agent may request several at a time."""


class TrajectoryEngine:
    """An engine of trajectories: at most `in_flight` at a time, with environments in `processes` child processes."""

    def __init__(
        self,
        inner: Engine,
        *,
        source: str,
        template: Any,
        limits: Limits,
        processes: int,
        in_flight: int,
        rules: ChildRules = ENVIRONMENT,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._inner, self._in_flight = inner, in_flight
        self._notify = notify
        self._events: queue.SimpleQueue[_TurnRequest | tuple[tuple[int, int], Future[Trajectory]] | None] = queue.SimpleQueue()
        self._running: dict[tuple[int, int], _Running] = {}
        self._turns_in_flight: dict[int, _TurnRequest] = {}
        self._counts = dict.fromkeys(_COUNTED, 0.0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="environments")
        self._thread.start()
        self._episodes = self._in_loop(
            open_episodes(source, template=template, limits=limits, processes=processes, rules=rules, on_loss=self._lost)
        )

    @property
    def version(self) -> int:
        return self._inner.version

    @property
    def pending(self) -> int:
        return len({group for group, _ in self._running})

    @property
    def idle(self) -> bool:
        return not self._running

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._in_flight

    def submit(self, request: GroupRequest) -> None:
        """Start an episode for each requested sample of a group; `step` returns their trajectories."""
        assert isinstance(request, EpisodeRequest), "a group of trajectories needs an EpisodeRequest"
        for sample in request.samples:
            key = (request.group, sample)
            generate = partial(self._generate, key, request)
            episode = self._episodes.episode(request, sample, generate=generate, version=self._inner.version)
            task = asyncio.run_coroutine_threadsafe(episode.run(), self._loop)
            self._running[key] = _Running(episode, task)
            task.add_done_callback(partial(self._finished, key))

    def step(self) -> list[Completion]:
        """Run one decode step for all requested turns; return the trajectories that have ended. Raises errors that are not retried."""
        ended = self._take(wait=self._inner.idle and bool(self._running))
        for completion in self._inner.step():
            self._deliver(completion)
        return [*ended, *self._take(wait=False)]

    def abort(self, group: int) -> list[Completion]:
        """End the running episodes of a group, and return what they have so far as trajectories with finish "abort"."""
        aborted: list[Trajectory] = []
        for key in [key for key in self._running if key[0] == group]:
            running = self._running.pop(key)
            for turn in running.turns:
                self._inner.abort(turn)
                self._turns_in_flight.pop(turn, None)
            aborted.append(self._in_loop(_ended(running)))
        self._counts["dropped"] += len(aborted)
        self._counts["dropped_turns"] += sum(map(_turns, aborted))
        return list[Completion](aborted)

    def groups_in_flight(self) -> list[GroupInFlight]:
        """Return each unfinished group with its tokens so far, those of running turns included, and the oldest policy version of any."""
        turns = {turn.group: turn for turn in self._inner.groups_in_flight()}
        groups: dict[int, list[GroupInFlight]] = {}
        for (group, _), running in self._running.items():
            before = GroupInFlight(group=group, tokens=running.tokens, oldest_version=running.oldest)
            groups.setdefault(group, []).extend([before, *(turns[turn] for turn in running.turns if turn in turns)])
        return [_merged(group, parts) for group, parts in sorted(groups.items())]

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        self._inner.load_weights(version, tensors)

    def stats(self) -> dict[str, float]:
        waiting = float(sum(not running.turns for running in self._running.values()))
        return self._inner.stats() | self._counts | {"waiting_for_environments": waiting}

    def close(self) -> None:
        """Cancel all episodes, stop their child processes and thread, and close the inner engine."""
        for running in self._running.values():
            running.task.cancel()
        self._in_loop(self._episodes.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._running.clear()
        self._turns_in_flight.clear()
        self._inner.close()

    def wake(self) -> None:
        """End the wait of `step` because the inner engine has work; callable from any thread."""
        self._events.put(None)

    async def _generate(
        self, key: tuple[int, int], request: EpisodeRequest, token_ids: npt.NDArray[np.int32], *, turn: int, max_new_tokens: int
    ) -> Generation:
        """Request a turn of the trajectory `key` from the inner engine and return it; called in the environments' thread."""
        generation: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        turn_request = GroupRequest(
            group=turn_number(*key, turn), prompt_ids=token_ids, samples=(0,), rows=1, seed=request.seed,
            sampling=replace(request.sampling, max_new_tokens=max_new_tokens), stream=turn_number(request.random_group, key[1], turn),
        )  # fmt: skip
        self._events.put(_TurnRequest(key, turn_request, generation))
        return await generation

    def _finished(self, key: tuple[int, int], task: "Future[Trajectory]") -> None:
        self._events.put((key, task))

    def _take(self, *, wait: bool) -> list[Completion]:
        """Submit requested turns to the inner engine and return ended trajectories; with `wait`, wait up to `WAIT_S` for either."""
        ended: list[Completion] = []
        while True:
            try:
                event = self._events.get(timeout=WAIT_S) if wait else self._events.get_nowait()
            except queue.Empty:
                self._counts["waits_s"] += WAIT_S if wait else 0.0
                return ended
            wait = False
            if event is None:
                continue
            if isinstance(event, _TurnRequest):
                if (running := self._running.get(event.key)) is not None:
                    running.turns.add(event.request.group)
                    self._turns_in_flight[event.request.group] = event
                    self._inner.submit(event.request)
            elif event[0] in self._running and self._running[event[0]].task is event[1]:
                del self._running[event[0]]
                ended.append(self._count(event[1].result()))

    def _deliver(self, completion: Completion) -> None:
        """Pass a turn that the inner engine has generated to the episode that waits for it; ignore one of an aborted episode."""
        request = self._turns_in_flight.pop(completion.group, None)
        running = self._running.get(request.key) if request is not None else None
        if request is None or running is None:
            return
        generation = generation_of(completion)
        running.turns.discard(completion.group)
        running.tokens += len(generation.token_ids)
        running.oldest = min([version for version in (running.oldest, completion.spans[0].version) if version is not None])
        self._loop.call_soon_threadsafe(_resolve, request.generation, generation)

    def _count(self, trajectory: Trajectory) -> Trajectory:
        """Add an ended trajectory to the statistics, log a broken environment or replaced characters, and return the trajectory."""
        counts = self._counts
        counts["trajectories"] += 1
        counts["turns"] += _turns(trajectory)
        counts["segments"] += len(trajectory.segments)
        counts["environment_s"] += trajectory.environment_s
        counts["results_cut"] += trajectory.results_cut
        counts["replaced"] += trajectory.replaced
        if trajectory.replaced:
            many = f"{trajectory.replaced} lone surrogate{'s' if trajectory.replaced > 1 else ''}"
            self._notify(f"group {trajectory.group} sample {trajectory.sample}: {many} in the environment's texts, replaced by U+FFFD")
        if trajectory.turns and trajectory.turns[-1].source == "environment":
            counts["broken"] += 1
            cause = str(trajectory.turns[-1].finish)
            kind = cause.partition(":")[0].replace("-", "_")
            counts[kind] = counts.get(kind, 0.0) + 1
            self._notify(f"group {trajectory.group} sample {trajectory.sample}: {cause}")
        return trajectory

    def _lost(self, line: str) -> None:
        self._counts["losses"] += 1
        self._notify(line)

    def _in_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _turns(trajectory: Trajectory) -> int:
    return sum(turn.source == "model" for turn in trajectory.turns)


def generation_of(completion: Completion) -> Generation:
    """Convert a completion of the inner engine to a turn, with the policy version of each token instead of spans."""
    tokens = len(completion.token_ids)
    starts = np.array([span.start for span in completion.spans])
    versions = np.repeat(np.array([span.version for span in completion.spans], np.int32), np.diff(starts, append=tokens))
    return Generation(
        token_ids=np.asarray(completion.token_ids, np.int32),
        logprobs=np.asarray(completion.logprobs, np.float32),
        versions=versions,
        finish=completion.finish,
        started_ns=completion.started_ns,
        ended_ns=completion.ended_ns,
    )


async def _ended(running: _Running) -> Trajectory:
    running.task.cancel()
    return running.episode.ended("abort")


def _resolve(future: "asyncio.Future[Generation]", generation: Generation) -> None:
    if not future.done():
        future.set_result(generation)


def _merged(group: int, parts: list[GroupInFlight]) -> GroupInFlight:
    versions = [part.oldest_version for part in parts if part.oldest_version is not None]
    return GroupInFlight(group=group, tokens=sum(part.tokens for part in parts), oldest_version=min(versions, default=None))
