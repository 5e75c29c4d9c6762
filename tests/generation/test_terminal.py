"""A chat collects the media of a question."""

import sys
from io import StringIO
from pathlib import Path

import pytest

from mm.generation.terminal import Chat


def test_a_misspelt_file_does_not_discard_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    lines = [f"/image {tmp_path}/a.png", f"/image {tmp_path}/c.png", f"/image {tmp_path}/b.png", "<image><image>Which?"]
    monkeypatch.setattr(sys, "stdin", StringIO("\n".join(lines)))
    chat = Chat(None)
    prompt = chat._next()
    assert prompt is not None and chat._next() is None
    assert [str(one.path) for one in prompt.sample.media] == [f"{tmp_path}/a.png", f"{tmp_path}/b.png"]
    assert f"error: image '{tmp_path}/c.png' is not a regular file" in capsys.readouterr().err
