"""Rows of a Parquet file, the format of most datasets on the Hugging Face hub."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from prime_node.envs.dataset import Row

ROWS_AT_ONCE = 4_096


def read_parquet(data: bytes) -> Iterator[Row]:
    """Yield the rows. Raises ValueError."""
    try:
        number = 0
        for batch in pq.ParquetFile(io.BytesIO(data)).iter_batches(ROWS_AT_ONCE):
            for fields in batch.to_pylist():
                number += 1
                yield f"row {number}", fields
    except pa.ArrowException as error:
        raise ValueError(f"not a Parquet file: {error}") from error
