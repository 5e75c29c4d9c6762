"""Packed rows contain exactly the given numbers, in few bytes, and are shared through their file."""

import pickle
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.data.index import rows as rows_module
from mm.data.index.gauge import COUNTED_FROM, ROW
from mm.data.index.rows import IndexRows, MappedBytes, packed, packed_numbers
from mm.errors import UserError

NUMBERS = {"<i8": st.integers(-(2**62), 2**62 - 1), "<i4": st.integers(-(2**31), 2**31 - 1),
           "<u4": st.integers(0, 2**32 - 1)}


def pack(array: np.ndarray, counted_from: dict[str, str] | None = None) -> IndexRows:
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        array.tofile(source)
        return packed(source, array.dtype, len(array), target, counted_from)


@st.composite
def columns(draw) -> np.ndarray:
    """Wide and narrow numbers, multiples, ascending ones and none."""
    count = draw(st.integers(0, 40))
    dtypes = draw(st.lists(st.sampled_from([*NUMBERS]), min_size=1, max_size=4))
    array = np.zeros(count, [(f"column{number}", dtype) for number, dtype in enumerate(dtypes)])
    for name, dtype in zip(array.dtype.names, dtypes, strict=True):
        least, most = draw(NUMBERS[dtype]), draw(st.sampled_from([0, 1, 200, 60_000, 10**6, 2**31]))
        values = draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
        unit = draw(st.sampled_from([1, 4, 16]))
        limits = np.iinfo(dtype)
        array[name] = [max(limits.min, min(limits.max, least + unit * value)) for value in values]
    return array


@settings(max_examples=60)
@given(columns(), st.data())
def test_every_number_round_trips(array, data) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_BLOCK_ROWS", 8)
        patch.setattr(rows_module, "BATCH_ROWS", 16)
        names = array.dtype.names
        rows = pack(array, {names[-1]: names[0]} if len(names) > 1 and array.dtype[-1] != "<i8" else None)
        some = data.draw(st.lists(st.integers(0, len(array) - 1), max_size=9)) if len(array) else []
        first, last = sorted(data.draw(st.tuples(st.integers(0, len(array)), st.integers(0, len(array)))))
        part = rows.first(last)
        assert len(rows) == len(array) and len(part) == last
        for name in names:
            assert rows.of(name, np.array(some, dtype=np.int64)).tolist() == array[name][some].tolist()
            assert rows.of(name, np.arange(first, last)).tolist() == array[name][first:last].tolist()
            assert [rows.row(number)[name] for number in some] == array[name][some].tolist()
            found = [(begin, values.tolist()) for begin, values in part.batches(name)]
            assert found == [(begin, array[name][:last][begin : begin + 16].tolist()) for begin in range(0, last, 16)]
            assert rows.between(name, first, last).dtype == array.dtype[name]


def test_the_rows_of_pictures_take_few_bytes() -> None:
    """Records of about a kilobyte with one picture each, truncated to 8,192 tokens; 72 bytes per row before packing.

    Checksums of files take 8 of them.
    """
    rng, count = np.random.default_rng(0), 100_000
    array = np.zeros(count, ROW)
    sizes = rng.integers(500, 3000, count)
    sides = 2 * rng.integers(4, 21, (count, 2))
    array["end"] = np.cumsum(sizes + 2) - 2
    array["start"] = array["end"] - sizes
    array["num_patches"] = sides.prod(axis=1)
    array["num_tokens"] = rng.integers(50, 8192, count)
    array["num_target_tokens"] = array["num_tokens"] // 2
    array["num_media"] = 1
    array["num_image_pairs"] = array["num_patches"].astype(np.int64) ** 2
    array["num_window_pairs"] = array["num_patches"].astype(np.int64) * 64
    for name in ("media_sizes_crc32", "media_times_crc32"):
        array[name] = rng.integers(0, 2**32, count)
    rows = pack(array, COUNTED_FROM)
    assert {column.name: column.width for column in rows.columns if column.width} == {
        "start": 3, "end": 2, "num_tokens": 2, "num_target_tokens": 2, "num_patches": 2, "num_image_pairs": 3,
        "num_window_pairs": 2, "media_sizes_crc32": 4, "media_times_crc32": 4}
    assert len(rows.piece.content) < 25 * count


def test_rows_are_shared_by_their_file(tmp_path: Path) -> None:
    numbers = np.arange(3, 100_000, 3, dtype=np.uint32)
    rows = packed_numbers(numbers, str(tmp_path))
    assert not any(tmp_path.iterdir())  # it has no name, so nothing is left of it
    assert (pickle.loads(pickle.dumps(rows)).of("number", np.arange(len(rows))) == numbers).all()
    path = tmp_path / "rows"
    path.write_bytes(rows.piece.content)
    with path.open("rb") as stream:
        piece = MappedBytes.map(stream, str(path))
    named = IndexRows(piece, rows.columns, rows.num_packed, len(rows))
    pickled = pickle.dumps(named)
    assert len(pickled) < 1000
    assert (pickle.loads(pickled).of("number", np.arange(len(rows))) == numbers).all()
    path.unlink()
    with pytest.raises(UserError, match=r"rows: this index of the samples was deleted; start again"):
        pickle.loads(pickled)


def test_packing_holds_a_few_chunks_whatever_the_number_of_rows(monkeypatch) -> None:
    """Peak memory besides the minimum of each block; all numbers as int64 take 1.6 MB."""
    monkeypatch.setattr(rows_module, "_BLOCK_ROWS", 64)
    monkeypatch.setattr(rows_module, "BATCH_ROWS", 256)
    numbers = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        numbers.tofile(source)
        tracemalloc.start()
        try:
            rows = packed(source, np.dtype([("number", "<u4")]), len(numbers), target)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 300_000  # measured 52,316
    assert (rows.of("number", np.arange(200_000)) == numbers).all()
