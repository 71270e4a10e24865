"""Texts out of the columns of a table: .parquet, .arrow and .feather, as the library `datasets` saves them.

A table is read batch by batch, so that memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import FileError

TABLE_KINDS = (".parquet", ".arrow", ".feather")
ROWS_AT_ONCE = 256


def table_texts(file: Path, field: str) -> Iterator[tuple[bytes, float]]:
    """Yield the text of every row, and the share of the rows that have been read. Rows without a text are left out."""
    try:
        import pyarrow  # noqa: PLC0415  # an optional extra
        from pyarrow import parquet  # noqa: PLC0415
    except ModuleNotFoundError:
        raise FileError(
            f"{file} is a table, and reading it needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    try:
        if file.suffix.lower() == ".parquet":
            with parquet.ParquetFile(file) as table:
                _check_column(file, table.schema_arrow, field)
                rows = table.metadata.num_rows
                batches = table.iter_batches(ROWS_AT_ONCE, columns=[field])
                yield from _texts(batches, field, rows)
            return
        with pyarrow.memory_map(str(file)) as mapped, _open(pyarrow, mapped) as table:
            _check_column(file, table.schema, field)
            yield from _texts(_batches(table), field, 0)
    except pyarrow.ArrowException as error:
        reason = str(error).strip().splitlines()[0]
        raise FileError(f"{file} is not a table, or is damaged: {reason}") from None


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


def _texts(
    batches: Iterator[Any], field: str, rows: int
) -> Iterator[tuple[bytes, float]]:
    done = 0
    for batch in batches:
        for text in batch.column(field):
            done += 1
            if text.is_valid:
                yield text.as_buffer().to_pybytes(), done / rows if rows else 0.0
