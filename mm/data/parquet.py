"""Records of a Parquet file: a row is one record, null counts as absent.

pyarrow is an extra (``[parquet]``) and is imported only where such a file is read.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mm.errors import UserError

BEGINNING = b"PAR1"
"""How every such file begins."""
_BLOCK_ROWS = 512


def check(path: str) -> None:
    """Raise UserError when ``path`` cannot be read here."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError(f"{path}: is a Parquet file, and the package pyarrow, which reads them, is not installed; "
                        f"install the extra [parquet], or write the records as JSONL.") from error
    try:
        pyarrow.parquet.ParquetFile(path).close()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: is no whole Parquet file: {error}.") from error


def blocks(path: str) -> Iterator[np.ndarray]:
    """Row group and row of neighbouring records; int64 [num_records, 2]."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    for group, size in enumerate(sizes):
        for first in range(0, size, _BLOCK_ROWS):
            rows = np.arange(first, min(size, first + _BLOCK_ROWS), dtype=np.int64)
            yield np.column_stack([np.full_like(rows, group), rows])


def read(path: str, version: tuple[int, int], spans: Sequence[tuple[int, int]]) -> list[Any]:
    """Records by row group and row; ``version`` is that of the file.  Decodes the whole row group, and keeps it for
    the next call: files whose rows are read in any order should have small ones.

    Raises UserError when a row group cannot be read.
    """
    return [_record(_row_group(path, version, group).slice(row, 1).to_pylist()[0]) for group, row in spans]


@lru_cache(maxsize=2)
def _row_group(path: str, version: tuple[int, int], group: int) -> Any:
    """The table of a row group; another version of the file has other ones."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read_row_group(group)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: row group {group} cannot be read: {error}.") from error


def _record(value: Any) -> Any:
    """``value`` without nulls: all structs of a column have the same fields, whether they were given or not."""
    match value:
        case dict():
            return {key: _record(one) for key, one in value.items() if one is not None}
        case list():
            return [_record(one) for one in value]
        case _:
            return value
