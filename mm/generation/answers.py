"""The file of answers: one JSON object per line, appended whole, kept across interruptions, and sorted at the end."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mm.errors import UserError, writing
from mm.files import json_object, whole_lines, write_whole


class AnswerFile:
    """The answers in one file.

    Every line has the prompt's ``number``, and a ``key`` made from the prompt's content, the weights and the settings.
    Other keys are the caller's.
    """

    def __init__(self, path: str | Path, keys: Mapping[int, str]) -> None:
        """Open or create the file, and cut off a partial line that an interruption has left.

        ``keys``: the key of every prompt, by number.  Raises UserError if the file cannot be written, or has anything
        other than answers to these prompts.
        """
        self.path = Path(path)
        self._lines: dict[int, bytes] = {}
        for place, line in enumerate(whole_lines(self.path.read_bytes()) if self.path.exists() else (), start=1):
            try:
                answer = json_object(line)
                number, is_ours = answer["number"], keys.get(answer["number"]) == answer["key"]
            except (ValueError, KeyError, TypeError):
                number, is_ours = 0, False
            if not is_ours:
                raise UserError(f"{path}:{place}: is no answer to one of these prompts, or was made with other weights "
                                f"or settings; give another --output, or remove the file to ask everything again.")
            self._lines[number] = line
        with writing(self.path, "--output"):
            write_whole(self.path, b"".join(self._lines.values()))
            self._stream = self.path.open("ab")

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the answered prompts."""
        return frozenset(self._lines)

    def add(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Add the answers that are not in the file yet, and sync it to disk."""
        # half of a surrogate pair, which UTF-8 does not have, becomes JSON's escape of it
        new = {int(one["number"]): json.dumps(one, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
               for one in answers if one["number"] not in self._lines}
        with writing(self.path, "--output"):
            self._stream.write(b"".join(new.values()))
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._lines |= new

    def close(self) -> None:
        """Sort the lines by prompt, atomically, and close the file."""
        self._stream.close()
        with writing(self.path, "--output"):
            write_whole(self.path, b"".join(self._lines[number] for number in sorted(self._lines)), syncs=True)
