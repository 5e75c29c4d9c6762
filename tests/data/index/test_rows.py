"""Rows are shared through their file, and a file that another program changes is noticed."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from mm.data.index.rows import MappedRows, file_crc32
from mm.errors import UserError

NUMBERS = np.arange(3, 100_000, 3, dtype=np.uint32)
CHANGED = r"rows.npy: this index of the samples was deleted or changed by another program .*; start again"


@pytest.fixture
def rows(tmp_path: Path) -> MappedRows:
    path = tmp_path / "rows.npy"
    np.save(path, NUMBERS)
    os.utime(path, (1, 1))  # long ago, so that any change changes the time
    return MappedRows.open(str(path), file_crc32(path))


def test_rows_pickle_as_the_path_of_their_file(rows: MappedRows) -> None:
    pickled = pickle.dumps(rows.first(9))
    assert len(pickled) < 1000
    assert pickle.loads(pickled).array.tolist() == NUMBERS[:9].tolist()
    assert (pickle.loads(pickle.dumps(MappedRows(NUMBERS))).array == NUMBERS).all()  # these have no file


def test_a_deleted_or_replaced_file_stays_mapped(rows: MappedRows, tmp_path: Path) -> None:
    """Another run may build the index again.  A process that starts later accepts the same content only."""
    assert rows.path is not None
    path, pickled = Path(rows.path), pickle.dumps(rows)
    content = path.read_bytes()
    path.unlink()
    assert (rows.array == NUMBERS).all()
    with pytest.raises(UserError, match=CHANGED):
        pickle.loads(pickled)
    (tmp_path / "again").write_bytes(content)
    (tmp_path / "again").rename(path)
    assert (rows.array == NUMBERS).all() and (pickle.loads(pickled).array == NUMBERS).all()
    (tmp_path / "again").write_bytes(bytes(len(content)))
    (tmp_path / "again").rename(path)
    assert (rows.array == NUMBERS).all()
    with pytest.raises(UserError, match=CHANGED):
        pickle.loads(pickled)


@pytest.mark.parametrize("content", [b"", bytes(128 + NUMBERS.nbytes), b"1"])
def test_a_file_that_is_changed_in_place_is_an_error(rows: MappedRows, content: bytes) -> None:
    assert rows.path is not None
    Path(rows.path).write_bytes(content)
    for read in (lambda: rows.array, lambda: rows.row(1), lambda: next(rows.batches()),
                 lambda: pickle.loads(pickle.dumps(rows))):
        with pytest.raises(UserError, match=CHANGED):
            read()


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="objects"):
        MappedRows.open(str(tmp_path / "rows.npy"), file_crc32(tmp_path / "rows.npy"))
