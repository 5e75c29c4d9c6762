"""Byte ranges of torch.save files match torch.load's, every unusable file is rejected by name, and a frame filled with
tensors equals a file of torch.save, bit for bit."""

import argparse
import io
import os
import random
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config as serialization_config

from mm.checkpoint.torch_file import TorchFile, read_consumed_samples, read_torch_file
from mm.errors import UserError
from mm.weights.views import Stored

DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
SHAPES = ((), (1,), (7,), (0,), (3, 0), (0, 3), (4, 6), (2, 3, 5), (1, 5, 1), (65, 33))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def read(path: Path) -> list[Stored]:
    """The tensors of a file with one chunk, ``model``."""
    tensors, chunks = read_torch_file(path, "the file")
    assert chunks == ("model",)
    assert [(stored.file, stored.name) for stored in tensors.values()] == [("the file", name) for name in tensors]
    return list(tensors.values())


def bytes_at(path: Path, tensor: Stored) -> bytes:
    return path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]


def contents(path: Path) -> dict[str, bytes]:
    """Bytes by name without the chunk."""
    return {tensor.name.removeprefix("model/"): bytes_at(path, tensor) for tensor in read(path)}


def saved(path: Path, model: dict, **others) -> Path:
    torch.save({**others, "model": model}, path)
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model_optim_rng.pt"


def test_every_dtype_and_shape_is_found(path):
    model = {f"{dtype}{shape}": random_tensor(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    tensors = read(saved(path, model, checkpoint_version=3.0, iteration=7))
    assert [tensor.name for tensor in tensors] == [f"model/{name}" for name in model]
    for tensor, expected in zip(tensors, model.values(), strict=True):
        assert (tensor.dtype, tensor.shape) == (expected.dtype, tuple(expected.shape))
        assert bytes_at(path, tensor) == as_bytes(expected)


def test_virtual_chunks(path):
    chunks = {f"model{i}": OrderedDict(weight=torch.full((3,), float(i))) for i in range(12)} | {"model12": {}}
    torch.save(chunks, path)
    tensors, found = read_torch_file(path, "file")
    assert found == tuple(chunks)
    assert {name: bytes_at(path, tensor) for name, tensor in tensors.items()} == {
        f"{chunk}/weight": as_bytes(entries["weight"]) for chunk, entries in chunks.items() if entries
    }


def test_a_module_as_megatron_saves_it(path):
    """Parameters, a state dict with _metadata, extra state, args, random states, and torch's own optimizer."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    model = module.state_dict(keep_vars=True)
    model |= {"0._extra_state": None, "1._extra_state": io.BytesIO(b"x"), "2._extra_state": torch.empty(0)}
    optimizer = torch.optim.AdamW(module.parameters())
    args = argparse.Namespace(params_dtype=torch.bfloat16, consumed_train_samples=12, load=Path("x"), last=deque([1]))
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    saved(path, model, args=args, optimizer=optimizer.state_dict(), rng_state=[states], names=defaultdict(list, a=[1]))
    assert read_consumed_samples(path) == 12
    assert contents(path) == {name: as_bytes(parameter) for name, parameter in module.named_parameters()}


def test_views_that_are_row_major_share_a_storage(path):
    base = torch.randn(6, 4)
    model = {"base": base, "tied": base, "rows": base[2:5], "flat": base.view(-1)[3:20],
             "column": base.view(24, 1)[5:7]}  # fmt: skip
    first, second, *_ = read(saved(path, model))
    assert first.offset == second.offset
    assert contents(path) == {name: as_bytes(tensor) for name, tensor in model.items()}


def npu_rebuild(*args):
    """Pickled under the name of torch_npu's function."""


def test_tensors_saved_from_an_npu(path):
    tensor = torch.randn(3, 2)
    npu_rebuild.__module__, npu_rebuild.__qualname__ = "npu_functions", "npu_rebuild"

    class Npu:
        def __reduce__(self):
            return npu_rebuild, (tensor._typed_storage(), 0, (3, 2), (2, 1), False, OrderedDict(), 29)

    module = type(sys)("npu_functions")
    module.npu_rebuild = npu_rebuild
    sys.modules["npu_functions"] = module
    try:
        saved(path, {"weight": Npu()})
    finally:
        del sys.modules["npu_functions"]
    rewrite(path, lambda data: data.replace(
        b"npu_functions\nnpu_rebuild", b"torch_npu.utils.storage\n_rebuild_npu_tensor"))
    assert contents(path) == {"weight": as_bytes(tensor)}


def rewrite(path: Path, edit) -> None:
    """Change data.pkl and update its checksums."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, edit(data) if name.endswith("data.pkl") else data)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_torch_file(path, path.name)
    message = str(caught.value)
    assert str(path) in message
    return message


@pytest.mark.parametrize("tensor, words", [
    (torch.randn(3, 4).t(), "strides (1, 4) for the shape (4, 3)"), (torch.randn(3, 4)[:, :2], "strides (4, 1)"),
    (torch.randn(3).expand(2, 3), "strides (0, 1)"),
    (torch.randn(3, dtype=torch.complex64).conj(), "save it .contiguous()"),
    (3.5, "is a float; expected"), ({"nested": torch.ones(2)}, "is a dict; expected"), (None, "is a NoneType"),
])  # fmt: skip
def test_a_tensor_that_is_not_a_byte_range_is_rejected_by_name(path, tensor, words):
    message = refusal(saved(path, {"good": torch.ones(2), "bad.weight": tensor}))
    assert words in message and "model/bad.weight" in message and "good" not in message


class Harmful:
    def __init__(self, function: Callable, *args: object) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_a_tensor_beyond_the_end_of_the_file_is_named(path):
    storage = torch.zeros(4)._typed_storage()
    larger = Harmful(torch._utils._rebuild_tensor_v2, storage, 0, (10**6,), (1,), False, OrderedDict())
    assert "model/bad.weight lies beyond the end of the file" in refusal(saved(path, {"bad.weight": larger}))


@pytest.mark.parametrize("place", ["top", "model", "args"])
def test_no_code_of_the_pickle_runs(path, tmp_path, place):
    marker = tmp_path / "marker"
    for harmful in (Harmful(os.system, f"touch {marker}"), Harmful(exec, f"import os; os.mkdir({str(marker)!r})")):
        torch.save({
            "top": {"model": {"w": torch.ones(2)}, "x": harmful},
            "model": {"model": {"w": torch.ones(2), "x": harmful}},
            "args": {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(x=[harmful])},
        }[place], path)
        with suppress(UserError):
            read_torch_file(path, path.name)
        assert not marker.exists()
        torch.load(path, weights_only=False)
        assert marker.exists(), "the file must be one that does harm where it is loaded the usual way"
        marker.rmdir() if marker.is_dir() else marker.unlink()


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"PK\x03\x04"])
def test_other_files_are_refused(path, content):
    path.write_bytes(content)
    assert "cannot be read by torch.load" in refusal(path)


def test_no_tensor_is_read(path):
    """A sparse file of a terabyte is indexed at once."""
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from mm.checkpoint.torch_file import TorchFile, read_torch_file\n"
        "path = Path(sys.argv[1])\n"
        "chunks = {'model': {str(i): (torch.bfloat16, (1 << 20, 1 << 13)) for i in range(64)}}\n"
        "file = TorchFile.new(path.name, chunks)\n"
        "with path.open('wb') as opened:\n"
        "    for offset, content in file.frame({tensor.name: 0 for tensor in file.tensors}):\n"
        "        opened.seek(offset)\n"
        "        opened.write(content)\n"
        "assert tuple(read_torch_file(path, path.name)[0].values()) == file.tensors\n"
        "assert file.tensors[-1].offset > 2**40 - 2**35\n"
    )
    subprocess.run([sys.executable, "-c", script, path], check=True, timeout=60)


# Written

WRITTEN = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool)
Chunks = dict[str, dict[str, torch.Tensor]]

EXAMPLE: Chunks = {
    f"model{i}": {f"{dtype}{shape}": torch.randint(0, 2, shape).to(dtype) for dtype in WRITTEN for shape in shapes}
    for i, shapes in enumerate([[(), (0,), (3, 0), (5,)], [(2, 3, 4), (1, 1), (), (0, 3)], []])
}
"""Chunks with the same names, and a chunk without tensors."""


def specs(chunks: Chunks) -> dict:
    return {chunk: {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
            for chunk, tensors in chunks.items()}  # fmt: skip


def crc32s(file: TorchFile, chunks: Chunks) -> dict[str, int]:
    return {tensor.name: zlib.crc32(as_bytes(value(chunks, tensor.name))) for tensor in file.tensors}


def value(chunks: Chunks, name: str) -> torch.Tensor:
    chunk, _, key = name.partition("/")
    return chunks[chunk][key]


def write_frame(path: Path, file: TorchFile, checksums: dict[str, int], mode: str = "wb") -> None:
    with path.open(mode) as opened:
        for offset, content in file.frame(checksums):
            opened.seek(offset)
            opened.write(content)


def write_chunks(path: Path, chunks: Chunks) -> TorchFile:
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


@pytest.mark.parametrize("calculate_offsets", [False, True], ids=["offsets-read", "offsets-computed"])
def test_torch_loads_the_filled_file(path, calculate_offsets):
    write_chunks(path, EXAMPLE)
    with serialization_config.patch("load.calculate_storage_offsets", calculate_offsets):
        found = torch.load(path, weights_only=True)
    assert found.pop("checkpoint_version") == 3.0
    assert_same(found, EXAMPLE)


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
models = st.dictionaries(names, st.tuples(st.sampled_from(WRITTEN), shapes), max_size=9)


@settings(max_examples=15, deadline=None)
@given(models=st.lists(models, min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_equal_to_torch_save_bit_for_bit(tmp_path_factory, models, seed):
    torch.manual_seed(seed)
    keys = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    chunks = {sys.intern(key): {sys.intern(name): torch.randint(0, 2, shape).to(dtype)
                                for name, (dtype, shape) in model.items()}
              for key, model in zip(keys, models, strict=True)}  # fmt: skip
    path = tmp_path_factory.getbasetemp() / "copied.pt"
    reference = tmp_path_factory.getbasetemp() / "reference.pt"
    write_chunks(path, chunks)
    with reference.open("wb") as opened:
        torch.save(chunks | {"checkpoint_version": 3.0}, opened)
    assert_as_torch_writes(path, reference)
    assert read_torch_file(path, "file") == read_torch_file(reference, "file")


def test_checksums_are_right(path):
    """torch.load does not verify them; zipfile and unzip do."""
    file = write_chunks(path, EXAMPLE)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    wrong = crc32s(file, EXAMPLE)
    name = next(name for number, name in enumerate(wrong) if number and value(EXAMPLE, name).numel())
    wrong[name] ^= 1
    write_frame(path, file, wrong, "r+b")
    number = [tensor.name for tensor in file.tensors].index(name)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == f"archive/data/{number}"
