"""The positions of records, for any file and any block boundary."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.read import spans
from mm.data.read.spans import line_spans, list_spans

texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8)
spaces = st.text(" \t\r\n", max_size=4)


def found(find, content: bytes) -> tuple[list[tuple[bytes, int]], list[str]]:
    """The bytes of each record with the line of its block's first record, otherwise 0, and the problems."""
    problems: list[str] = []
    records = [(content[start:end], line * (not number)) for line, _, block in find(io.BytesIO(content), "f", problems)
               for number, (start, end) in enumerate(block)]
    return records, problems


@pytest.fixture(params=[1, 7, 64, 1 << 18], autouse=True)
def block_bytes(request, monkeypatch):
    """Blocks of one byte, so that blocks end at every possible position."""
    monkeypatch.setattr(spans, "BLOCK_BYTES", request.param)


@given(records=st.lists(values, min_size=1, max_size=6), escaped=st.booleans(), mark=st.booleans(), data=st.data())
def test_the_elements_of_a_list(records, escaped, mark, data):
    written = [json.dumps(record, ensure_ascii=escaped).encode() for record in records]
    content, lines = b"\xef\xbb\xbf" * mark + b"[", []
    for number, one in enumerate(written):
        content += b"," * bool(number) + data.draw(spaces).encode()
        lines.append(content.count(b"\n") + 1)
        content += one + data.draw(spaces).encode()
    records, problems = found(list_spans, content + b"]" + data.draw(spaces).encode())
    assert problems == []
    assert [one for one, _ in records] == written
    assert all(line in (0, expected) for (_, line), expected in zip(records, lines, strict=True))
    assert records[0][1] == lines[0]


@given(records=st.lists(values, min_size=1, max_size=6), escaped=st.booleans(), mark=st.booleans(), data=st.data())
def test_the_lines_of_a_file(records, escaped, mark, data):
    written = [json.dumps(record, ensure_ascii=escaped).encode() for record in records]
    content, lines = b"\xef\xbb\xbf" * mark, []
    for number, one in enumerate(written):
        content += (b"\r\n" if data.draw(st.booleans()) else b"\n") * bool(number) + data.draw(spaces).encode()
        lines.append(content.count(b"\n") + 1)
        content += one + data.draw(st.text(" \t\r", max_size=3)).encode()
    records, problems = found(line_spans, content + data.draw(spaces).encode())
    assert problems == []
    assert [one for one, _ in records] == written
    assert all(line in (0, expected) for (_, line), expected in zip(records, lines, strict=True))


@given(st.lists(values, min_size=1, max_size=3), st.data())
def test_a_list_truncated_anywhere_is_detected(records, data):
    content = json.dumps(records).encode()
    _, problems = found(list_spans, content[: data.draw(st.integers(1, len(content) - 1))])
    assert len(problems) == 1


@pytest.mark.parametrize("content", [b"[1] 2", b"[1]]", b"[] x", b"[1,]", b"[,1]", b"[1 2]", b"[1,,2]", b"[1}",
                                     b"[tru]", b"['a']"])
def test_other_content_is_detected(content):
    assert len(found(list_spans, content)[1]) == 1


@pytest.mark.parametrize("content", [b"[]", b" [ ] ", b"\xef\xbb\xbf[\n]\n"])
def test_an_empty_list(content):
    assert found(list_spans, content) == ([], [])


@pytest.mark.parametrize(("find", "content"), [(list_spans, b'["'), (line_spans, b'"')])
def test_an_unterminated_record_is_not_read_to_the_end_of_the_file(monkeypatch, find, content):
    monkeypatch.setattr(spans, "MAX_RECORD_BYTES", 1 << 10)
    stream, problems = io.BytesIO(content + b"x" * 5_000_000), []
    assert list(find(stream, "f", problems)) == []
    place = f"f:1:{1 + (find is list_spans)}"
    assert problems[0].startswith(f"{place}: record 0 (counted from 0) starts here and does not end")
    assert stream.tell() <= max(4 << 10, 2 * spans.BLOCK_BYTES)


def test_a_truncated_list_in_one_line_names_column_and_record():
    """For any block boundary; counted in characters, some of which have several bytes."""
    records = [{"n": number, "text": "猫é" * 5} for number in range(30)]
    whole = json.dumps(records, ensure_ascii=False)
    start = whole.index('{"n": 20')
    of_record = "record 20 (counted from 0): not valid JSON: "
    for end, column, which in ((start + 3, start + 2, f"{of_record}Unterminated string"),
                               (start + 6, start + 7, f"{of_record}Expecting value"),
                               (start - 1, start, "the list has no final ']' after record 19 (counted from 0)"),
                               (start - 2, start - 1, "expected ',' and an object, or the list's ']'")):
        _, (problem,) = found(list_spans, whole[:end].encode())
        assert problem.startswith(f"f:1:{column}: {which}"), (problem, column)
        _, (problem,) = found(list_spans, b"\xef\xbb\xbf" + ("\n" + whole[:end]).encode())
        assert problem.startswith(f"f:2:{column}: {which}"), (problem, column)
    broken = whole[:start] + "x" + whole[start:]
    _, (problem,) = found(list_spans, broken.encode())
    assert problem.startswith(f"f:1:{start + 1}: record 20 (counted from 0): not valid JSON: Expecting value")
    missing = whole[: start - 2] + whole[start - 1 :]
    _, (problem,) = found(list_spans, missing.encode())
    assert problem.startswith(f"f:1:{start}: expected ',' and an object") and "after record 19 (counted" in problem
