"""Convert LLaVA's records to MindSpeed-MM's: ``conversations`` and ``image`` become ``messages`` and ``images``.

The trainer reads both; this is for users who want all files in one format.  Records are streamed one at a time.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mm.data.media.picture import format_of
from mm.data.read.keys import MEDIA
from mm.data.read.open_records import open_records
from mm.data.read.records import Raw, RecordFile
from mm.data.record_name import name_of, numbered
from mm.data.sample import Inline
from mm.errors import UserError, counted, naming
from mm.files import write_whole
from mm.progress import Progress

_ROLES = {"human": "user", "gpt": "assistant"}
_MEDIA = {"images": ("image", "images"), "videos": ("video", "videos")}
"""MindSpeed-MM's column -> LLaVA's names for it."""


@dataclass(frozen=True)
class Converted:
    """The number of records read and written.  Records with missing media are left out."""

    num_records: int
    num_kept: int


def convert_llava(records: Path, target: Path, folder: str) -> Converted:
    """Write the records in the file ``records``, whose media are in ``folder``, to ``target``: JSONL if it is named so,
    otherwise a JSON list.  Media paths become ``folder/path``.  Embedded images, as in Parquet files, are written to
    ``NAME.pictures`` beside the target.

    Raises UserError, and leaves no ``target``, when it exists, when ``records`` is unreadable or has other records, and
    when no record has its media.
    """
    images = target.with_name(f"{target.stem}.pictures")
    for path in (target, images):
        if path.exists():
            raise UserError(f"{path} already exists; rename or remove it, or give another output.")
    file, is_lines, num_records, num_kept = open_records(str(records)), target.suffix == ".jsonl", 0, 0
    # Lone surrogates, which UTF-8 cannot encode, are written as JSON escapes.
    with target.open("x", encoding="utf-8", errors="backslashreplace") as out:
        try:
            for raw in _records(file):
                with naming(f"{file.where(raw)}: {numbered('record', raw.index, name_of(raw.value))}"):
                    converted = _converted(raw, folder, images)
                num_records += 1
                if all(Path(path).is_file() for column in _MEDIA for path in converted.get(column, ())):
                    _write(out, converted, is_lines, is_first=not num_kept)
                    num_kept += 1
            out.write("" if is_lines else "]" if num_kept else "[]")
            if num_records and not num_kept:
                raise UserError(f"none of the {num_records} records has its image or video in {folder}; give the "
                                f"folder that contains them.")
        except BaseException:
            target.unlink()
            shutil.rmtree(images, ignore_errors=True)
            raise
    return Converted(num_records, num_kept)


def summary(done: Converted, target: Path, folder: str) -> str:
    """The result of a conversion in one line."""
    num_missing = done.num_records - done.num_kept
    return f"{target}: {counted(done.num_kept, 'record')}" + (
        f"; {num_missing} left out, because their image or video is not in {folder}" * (num_missing > 0))


def _records(file: RecordFile) -> Iterator[Raw]:
    problems: list[str] = []
    yield from Progress(f"converting {file.path}", unit="records").each(file.records(problems))
    if problems:
        raise UserError(problems)


def _converted(raw: Raw, folder: str, images: Path) -> dict[str, Any]:
    """One record in the new format; a record without media is text only."""
    if raw.problem is not None:
        raise UserError(raw.problem)
    record = raw.value
    if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
        raise UserError("has no list of 'conversations'; expected LLaVA's records.")
    turns = record["conversations"]
    if not all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in turns):
        raise UserError("has a turn without 'from' and 'value'; expected LLaVA's records.")
    unknown = {str(turn["from"]) for turn in turns} - _ROLES.keys()
    if unknown:
        raise UserError(f"has turns from {sorted(unknown)}; expected {list(_ROLES)}.")
    others = {name: value for name, value in record.items() if name not in (*MEDIA, "conversations")}
    columns: dict[str, Any] = {**others, "images": []}  # whoever reads the file refuses what would be learnt otherwise
    for column, names in _MEDIA.items():
        given = next((record[one] for one in names if record.get(one)), [])
        paths = [given] if isinstance(given, str | Inline) else given
        if not isinstance(paths, list) or not all(isinstance(path, str | Inline) for path in paths):
            raise UserError(f"has {names[0]!r} = {str(given)[:60]!r}; expected a path or a list of them.")
        if paths:
            columns[column] = [f"{folder}/{path}" if isinstance(path, str) else _written(path, images)
                               for path in paths]
    return columns | {"messages": [
        {"role": _ROLES[turn["from"]], "content": turn["value"],
         **{name: value for name, value in turn.items() if name not in ("from", "value")}} for turn in turns]}


def _written(image: Inline, folder: Path) -> str:
    """Write ``image`` to a file named by its hash, and return its path."""
    form = format_of(image)
    if form is None:
        raise UserError(f"{image} is not an image that Pillow can read; replace or remove it.")
    path = folder / f"{image.digest[:32]}.{form.lower()}"
    if not path.exists():
        write_whole(path, image.content)
    return str(path)


def _write(out: TextIO, record: dict[str, Any], is_lines: bool, is_first: bool) -> None:
    text = json.dumps(record, ensure_ascii=False, default=str)  # an embedded image in another column: its name
    out.write(f"{text}\n" if is_lines else f"{'[' if is_first else ', '}{text}")
