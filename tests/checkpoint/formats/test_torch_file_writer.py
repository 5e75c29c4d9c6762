"""Files laid out empty and filled by copying are torch.save's, bit for bit."""

import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config as serialization_config

from checkpoint.formats.torch_file import TorchFile, read_index
from checkpoint.formats.torch_file_writer import create, finish, frame, plan_file
from mm.errors import UserError

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool)
Chunks = dict[str, dict[str, torch.Tensor]]

EXAMPLE: Chunks = {
    f"model{i}": {f"{dtype}{shape}": torch.randint(0, 2, shape).to(dtype) for dtype in DTYPES for shape in shapes}
    for i, shapes in enumerate([[(), (0,), (3, 0), (5,)], [(2, 3, 4), (1, 1), (), (0, 3)], []])
}
"""With the same names in several chunks, and a chunk of no tensors."""


def specs(chunks: Chunks) -> dict:
    return {
        chunk: {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
        for chunk, tensors in chunks.items()
    }


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def fill(path: Path, layout: TorchFile, chunks: Chunks) -> None:
    with path.open("r+b") as file:
        for tensor in layout.tensors:
            file.seek(tensor.offset_bytes)
            file.write(as_bytes(chunks[tensor.chunk][tensor.name]))


def write(path: Path, chunks: Chunks, **extra) -> TorchFile:
    layout = create(path, specs(chunks), **extra)
    fill(path, layout, chunks)
    finish(path)
    return layout


def assert_same(found: dict, expected: Chunks) -> None:
    assert list(found) == list(expected)
    for chunk, tensors in expected.items():
        assert list(found[chunk]) == list(tensors)
        for name, value in tensors.items():
            assert found[chunk][name].dtype == value.dtype and found[chunk][name].shape == value.shape
            assert as_bytes(found[chunk][name]) == as_bytes(value)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model_optim_rng.pt"


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("calculate_offsets", [False, True], ids=["offsets-read", "offsets-computed"])
def test_torch_loads_what_was_copied_in(path, mmap, calculate_offsets):
    write(path, EXAMPLE)
    with serialization_config.patch("load.calculate_storage_offsets", calculate_offsets):
        found = torch.load(path, weights_only=True, mmap=mmap)
    assert found.pop("checkpoint_version") == 3.0
    assert_same(found, EXAMPLE)


def test_other_entries(path):
    write(path, {"model": {}}, extra={"iteration": 5, "checkpoint_version": 3.0, "note": "text"})
    expected = {"model": {}, "iteration": 5, "checkpoint_version": 3.0, "note": "text"}
    assert torch.load(path, weights_only=True) == expected


def test_the_reader_agrees_with_the_plan(path):
    layout = write(path, EXAMPLE)
    assert layout == plan_file(specs(EXAMPLE)) == read_index(path)
    assert layout.size_bytes == path.stat().st_size
    assert all(tensor.offset_bytes % 64 == 0 for tensor in layout.tensors)


def records(path: Path) -> dict[str, tuple]:
    with zipfile.ZipFile(path) as archive:
        return {
            info.filename: (info.header_offset, info.file_size, info.CRC, info.flag_bits, info.extra)
            for info in archive.infolist()
            if not info.filename.endswith("/.data/serialization_id")
        }


def assert_as_torch_writes(path: Path, theirs: Path) -> None:
    """Equal records, and equal bytes up to where torch adds its serialization_id."""
    assert records(path) == records(theirs)
    with zipfile.ZipFile(path) as archive:
        data_bytes = archive.start_dir
    assert path.read_bytes()[:data_bytes] == theirs.read_bytes()[:data_bytes]


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=30)
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
models = st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=9)


@settings(max_examples=40, deadline=None)
@given(models=st.lists(models, min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_equal_to_torch_save_bit_for_bit(tmp_path_factory, models, seed):
    torch.manual_seed(seed)
    keys = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    chunks = {
        sys.intern(key): {
            sys.intern(name): torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in model.items()
        }
        for key, model in zip(keys, models, strict=True)
    }
    path = tmp_path_factory.getbasetemp() / "ours.pt"
    theirs = tmp_path_factory.getbasetemp() / "model_optim_rng.pt"
    write(path, chunks)
    torch.save(chunks | {"checkpoint_version": 3.0}, theirs)
    assert_as_torch_writes(path, theirs)
    assert [(tensor.name, tensor.offset_bytes) for tensor in read_index(path).tensors] == [
        (tensor.name, tensor.offset_bytes) for tensor in read_index(theirs).tensors
    ]


def test_checksums_are_right_after_finish_and_only_then(path):
    """torch.load does not compare them (so forgetting finish shows only here); zipfile and unzip do."""
    layout = create(path, specs(EXAMPLE))
    fill(path, layout, EXAMPLE)
    torch.load(path, weights_only=True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None
    found = finish(path)
    assert found == {(t.chunk, t.name): zlib.crc32(as_bytes(EXAMPLE[t.chunk][t.name])) for t in layout.tensors}
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_checksums_that_are_known_are_taken(path):
    layout = create(path, specs(EXAMPLE))
    fill(path, layout, EXAMPLE)
    known = {(t.chunk, t.name): zlib.crc32(as_bytes(EXAMPLE[t.chunk][t.name])) for t in layout.tensors}
    wrong = next(iter(known))
    assert finish(path, known | {wrong: 12345})[wrong] == 12345
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == "model_optim_rng/data/0"
    assert finish(path, known) == known
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_the_frame_with_known_checksums_needs_no_finish(path, tmp_path):
    layout = write(tmp_path / "finished.pt", EXAMPLE)
    known = finish(tmp_path / "finished.pt")
    with path.open("wb") as file:
        for offset_bytes, content in frame(specs(EXAMPLE), crc32s=known):
            file.seek(offset_bytes)
            file.write(content)
    fill(path, layout, EXAMPLE)
    assert path.read_bytes() == (tmp_path / "finished.pt").read_bytes()


def test_frame_and_tensors_cover_the_file_once():
    layout = plan_file(specs(EXAMPLE))
    ranges = [(offset_bytes, len(content)) for offset_bytes, content in frame(specs(EXAMPLE))]
    ranges += [(tensor.offset_bytes, tensor.size_bytes) for tensor in layout.tensors if tensor.size_bytes]
    end = 0
    for offset_bytes, size_bytes in sorted(ranges):
        assert offset_bytes == end
        end += size_bytes
    assert end == layout.size_bytes


def test_a_shared_shape_object_changes_nothing():
    shape = (3, 4)
    assert plan_file({"model": {"a": (torch.float32, shape), "b": (torch.float32, shape)}}) == plan_file(
        {"model": {"a": (torch.float32, (3, 4)), "b": (torch.float32, tuple([3, 4]))}}
    )


def test_an_old_file_is_replaced(path):
    path.write_bytes(b"x" * 100_000)
    write(path, EXAMPLE)
    assert path.stat().st_size == plan_file(specs(EXAMPLE)).size_bytes
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_a_dtype_that_the_format_lacks_is_refused(path):
    with pytest.raises(UserError, match=r"model/w \(torch.float8_e4m3fn\); expected one of torch.bfloat16"):
        create(path, {"model": {"w": (torch.float8_e4m3fn, (2,))}})
    assert not path.exists()


def test_finish_refuses_a_file_that_shares_storages(path):
    torch.save({"model": {"a": torch.ones(4)[1:]}}, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not a file of create"):
        finish(path)
    assert path.read_bytes() == before


def test_more_than_4_gib(path, tmp_path):
    """Tensors and offsets beyond 32 bits, sparse on the disk: the records as torch writes them."""
    chunks = {
        "model": {"small": (torch.float32, (3,)), "big": (torch.uint8, (5 << 30,)), "end": (torch.bfloat16, (7,))}
    }
    layout = create(path, chunks)
    assert path.stat().st_blocks * 512 < 1 << 20
    theirs = tmp_path / "theirs" / "model_optim_rng.pt"
    theirs.parent.mkdir()
    with torch.serialization.skip_data():
        empty = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in chunks["model"].items()}
        torch.save({"model": empty, "checkpoint_version": 3.0}, theirs)
    assert records(path) == records(theirs)
    for name in ("small", "end"):
        tensor = next(tensor for tensor in layout.tensors if tensor.name == name)
        with path.open("r+b") as file:
            file.seek(tensor.offset_bytes)
            file.write(b"\x42" * tensor.size_bytes)
    known = {("model", "big"): 0x01234567}  # reading 5 GiB of zeros would take seconds
    assert read_index(path) == layout and finish(path, known).keys() == {("model", name) for name in empty}
    found = torch.load(path, weights_only=True, mmap=True)["model"]
    assert as_bytes(found["small"]) == b"\x42" * 12 and as_bytes(found["end"]) == b"\x42" * 14
    with zipfile.ZipFile(path) as archive:
        assert archive.read("model_optim_rng/data/2") == b"\x42" * 14
        assert archive.getinfo("model_optim_rng/data/1").CRC == 0x01234567
    end = layout.tensors[1].offset_bytes + layout.tensors[1].size_bytes
    with path.open("rb") as file:
        file.seek(end)
        assert file.read(8) == b"PK\7\x08" + (0x01234567).to_bytes(4, "little")


FILL_UNDER_A_LIMIT = """
import os, resource, sys, torch
from pathlib import Path
from checkpoint.formats.torch_file import read_index
from checkpoint.formats.torch_file_writer import create, finish
source, target = sys.argv[1:]
status = Path("/proc/self/status").read_text()
data_bytes = 1024 * int(status.split("VmData:")[1].split()[0])
limit = data_bytes + (32 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    bytearray(48 << 20)
except MemoryError:
    print("limited")
specs = {"model": {str(i): (torch.bfloat16, (1 << 20, 4)) for i in range(8)}}
with open(source, "rb") as read:
    layout = create(target, specs)
    with open(target, "r+b") as write:
        for number, tensor in enumerate(layout.tensors):
            done = 0
            while done < tensor.size_bytes:
                done += os.copy_file_range(
                    read.fileno(), write.fileno(), tensor.size_bytes - done,
                    number * tensor.size_bytes + done, tensor.offset_bytes + done,
                )
finish(target)
assert read_index(target) == layout
"""


def test_64_mib_are_written_with_less_than_32_mib_of_memory(path, tmp_path):
    """The kernel enforces it: an allocation beyond the limit fails."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(64 << 20))
    done = subprocess.run(
        [sys.executable, "-c", FILL_UNDER_A_LIMIT, source, path], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "limited\n"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    found = torch.load(path, weights_only=True)["model"]
    assert b"".join(as_bytes(found[str(i)]) for i in range(8)) == source.read_bytes()
