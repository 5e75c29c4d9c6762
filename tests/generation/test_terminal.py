"""An answer is streamed to the terminal, without incomplete characters; a chat collects the media of a question."""

import sys
from io import StringIO
from pathlib import Path

import pytest

from mm.generation.decode import Answer
from mm.generation.terminal import Chat, TextStream

TEXT = "a\u00e9\u65e5\U0001f99c z"
"""Characters of one, two, three and four bytes."""


def text_of(token_ids: list[int]) -> str:
    """Each byte is a token; incomplete characters decode to a replacement character, as in real tokenizers."""
    return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize(("content", "whole"), [
    (TEXT.encode(), TEXT),
    (TEXT.encode() + "\u65e5".encode()[:2], TEXT + "\ufffd"),  # an answer that ends in half a character
])
def test_characters_are_shown_when_they_are_complete(content: bytes, whole: str):
    stream, answer, seen = StringIO(), Answer(0), [""]
    listener = TextStream(text_of, stream)
    for number, byte in enumerate(content, 1):
        answer.token_ids.append(byte)
        answer.ended = "length" if number == len(content) else None
        listener.listen(answer)
        seen.append(stream.getvalue())
        if answer.ended is None:
            assert seen[-1] == content[:number].decode(errors="ignore")
    assert seen[-1] == whole
    assert len({*seen}) == 1 + len(whole)  # a write for each character


def test_a_misspelt_file_does_not_discard_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    lines = [f"/image {tmp_path}/a.png", f"/image {tmp_path}/c.png", f"/image {tmp_path}/b.png", "<image><image>Which?"]
    monkeypatch.setattr(sys, "stdin", StringIO("\n".join(lines)))
    prompt = Chat(None)._next()
    assert prompt is not None
    assert [str(one.path) for one in prompt.sample.media] == [f"{tmp_path}/a.png", f"{tmp_path}/b.png"]
    assert f"error: image '{tmp_path}/c.png' is not a regular file" in capsys.readouterr().err
