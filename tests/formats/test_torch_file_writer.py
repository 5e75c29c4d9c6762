"""A frame filled with tensors equals a file of torch.save, bit for bit."""

import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config as serialization_config

from mm.errors import UserError
from mm.formats.torch_file import read_torch_file
from mm.formats.torch_file_writer import TorchFile

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool)
Chunks = dict[str, dict[str, torch.Tensor]]

EXAMPLE: Chunks = {
    f"model{i}": {f"{dtype}{shape}": torch.randint(0, 2, shape).to(dtype) for dtype in DTYPES for shape in shapes}
    for i, shapes in enumerate([[(), (0,), (3, 0), (5,)], [(2, 3, 4), (1, 1), (), (0, 3)], []])
}
"""Chunks with the same names, and a chunk without tensors."""


def specs(chunks: Chunks) -> dict:
    return {
        chunk: {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
        for chunk, tensors in chunks.items()
    }


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def crc32s(file: TorchFile, chunks: Chunks) -> dict[str, int]:
    return {tensor.name: zlib.crc32(as_bytes(value(chunks, tensor.name))) for tensor in file.tensors}


def value(chunks: Chunks, name: str) -> torch.Tensor:
    chunk, _, key = name.partition("/")
    return chunks[chunk][key]


def write_frame(path: Path, file: TorchFile, checksums: dict[str, int]) -> None:
    with path.open("wb") as opened:
        for offset, content in file.frame(checksums):
            opened.seek(offset)
            opened.write(content)


def write(path: Path, chunks: Chunks) -> TorchFile:
    """Write the frame first, then the tensors."""
    file = TorchFile.new(path.name, specs(chunks))
    write_frame(path, file, crc32s(file, chunks))
    with path.open("r+b") as opened:
        for tensor in file.tensors:
            opened.seek(tensor.offset)
            opened.write(as_bytes(value(chunks, tensor.name)))
    return file


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
def test_torch_loads_the_filled_file(path, mmap, calculate_offsets):
    write(path, EXAMPLE)
    with serialization_config.patch("load.calculate_storage_offsets", calculate_offsets):
        found = torch.load(path, weights_only=True, mmap=mmap)
    assert found.pop("checkpoint_version") == 3.0
    assert_same(found, EXAMPLE)


def test_the_reader_agrees_with_the_plan(path):
    file = write(path, EXAMPLE)
    assert file == TorchFile.new(path.name, specs(EXAMPLE))
    tensors, chunks = read_torch_file(path, path.name)
    assert (chunks, tuple(tensors.values())) == (tuple(EXAMPLE), file.tensors)
    assert file.num_bytes == path.stat().st_size
    assert all(tensor.offset % 64 == 0 for tensor in file.tensors)


def records(path: Path) -> dict[str, tuple]:
    with zipfile.ZipFile(path) as archive:
        return {
            info.filename: (info.header_offset, info.file_size, info.CRC, info.flag_bits, info.extra)
            for info in archive.infolist()
            if not info.filename.endswith("/.data/serialization_id")
        }


def assert_as_torch_writes(path: Path, reference: Path) -> None:
    """Equal records, and equal bytes up to torch's serialization_id, which depends on the checksums."""
    assert records(path) == records(reference)
    with zipfile.ZipFile(path) as archive:
        num_bytes = archive.getinfo("archive/.data/serialization_id").header_offset
    assert path.read_bytes()[:num_bytes] == reference.read_bytes()[:num_bytes]


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
    path = tmp_path_factory.getbasetemp() / "copied.pt"
    reference = tmp_path_factory.getbasetemp() / "reference.pt"
    write(path, chunks)
    with reference.open("wb") as opened:
        torch.save(chunks | {"checkpoint_version": 3.0}, opened)
    assert_as_torch_writes(path, reference)
    assert read_torch_file(path, "file") == read_torch_file(reference, "file")


def test_checksums_are_right(path):
    """torch.load does not verify them; zipfile and unzip do."""
    file = write(path, EXAMPLE)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    wrong = crc32s(file, EXAMPLE)
    name = next(name for number, name in enumerate(wrong) if number and value(EXAMPLE, name).numel())
    wrong[name] ^= 1
    with path.open("r+b") as opened:
        for offset, content in file.frame(wrong):
            opened.seek(offset)
            opened.write(content)
    number = [tensor.name for tensor in file.tensors].index(name)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == f"archive/data/{number}"


def test_frame_and_tensors_cover_the_file_once():
    file = TorchFile.new("file", specs(EXAMPLE))
    ranges = [(offset, len(content)) for offset, content in file.frame(crc32s(file, EXAMPLE))]
    ranges += [(tensor.offset, tensor.num_bytes) for tensor in file.tensors if tensor.num_bytes]
    end = 0
    for offset, num_bytes in sorted(ranges):
        assert offset == end
        end += num_bytes
    assert end == file.num_bytes


def test_a_shared_shape_object_changes_nothing():
    shape = (3, 4)
    shared = {"model": {"a": (torch.float32, shape), "b": (torch.float32, shape)}}
    apart = {"model": {"a": (torch.float32, (3, 4)), "b": (torch.float32, tuple([3, 4]))}}
    assert TorchFile.new("file", shared) == TorchFile.new("file", apart)


def test_an_unsupported_dtype_is_rejected():
    with pytest.raises(UserError, match=r"model/w \(torch.float8_e4m3fn\); expected one of torch.bfloat16"):
        TorchFile.new("file", {"model": {"w": (torch.float8_e4m3fn, (2,))}})


def test_more_than_4_gib(path, tmp_path):
    """Tensors and offsets beyond 32 bits, sparse on disk; the records equal torch's."""
    chunks = {
        "model": {"small": (torch.float32, (3,)), "big": (torch.uint8, (5 << 30,)), "end": (torch.bfloat16, (7,))}
    }
    file = TorchFile.new(path.name, chunks)
    zeros = {tensor.name: 0 for tensor in file.tensors}
    write_frame(path, file, zeros)
    assert path.stat().st_blocks * 512 < 1 << 20
    reference = tmp_path / "reference.pt"
    with torch.serialization.skip_data(), reference.open("wb") as opened:
        empty = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in chunks["model"].items()}
        torch.save({"model": empty, "checkpoint_version": 3.0}, opened)
    assert records(path) == records(reference)
    known = zeros | {"model/big": 0x01234567, "model/end": zlib.crc32(b"\x42" * 14)}
    write_frame(path, file, known)
    small, big, end = file.tensors
    with path.open("r+b") as opened:
        for tensor in (small, end):
            opened.seek(tensor.offset)
            opened.write(b"\x42" * tensor.num_bytes)
        opened.seek(big.offset + big.num_bytes)
        assert opened.read(8) == b"PK\7\x08" + (0x01234567).to_bytes(4, "little")
    assert tuple(read_torch_file(path, path.name)[0].values()) == file.tensors
    found = torch.load(path, weights_only=True, mmap=True)["model"]
    assert as_bytes(found["small"]) == b"\x42" * 12 and as_bytes(found["end"]) == b"\x42" * 14
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/2") == b"\x42" * 14
        assert archive.getinfo("archive/data/1").CRC == 0x01234567
