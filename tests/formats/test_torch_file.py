"""Byte ranges of torch.save files match torch.load's, and every unusable file is rejected by name."""

import argparse
import io
import os
import random
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.errors import UserError
from mm.formats.torch_file import read_torch_file
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
    args = argparse.Namespace(tensor_model_parallel_size=2, params_dtype=torch.bfloat16)
    saved(path, model, args=args, optimizer=optimizer.state_dict(), rng_state=[{"torch": torch.get_rng_state()}])
    assert contents(path) == {name: as_bytes(parameter) for name, parameter in module.named_parameters()}


class Marked(torch.Tensor):
    """A subclass, which torch pickles through another function."""


def test_parameters_and_subclasses_with_attributes(path):
    parameter = torch.nn.Parameter(torch.randn(2, 3))
    parameter.partition_dim = 1
    subclass = torch.randn(4).as_subclass(Marked)
    saved(path, {"parameter": parameter, "subclass": subclass})
    assert contents(path) == {"parameter": as_bytes(parameter), "subclass": as_bytes(subclass)}


def test_views_that_are_row_major_share_a_storage(path):
    base = torch.randn(6, 4)
    model = {
        "base": base,
        "tied": base,
        "rows": base[2:5],
        "flat": base.view(-1)[3:20],
        "column": base.view(24, 1)[5:7],
    }
    first, second, *_ = read(saved(path, model))
    assert first.offset == second.offset
    assert contents(path) == {name: as_bytes(tensor) for name, tensor in model.items()}


def test_new_dtypes_are_found(path):
    model = {"fp8": torch.randn(5, 3).to(torch.float8_e4m3fn)[1:], "u16": torch.arange(5).to(torch.uint16)}
    assert [tensor.dtype for tensor in read(saved(path, model))] == [torch.float8_e4m3fn, torch.uint16]
    assert contents(path) == {name: as_bytes(tensor) for name, tensor in model.items()}


def test_any_archive_name_and_file_object(path):
    with path.open("wb") as file:
        torch.save({"model": {"w": torch.ones(3)}}, file)
    assert contents(path) == {"w": as_bytes(torch.ones(3))}


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
    rewrite(
        path, lambda data: data.replace(b"npu_functions\nnpu_rebuild", b"torch_npu.utils.storage\n_rebuild_npu_tensor")
    )
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


@pytest.mark.parametrize(
    "tensor, words",
    [
        (torch.randn(3, 4).t(), "strides (1, 4) for the shape (4, 3); expected (3, 1)"),
        (torch.randn(3, 4)[:, :2], "strides (4, 1)"),
        (torch.randn(3).expand(2, 3), "strides (0, 1)"),
        (torch.randn(3, dtype=torch.complex64).conj(), "unknown kind torch.ComplexFloatStorage"),
        (torch.randn(3, 3).to_sparse(), "is a torch._utils._rebuild_sparse_tensor; expected a tensor"),
        (3.5, "is a float; expected a tensor"),
        ({"nested": torch.ones(2)}, "is a dict; expected a tensor"),
        (None, "is a NoneType"),
    ],
)
def test_a_tensor_that_is_not_a_byte_range_is_rejected_by_name(path, tensor, words):
    message = refusal(saved(path, {"good": torch.ones(2), "bad.weight": tensor}))
    assert words in message and "model/bad.weight" in message and "good" not in message


def test_a_subclass_that_is_no_class_is_rejected_by_name(path):
    """``_rebuild_from_type_v2`` with an instance where the function that rebuilds the tensor belongs."""
    instance = b"cfoo\nBar\n)R"
    value = b"ctorch._tensor\n_rebuild_from_type_v2\n(" + instance + b"cfoo\nBar\nK\x01\x85NtR"
    saved(path, {})
    rewrite(path, lambda _: b"\x80\x02}X\x05\x00\x00\x00model}X\x01\x00\x00\x00a" + value + b"ss.")
    assert "model/a is a torch._tensor._rebuild_from_type_v2; expected a tensor" in refusal(path)


def test_a_record_beyond_any_file_is_refused(path):
    """The zip directory may state an offset of 8 bytes, more than a file can have."""
    saved(path, {"w": torch.ones(2)})
    with zipfile.ZipFile(path) as archive:
        start, num_records = archive.start_dir, len(archive.infolist())
    content = path.read_bytes()
    name_bytes, extra_bytes = struct.unpack_from("<HH", content, start + 28)
    first, others = bytearray(content[start : start + 46]), content[start + 46 + name_bytes + extra_bytes :]
    struct.pack_into("<H", first, 30, 12)  # length of the extra field
    struct.pack_into("<I", first, 42, 0xFFFFFFFF)  # the offset is in the extra field
    name = content[start + 46 : start + 46 + name_bytes]
    records = bytes(first) + name + struct.pack("<HHQ", 1, 8, 2**63 + 5) + others.partition(b"PK\x06\x06")[0]
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, num_records, num_records, len(records), start, 0)
    path.write_bytes(content[:start] + records + end)
    assert "the zip directory has a wrong offset for" in refusal(path)


def test_every_bad_tensor_is_named(path):
    with pytest.raises(UserError) as caught:
        read(saved(path, {"a": torch.ones(2, 3).t(), "b": 3}))
    assert [("model/a" in text, "model/b" in text) for text in caught.value.problems] == [(True, False), (False, True)]


class Harmful:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("place", ["top", "model", "args"])
def test_code_in_the_pickle_is_refused_and_not_run(path, tmp_path, place):
    marker = tmp_path / "marker"
    harmful = Harmful(marker)
    content = {
        "top": {"model": {"w": torch.ones(2)}, "x": harmful},
        "model": {"model": {"w": torch.ones(2), "x": harmful}},
        "args": {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(x=[harmful])},
    }[place]
    torch.save(content, path)
    message = refusal(path)
    assert "posix.system" in message and "Nothing was executed" in message
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the file must be one that does harm where it is loaded the usual way"


def write(content: bytes):
    return lambda path: path.write_bytes(content)


def legacy(path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, path, _use_new_zipfile_serialization=False)


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"}.")


def plain_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b.txt", b"text")


def big_endian(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"}.")
        archive.writestr("archive/byteorder", b"big")


def duplicate(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"}.")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("archive/data.pkl", b"}.")


@pytest.mark.parametrize(
    "make, words",
    [
        (write(b""), "is empty"),
        (write(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n"), "git lfs pull"),
        (write(b"<html>404</html>"), "starts with b'<html>40'"),
        (write(b"PK\x03\x04"), "probably truncated"),
        (legacy, "before version 1.6"),
        (compressed, "compressed or encrypted"),
        (plain_zip, "without <name>/data.pkl"),
        (big_endian, "byte order b'big'"),
        (duplicate, "occurs twice"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: torch.save([1], path), "holds a list"),
        (lambda path: torch.save({"optimizer": {}}, path), "has the keys ['optimizer']; expected 'model'"),
        (lambda path: torch.save({"model": torch.ones(2)}, path), "model is a torch._utils._rebuild_tensor_v2"),
    ],
)
def test_other_files_are_refused(path, make, words):
    make(path)
    assert words in refusal(path)


@pytest.fixture(scope="module")
def whole() -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": {"a": torch.randn(9, 3), "b": torch.arange(5)}, "args": argparse.Namespace(x=1)}, buffer)
    return buffer.getvalue()


def test_every_truncation_is_refused(path, whole):
    for length in {*range(0, len(whole), 37), *range(len(whole) - 100, len(whole))}:
        path.write_bytes(whole[:length])
        refusal(path)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), num_changes=st.integers(1, 4))
def test_damage_causes_an_error_or_ranges_within_the_file(tmp_path_factory, whole, seed, num_changes):
    """Changes bytes of the pickle and updates its checksum, or changes bytes anywhere in the file."""
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    chance = random.Random(seed)

    def damaged(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(num_changes):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)

    path.write_bytes(whole)
    if chance.random() < 0.7:
        rewrite(path, damaged)
    else:
        path.write_bytes(damaged(whole))
    try:
        tensors, _ = read_torch_file(path, path.name)
    except UserError:
        return
    for tensor in tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.num_bytes <= path.stat().st_size


def test_no_tensor_is_read(path):
    """A sparse file of a terabyte is indexed at once."""
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from mm.formats.torch_file import read_torch_file\n"
        "from mm.formats.torch_file_writer import TorchFile\n"
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
