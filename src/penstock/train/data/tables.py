"""Texts and records out of the columns of a table: .parquet, .arrow and .feather, as the library `datasets` saves them.

A table is read batch by batch, so that memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import FileError

TABLE_KINDS = (".parquet", ".arrow", ".feather")
ROWS_AT_ONCE = 256


def table_texts(file: Path, field: str) -> Iterator[tuple[bytes, float]]:
    """Yield the text of every row, and the share of the rows that have been read. Rows without a text are left out."""
    for batch, share in _read_batches(file, (field,), _check_column):
        for text in batch.column(field):
            if text.is_valid:
                yield text.as_buffer().to_pybytes(), share


def table_records(
    file: Path, fields: Sequence[str]
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield every row with those of these columns that the table has, and the share of the rows that have been read."""
    for batch, share in _read_batches(file, fields):
        for row in batch.to_pylist():
            yield row, share


def _read_batches(
    file: Path,
    fields: Sequence[str],
    check: Callable[[Path, Any, str], None] | None = None,
) -> Iterator[tuple[Any, float]]:
    """Yield some rows at a time, with these columns, and the share of the rows that have been read."""
    try:
        import pyarrow  # noqa: PLC0415  # an optional extra
        from pyarrow import parquet  # noqa: PLC0415
    except ModuleNotFoundError:
        raise FileError(
            f"{file} is a table, and reading it needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    try:
        if file.suffix.lower() == ".parquet":
            # With pre_buffer, which is the default, Arrow keeps all that it has read until the end of the file.
            with parquet.ParquetFile(file, pre_buffer=False) as table:
                columns = _columns(file, table.schema_arrow, fields, check)
                rows = table.metadata.num_rows
                done = 0
                for batch in table.iter_batches(ROWS_AT_ONCE, columns=columns):
                    done += len(batch)
                    yield batch, done / rows
            return
        with pyarrow.memory_map(str(file)) as mapped, _open(pyarrow, mapped) as table:
            columns = _columns(file, table.schema, fields, check)
            for batch in _batches(table):
                for begin in range(0, len(batch), ROWS_AT_ONCE):
                    yield batch.slice(begin, ROWS_AT_ONCE).select(columns), 0.0
    except pyarrow.ArrowException as error:
        reason = str(error).strip().splitlines()[0]
        raise FileError(f"{file} is not a table, or is damaged: {reason}") from None


def _columns(
    file: Path,
    schema: Any,
    fields: Sequence[str],
    check: Callable[[Path, Any, str], None] | None,
) -> list[str]:
    """Those of these columns that a table has, after a check of each."""
    for field in fields:
        if check is not None:
            check(file, schema, field)
    found = [field for field in fields if field in schema.names]
    if not found:
        known = ", ".join(map(repr, schema.names[:8])) or "nothing"
        wanted = " or ".join(map(repr, fields))
        raise FileError(f"{file} has no column {wanted}; it has {known}")
    return found


def _open(pyarrow: Any, mapped: Any) -> Any:
    """Open Arrow's file format, or else the stream that `datasets` writes."""
    try:
        return pyarrow.ipc.open_file(mapped)
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        return pyarrow.ipc.open_stream(mapped)


def _batches(table: Any) -> Iterator[Any]:
    count = getattr(table, "num_record_batches", None)
    if count is None:
        yield from table
        return
    for number in range(count):
        yield table.get_batch(number)


def _check_column(file: Path, schema: Any, field: str) -> None:
    if field not in schema.names:
        known = ", ".join(map(repr, schema.names[:8])) or "nothing"
        raise FileError(
            f"{file} has no column {field!r}; it has {known}\n"
            "  name the column in data.field"
        )
    kind = str(schema.field(field).type)
    if kind not in ("string", "large_string", "string_view"):
        raise FileError(
            f"{file}: the column {field!r} does not hold text, but {kind}\n"
            "  name another column in data.field"
        )
