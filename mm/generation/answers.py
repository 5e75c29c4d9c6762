"""The file of answers: one JSON object per line, appended whole, kept across interruptions, and sorted at the end."""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mm.errors import UserError, writing
from mm.files import json_object, regular, whole_lines, write_whole

_AGAIN = "give another --output, or remove the file to ask everything again"


class AnswerFile:
    """The answers in one file, to which one process at a time may add.

    Every line has the prompt's ``number``, and a ``key`` made from the prompt's content, the weights and the settings.
    Other keys are the caller's.
    """

    def __init__(self, path: str | Path, keys: Mapping[int, str]) -> None:
        """Open or create the file, and cut off a partial line that an interruption has left.

        ``keys``: the key of every prompt, by number.  Raises UserError if the file cannot be written, another process
        is adding to it, or it has anything other than answers to these prompts.
        """
        self.path = Path(path)
        with writing(self.path, "--output"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise UserError(f"--output {path} is being written by another run; wait for it to end, or give another "
                            f"file.") from error
        self._lines: dict[int, bytes] = {}
        try:
            self._read(keys)
        except UserError:
            os.close(self._file)
            raise

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the answered prompts."""
        return frozenset(self._lines)

    def _read(self, keys: Mapping[int, str]) -> None:
        lines = whole_lines(self.path.read_bytes())
        for number, line in enumerate(lines, start=1):
            where = f"{self.path}:{number}: "
            try:
                answer = json_object(line)
                prompt, key = int(answer["number"]), answer["key"]
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise UserError(f"{where}is not an answer of mm.generate; {_AGAIN}.") from error
            if keys.get(prompt) != key:
                raise UserError(f"{where}answers a different prompt {prompt}, or was made with other weights or "
                                f"settings; {_AGAIN}.")
            if prompt in self._lines:
                raise UserError(f"{where}is a second answer to prompt {prompt}; {_AGAIN}.")
            self._lines[prompt] = line
        os.ftruncate(self._file, sum(map(len, lines)))

    def add(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Add the answers that are not in the file yet, in one write, and sync it to disk."""
        new = {int(one["number"]): _line(one) for one in answers if one["number"] not in self._lines}
        left = b"".join(new.values())
        with writing(self.path, "--output"):
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        self._lines |= new

    def close(self) -> None:
        """Sort the lines by prompt, atomically, and close the file."""
        lines = b"".join(self._lines[number] for number in sorted(self._lines))
        if self.path.read_bytes() != lines:
            with writing(self.path, "--output"):
                write_whole(self.path, lines, syncs=True)
        os.close(self._file)


def _line(answer: Mapping[str, Any]) -> bytes:
    # Half of a surrogate pair, which UTF-8 does not have, becomes JSON's escape of it.
    return json.dumps(answer, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
