"""Bring a batch of a neighbouring schema into ours: columns nobody here knows are dropped, nullable ones that are missing read as null.

Any other difference is refused: nothing is converted."""

import pyarrow as pa


def conform(batch: pa.RecordBatch, *, found: pa.Schema, expected: pa.Schema) -> pa.RecordBatch:
    """The columns of `expected` out of a validated `batch`, whose stream had the schema `found`; raises `ValueError`."""
    _no_duplicates(found.names)
    for field in found:
        if field.name not in expected.names and not field.nullable:
            raise ValueError(f"unknown column {field.name!r} may not be null, so it cannot be ignored")
    columns = []
    for field in expected:
        if field.name in found.names:
            columns.append(_array(batch.column(field.name), field.type, field.name))
        else:
            columns.append(_missing(field, len(batch)))
    return pa.RecordBatch.from_arrays(columns, names=expected.names)


def _array(array: pa.Array, expected: pa.DataType, path: str) -> pa.Array:
    found = array.type
    if found == expected:
        return array
    if pa.types.is_struct(expected) and pa.types.is_struct(found):
        return _struct(array, expected, path)
    types = (found, expected)
    if all(map(pa.types.is_map, types)) and found.key_type == expected.key_type and found.item_type == expected.item_type:
        return array
    if type(found) is type(expected) and pa.types.is_list(expected):
        values = _array(array.values, expected.value_type, f"{path}.item")
        if values is array.values or not pa.types.is_nested(expected.value_type):
            return array
        if array.null_count:
            raise ValueError(f"column {path!r} has null lists")
        return pa.ListArray.from_arrays(array.offsets, values)
    raise ValueError(f"column {path!r} is {str(found)[:100]}, expected {str(expected)[:100]}")


def _struct(array: pa.StructArray, expected: pa.DataType, path: str) -> pa.Array:
    found = {field.name: field for field in array.type}
    _no_duplicates([field.name for field in array.type])
    if array.null_count:
        raise ValueError(f"column {path!r} has null structs")
    names = {field.name for field in expected}
    for field in array.type:
        if field.name not in names and not field.nullable:
            raise ValueError(f"unknown field {path}.{field.name} may not be null, so it cannot be ignored")
    children = [
        _array(array.field(field.name), field.type, f"{path}.{field.name}") if field.name in found else _missing(field, len(array))
        for field in expected
    ]
    return pa.StructArray.from_arrays(children, names=[field.name for field in expected])


def _missing(field: pa.Field, rows: int) -> pa.Array:
    if not field.nullable:
        raise ValueError(f"column {field.name!r} is missing")
    return pa.nulls(rows, field.type)


def _no_duplicates(names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError("two columns have one name")
