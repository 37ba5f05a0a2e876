"""The prompts of a run: its data sets, opened and compared with its record, their order, and the choice of the next prompt.

The order is a pure function of the index, so that a restarted feeder makes the same prompts: rows are shuffled, mixed by weight, or sorted
by a column. The next prompt is the retry of an abandoned one, else the next row that is not skipped. It follows from the log and the
configuration, not from when a record arrived: a row is skipped by the reward of its group in the epoch before, and the choice waits for
that outcome.
"""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.run_config import source_name
from penstock.pipeline.config.schema import DataSection, EvalSection
from penstock.pipeline.data.open import check, open_dataset
from penstock.pipeline.data.read_files import DataError, Dataset, MissingData, Row
from penstock.pipeline.data.references import SOURCE_COLUMN, with_facts
from penstock.topics.prompts import Prompt


class RowId(NamedTuple):
    """A row of a source, and the epoch in which it is used."""

    source: int
    epoch: int
    row: int


@dataclass(slots=True)
class PromptOrder:
    """The order of the rows of several sources.

    Every prefix of the order contains the sources in proportion to their weights, to within one row each. A source starts its next epoch
    when all its rows have been used. `ranks` has for each source its row numbers sorted by a column, or None.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    seed: int = 0
    shuffle: bool = True
    first: int = 0
    """Offset added to every index."""
    ranks: Sequence[NDArray[np.int64] | None] = ()
    _turns: list[tuple[int, int]] = field(default_factory=list)
    """Index -> source, and the number of earlier rows of that source."""
    _taken: Counter[int] = field(default_factory=Counter)
    """Source -> number of its rows in `_turns`."""

    def at(self, index: int) -> RowId:
        """Return the row at an index of the order, counted from 0."""
        index += self.first
        source, before = (0, index) if len(self.sizes) == 1 else self._turn(index)
        size = self.sizes[source]
        epoch, row = order(self.seed, before, size, shuffle=self.shuffle)
        if self.ranks and (ranks := self.ranks[source]) is not None:
            row = int(ranks[before % size])
        return RowId(source, epoch, row)

    def _turn(self, index: int) -> tuple[int, int]:
        """Return the source at an index of a mixture, and the number of its rows before."""
        while len(self._turns) <= index:  # the source whose next row is due first, if the rows of each are evenly spaced
            due = [(self._taken[source] + 0.5) / weight for source, weight in enumerate(self.weights)]
            source = due.index(min(due))
            self._turns.append((source, self._taken[source]))
            self._taken[source] += 1
        return self._turns[index]


def order(seed: int, n: int, size: int, *, shuffle: bool = True) -> tuple[int, int]:
    """Return (epoch, row) of group `n` over a data set of `size` rows; each epoch visits every row once."""
    epoch, index = divmod(n, size)
    return epoch, int(_permutation(seed, epoch, size)[index]) if shuffle else index


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    # Sorts Philox's raw stream: numpy guarantees the stream of a bit generator over its releases, but not Generator.permutation's.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def ascending(dataset: Dataset, column: str) -> NDArray[np.int64]:
    """Return the row numbers in ascending order of a column; equal values keep their order. Raises `DataError` for a value not a number."""
    values = []
    for row in dataset:
        value = row.columns.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{row.origin}: the column {column!r}, by which data.sort_by sorts, must be a number, not {value!r}")
        values.append(value)
    ranked: NDArray[np.int64] = np.argsort(np.array(values, np.float64), kind="stable")
    return ranked


class Choice(NamedTuple):
    """A row for the next group."""

    position: int
    """Index in the order of prompts."""
    turn: RowId
    again: int | None = None
    """The abandoned group that this retries."""


@dataclass(slots=True, kw_only=True)
class Choices:
    """Chooses the row of the next prompt from the prompts requested so far and the outcomes of their groups, for the feeder."""

    order: PromptOrder
    limit: int | None = None
    """Number of prompts; None for no end: `run.epochs` counts prompts."""
    solved: float | None = None
    """Rows whose group had at least this mean reward in the epoch before are skipped."""
    unsolved: float | None = None
    """Rows whose group had at most this mean reward in the epoch before are skipped."""
    skipped: AbstractSet[tuple[int, int]] = frozenset()
    """(source, row) of rows that are never used."""
    next_position: int = 0
    left_out: int = 0
    repeated: int = 0
    awaiting: dict[int, Choice] = field(default_factory=dict)
    """Abandoned groups whose prompts are to be retried."""
    _requested: dict[int, Choice] = field(default_factory=dict)
    """Group -> its prompt, for groups that have not ended."""
    _repeats: set[int] = field(default_factory=set)
    """Groups that were retried before their outcome was read."""
    _reward: dict[RowId, float | None] = field(default_factory=dict)
    """Row of this or the last epoch -> mean reward of its group; None until the group has ended."""

    @property
    def remembers(self) -> bool:
        """True if outcomes influence the choice, so that a restarted feeder must read all of them."""
        return self.solved is not None or self.unsolved is not None

    def next(self) -> Choice | None:
        """Return the choice for the next group; None if there is none now or, if `exhausted`, for good."""
        if self.awaiting:
            group = min(self.awaiting)
            return self.awaiting[group]._replace(again=group)
        while self.limit is None or self.next_position < self.limit:
            turn = self.order.at(self.next_position)
            if (turn.source, turn.row) in self.skipped:
                self.next_position, self.left_out = self.next_position + 1, self.left_out + 1
                continue
            before = turn._replace(epoch=turn.epoch - 1)
            if before not in self._reward:
                return Choice(self.next_position, turn)
            reward = self._reward[before]
            if reward is None:
                return None
            if not self._skips(reward):
                return Choice(self.next_position, turn)
            del self._reward[before]  # skipped once; then it is tried again
            self.next_position, self.left_out = self.next_position + 1, self.left_out + 1
        return None

    @property
    def exhausted(self) -> bool:
        """True if no prompt will follow, unless an open group is abandoned and retried."""
        return self.limit is not None and self.next_position >= self.limit and not self.awaiting

    def requested(self, group: int, choice: Choice) -> None:
        """Record that a choice became the prompt of a group, in this process or, after a restart, in the log."""
        self._requested[group] = choice
        if choice.again is not None:
            self.repeated += 1
            if self.awaiting.pop(choice.again, None) is None:
                self._repeats.add(choice.again)
        elif choice.position >= self.next_position:
            self.next_position = choice.position + 1
        if self.remembers:
            self._reward.pop(choice.turn._replace(epoch=choice.turn.epoch - 1), None)
            self._reward[choice.turn] = None

    def ended(self, group: int, *, outcome: str | None, reward: float | None) -> None:
        """Record a group's outcome and mean reward; an abandoned group is retried once."""
        choice = self._requested.pop(group, None)
        if choice is None:
            return
        if outcome == "abandoned" and choice.again is None:
            if group in self._repeats:
                self._repeats.discard(group)
            else:
                self.awaiting[group] = choice
            return
        if self.remembers and reward is not None:
            self._reward[choice.turn] = reward
        elif self.remembers:
            self._reward.pop(choice.turn, None)

    def _skips(self, reward: float) -> bool:
        return (self.solved is not None and reward >= self.solved) or (self.unsolved is not None and reward <= self.unsolved)


def choice_of(prompt: Prompt, *, rows_before: Mapping[int, int]) -> Choice:
    """Return the choice that led to a recorded prompt; `rows_before` is source -> number of rows in earlier sources."""
    source = max(number for number, rows in rows_before.items() if rows <= prompt.row)
    turn = RowId(source, prompt.epoch, prompt.row - rows_before[source])
    return Choice(prompt.group if prompt.place is None else prompt.place, turn, prompt.again)


@dataclass(frozen=True, slots=True)
class Data:
    """The training prompts of a run: one source or a mixture."""

    sources: Mapping[str, Dataset]

    def __len__(self) -> int:
        return sum(map(len, self.sources.values()))

    @property
    def rows_before(self) -> list[int]:
        """For each source, the first of its row numbers in the log: the number of rows in earlier sources."""
        return [0, *itertools.accumulate(map(len, self.sources.values()))][:-1]

    def at(self, number: int) -> tuple[int, int]:
        """Return (source, index) of a row by its number in the log."""
        source = bisect_right(self.rows_before, number) - 1
        return source, number - self.rows_before[source]

    def row(self, source: int, index: int) -> Row:
        """Return row `index` of source number `source`; in a mixture the column `data_source` has the source's name."""
        name = list(self.sources)[source]
        return self._named(self.sources[name][index], name)

    def _named(self, row: Row, name: str) -> Row:
        if len(self.sources) == 1:
            return row
        return replace(row, columns=with_facts(row.columns, {SOURCE_COLUMN: name}))

    def order(self, config: Config) -> PromptOrder:
        """Return the order in which a run uses the rows: shuffled, mixed by weight, or sorted by a column. Raises `DataError`."""
        data, sizes = config.data, [len(source) for source in self.sources.values()]
        ranks = [ascending(source, data.sort_by) if data.sort_by else None for source in self.sources.values()]
        weights = data.weights or [float(size) for size in sizes]
        return PromptOrder(sizes=sizes, weights=weights, seed=config.run.seed, shuffle=data.shuffle, ranks=ranks, first=data.first_group)

    def check(self, *, also: Callable[[Row], object]) -> None:
        """Read every row once (only the first few if rows are generated) and pass it to `also`. Raises `DataError`."""
        for name, source in self.sources.items():
            check(source, also=lambda row, name=name: also(self._named(row, name)))  # type: ignore[misc]


def open_data(config: Config) -> Data:
    """Open the training prompts. Raises `DataError` with the configuration key if a source cannot be read or all rows are skipped."""
    data = Data({source_name(source): _opened(config, source, config.data, key="data.source") for source in config.data_sources})
    if len({row for row in config.data.skip_rows if row < len(data)}) == len(data):
        raise DataError(f"data.skip_rows: all {len(data)} rows are skipped; shorten the list")
    return data


def open_eval_data(config: Config) -> dict[str, Dataset]:
    """Open the held-out prompts by source name. Raises `DataError` with the configuration key."""
    return {source_name(source): _opened(config, source, config.eval, key="eval.source") for source in config.eval_sources}


def _opened(config: Config, source: str, rows: DataSection | EvalSection, *, key: str) -> Dataset:
    """Open one source with the settings of its section, `data` or `eval`. Raises `DataError` that starts with the configuration key."""
    try:
        return open_dataset(
            source, prompt_field=config.data.prompt_field, answer_field=config.data.answer_field, split=rows.split, start=rows.start,
            limit=rows.limit, size=rows.size, seed=config.run.seed,
        )  # fmt: skip
    except MissingData as error:
        raise MissingData(f"{key}: {error}") from error
    except ValueError as error:
        raise DataError(f"{key}: {error}") from error
    except OSError as error:
        raise DataError(f"{key}: cannot read {source[:200]!r}: {error.strerror}") from error


def pool_of(row: Row, config: Config) -> str | None:
    """Return the name of the rollout pool that accepts the row's tag, else of the pool without tags; None if the run has no pools.

    Raises `DataError` if the row has no tag or no pool accepts it.
    """
    field, pools = config.data.tag_field, config.rollout.pools
    if not pools or field is None:
        return None
    if field not in row.columns:
        raise DataError(f"{row.origin}: no field {field!r}; data.tag_field requires it to select a pool of rollout workers")
    tag = row.columns[field]
    others = next((name for name, pool in pools.items() if not pool.tags), None)
    selected = next((name for name, pool in pools.items() if tag in pool.tags), others)
    if selected is None:
        raise DataError(
            f"{row.origin}: no pool in rollout.pools ({', '.join(pools)}) accepts {field} = {tag!r}; a pool without tags accepts all others"
        )
    return selected


def described(sources: Sequence[str], opened: Mapping[str, Dataset], *, context: str) -> list[dict[str, Any]]:
    """Return a row (name, source, digest, rows, context) per data set for the run's record; `context` is training or evaluation."""
    return [
        {"name": name, "source": source, "digest": rows.digest, "rows": len(rows), "context": context}
        for source, (name, rows) in zip(sources, opened.items(), strict=True)
    ]


def refuse_changed(info: Mapping[str, Any], sources: Sequence[str], opened: Mapping[str, Dataset], *, context: str, run: str) -> None:
    """Raise `ConfigError` with the source and both digests if a data set differs from that in the record's `info`."""
    recorded = {row["source"]: row for row in info.get("data", ()) if row["context"] == context}
    for row in described(sources, opened, context=context):
        before = recorded.get(row["source"], row)
        if before["digest"] != row["digest"]:
            raise ConfigError(
                f"{'data' if context == 'training' else 'eval'}.source: the rows of {row['source']} have changed since the run started: "
                f"then {before['rows']:,} rows with digest {before['digest'][:12]}, now {row['rows']:,} with {row['digest'][:12]}; "
                f"restore the old rows, or continue with the new ones: penstock run --resume {run} --set data.on_change=accept"
            )
