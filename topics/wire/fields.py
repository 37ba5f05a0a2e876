"""Short names for Arrow fields, so that a schema reads as a table; fields are not nullable by default."""

import pyarrow as pa


def column(name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Field:
    """One field of a schema or of a struct."""
    return pa.field(name, kind, nullable=nullable)


def list_of(kind: pa.DataType, *, nullable: bool = False) -> pa.DataType:
    """Type of lists with elements of `kind`; with `nullable` elements may be null."""
    return pa.list_(pa.field("item", kind, nullable=nullable))


def map_of(kind: pa.DataType) -> pa.DataType:
    """Maps from strings to `kind`."""
    return pa.map_(pa.string(), pa.field("value", kind, nullable=False))
