"""The data sets of a run: opened from the configuration, compared with the run's record, and the rollout pool of each row."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.run_config import source_name
from penstock.pipeline.config.schema import DataSection, EvalSection
from penstock.pipeline.data.open import check, open_dataset
from penstock.pipeline.data.prompt_order import SOURCE_COLUMN, PromptOrder, ascending
from penstock.pipeline.data.references import with_facts
from penstock.pipeline.data.rows import DataError, Dataset, MissingData, Row


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

    def row(self, source: int, index: int) -> Row:
        """The row `index` of source number `source`; in a mixture it has the name of its source as `data_source`."""
        name = list(self.sources)[source]
        return self._named(self.sources[name][index], name)

    def _named(self, row: Row, name: str) -> Row:
        if len(self.sources) == 1:
            return row
        return replace(row, columns=with_facts(row.columns, {SOURCE_COLUMN: name}))

    def order(self, config: Config) -> PromptOrder:
        """The order in which rows become prompts."""
        data, sizes = config.data, [len(source) for source in self.sources.values()]
        ranks = [ascending(source, data.sort_by) if data.sort_by else None for source in self.sources.values()]
        weights = data.weights or [float(size) for size in sizes]
        return PromptOrder(sizes=sizes, weights=weights, seed=config.run.seed, shuffle=data.shuffle, ranks=ranks, first=data.first_group)

    def check(self, *, also: Callable[[Row], object]) -> None:
        """Read every row once (only the first few if rows are generated) and pass it to `also`. Raises `DataError`."""
        for name, source in self.sources.items():
            check(source, also=lambda row, name=name: also(self._named(row, name)))  # type: ignore[misc]


def open_data(config: Config) -> Data:
    """Open the training prompts. Raises `DataError` with the configuration key."""
    return Data({source_name(source): _opened(config, source, config.data, key="data.source") for source in config.data_sources})


def open_eval_data(config: Config) -> dict[str, Dataset]:
    """Open the held-out prompts by source name. Raises `DataError` with the configuration key."""
    return {source_name(source): _opened(config, source, config.eval, key="eval.source") for source in config.eval_sources}


def _opened(config: Config, source: str, rows: DataSection | EvalSection, *, key: str) -> Dataset:
    try:
        return open_dataset(
            source,
            prompt_field=config.data.prompt_field,
            answer_field=config.data.answer_field,
            split=rows.split,
            start=rows.start,
            limit=rows.limit,
            size=rows.size,
            seed=config.run.seed,
        )
    except MissingData as error:
        raise MissingData(f"{key}: {error}") from error
    except ValueError as error:
        raise DataError(f"{key}: {error}") from error
    except OSError as error:
        raise DataError(f"{key}: cannot read {source[:200]!r}: {error.strerror}") from error


def pool_of(row: Row, config: Config) -> str | None:
    """The pool with the row's tag, else the one without tags; None if the run has no pools. Raises `DataError`."""
    field, pools = config.data.tag_field, config.rollout.pools
    if not pools or field is None:
        return None
    if field not in row.columns:
        raise DataError(f"{row.origin}: no field {field!r}, which data.tag_field requires to select a pool")
    tag = row.columns[field]
    others = next((name for name, pool in pools.items() if not pool.tags), None)
    selected = next((name for name, pool in pools.items() if tag in pool.tags), others)
    if selected is None:
        raise DataError(
            f"{row.origin}: {field} = {tag!r} is not a tag of any of rollout.pools ({', '.join(pools)}); one without tags has all others"
        )
    return selected


def described(sources: Sequence[str], opened: Mapping[str, Dataset], *, context: str) -> list[dict[str, Any]]:
    """The description of data sets for the record; `context` is training or evaluation."""
    return [
        {"name": name, "source": source, "digest": rows.digest, "rows": len(rows), "context": context}
        for source, (name, rows) in zip(sources, opened.items(), strict=True)
    ]


def refuse_changed(info: Mapping[str, Any], sources: Sequence[str], opened: Mapping[str, Dataset], *, context: str, run: str) -> None:
    """Raise `ConfigError` with the source and both digests if the rows differ from those in the record's `info`."""
    recorded = {row["source"]: row for row in info.get("data", ()) if row["context"] == context}
    for row in described(sources, opened, context=context):
        before = recorded.get(row["source"], row)
        if before["digest"] != row["digest"]:
            raise ConfigError(
                f"{'data' if context == 'training' else 'eval'}.source: the rows of {row['source']} have changed since the run's start: "
                f"{before['rows']:,} rows with digest {before['digest'][:12]} then, {row['rows']:,} with {row['digest'][:12]} here; "
                f"restore the old rows, or continue with these: penstock run --resume {run} --set data.on_change=accept"
            )
