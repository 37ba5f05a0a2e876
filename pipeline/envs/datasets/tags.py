"""Which pool of rollout workers draws a row's prompt.

The rule: the pool follows from the row alone; which workers serve it at a time is no matter of the data.
"""

from penstock.pipeline.config.load import Config
from penstock.pipeline.envs.datasets.rows import DataError, Row


def pool_of(row: Row, config: Config) -> str | None:
    """The pool that has the row's tag, else the one without tags; None where the run has no pools. Raises `DataError`."""
    field, pools = config.data.tag_field, config.rollout.pools
    if not pools or field is None:
        return None
    if field not in row.columns:
        raise DataError(f"{row.origin}: no field {field!r}, by which data.tag_field chooses a pool")
    tag = row.columns[field]
    others = next((name for name, pool in pools.items() if not pool.tags), None)
    found = next((name for name, pool in pools.items() if tag in pool.tags), others)
    if found is None:
        raise DataError(
            f"{row.origin}: {field} = {tag!r} is a tag of none of rollout.pools ({', '.join(pools)}); one without tags has all others"
        )
    return found
