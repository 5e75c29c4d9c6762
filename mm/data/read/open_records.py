"""Opens a file of records as JSON, JSON Lines or Parquet, recognized by its first bytes, not by its name."""

import os

from mm.data.read import parquet
from mm.data.read.json_file import JsonFile
from mm.data.read.parquet_file import ParquetFile
from mm.data.read.records import RecordFile, version_of
from mm.data.read.spans import BLOCK_BYTES, UTF8_MARK, line_spans, list_spans
from mm.errors import UserError

_OTHER_BEGINNINGS = {
    b"\x1f\x8b": "is compressed (gzip); unpack it, because its records are read in any order",
    b"\xff\xfe": "is in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is in UTF-16; save it as UTF-8",
}


def open_records(path: str) -> RecordFile:
    """Open ``path``.  Raises UserError when it is not a readable regular file, or is compressed, in UTF-16 or a damaged
    Parquet file."""
    if not os.path.isfile(path):
        raise UserError(f"{path}: is not a regular file; name JSON, JSONL or Parquet files in "
                        f"basic_parameters.dataset.")
    try:
        with open(path, "rb") as stream:
            version, start = version_of(os.fstat(stream.fileno())), stream.read(BLOCK_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    for beginning, what in _OTHER_BEGINNINGS.items():
        if start.startswith(beginning):
            raise UserError(f"{path}: {what}.")
    if start.startswith(parquet.BEGINNING):
        parquet.check(path)
        return ParquetFile(path, version)
    is_list = start.removeprefix(UTF8_MARK).lstrip(b" \t\r\n").startswith(b"[")
    return JsonFile(path, version, list_spans if is_list else line_spans)
