"""Opens a file of records as JSON, JSON Lines or Parquet, recognized by its first bytes, not by its name."""

import os

from mm.data.read import parquet
from mm.data.read.json_file import JsonFile
from mm.data.read.parquet_file import ParquetFile
from mm.data.read.records import RecordFile, version_of
from mm.data.read.spans import BLOCK_BYTES, UTF8_MARK, line_spans, list_spans
from mm.errors import UserError

_UNPACK = "unpack it, and name the JSON, JSON Lines or Parquet file in it that lists the samples"
_OTHER_BEGINNINGS = {
    b"\x1f\x8b": "is compressed (gzip); unpack it, because its records are read in any order",
    b"BZh": "is compressed (bzip2); unpack it",
    b"\xfd7zXZ\0": "is compressed (xz); unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed (zstd); unpack it",
    b"PK\x03\x04": f"is a zip archive; {_UNPACK}",
    b"\xff\xfe": "is in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is in UTF-16; save it as UTF-8",
}
_TAR_MARK, _TAR_MARK_AT = b"ustar", 257
_HEAD_BYTES = 512
"""Text has no zero byte; binary files have one near their beginning."""


def open_records(path: str) -> RecordFile:
    """Open ``path``.  Raises UserError when it is not a readable regular file, or is packed, binary, in UTF-16 or a
    damaged Parquet file."""
    if not os.path.isfile(path):
        raise UserError(f"{path}: is not a regular file; name JSON, JSONL or Parquet files in "
                        f"basic_parameters.dataset.")
    try:
        with open(path, "rb") as stream:
            version, start = version_of(os.fstat(stream.fileno())), stream.read(BLOCK_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    if start.startswith(parquet.BEGINNING):
        parquet.check(path)
        return ParquetFile(path, version)
    if (what := _strange(start)) is not None:
        raise UserError(f"{path}: {what}.")
    is_list = start.removeprefix(UTF8_MARK).lstrip(b" \t\r\n").startswith(b"[")
    return JsonFile(path, version, list_spans if is_list else line_spans)


def _strange(start: bytes) -> str | None:
    """What a file is that begins with ``start``, and what to do, unless it may be text."""
    for beginning, what in _OTHER_BEGINNINGS.items():
        if start.startswith(beginning):
            return what
    if start.startswith(_TAR_MARK, _TAR_MARK_AT):
        return f"is a tar archive; {_UNPACK}"
    return "is a binary file; expected JSON, JSON Lines or Parquet" if b"\0" in start[:_HEAD_BYTES] else None
