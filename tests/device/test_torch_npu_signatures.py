"""The stand-in torch_npu, and what is asked of torch_npu here, against the real package's own declarations.

They stand in tests/stand_ins/torch_npu_signatures.json, which tests/stand_ins/refresh_signatures.py reads from a wheel.
"""

import ast
import inspect
import json
import re
import zipfile
from operator import attrgetter
from pathlib import Path

import pytest

from tests.stand_ins.refresh_signatures import (
    OPERATOR,
    RECORD,
    ROOT,
    Wheel,
    as_text,
    names_in,
    python_signature,
    schema_signature,
    stand_in_names,
    trees,
    used_names,
)  # fmt: skip

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))
DECLARED = RECORDED["declarations"]
CALLS = [
    pytest.param(node, id=f"{path.relative_to(ROOT)}:{node.lineno}")
    for path, tree in trees("npu_").items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and OPERATOR.fullmatch(node.func.attr)
]


def test_the_record_is_of_the_torch_that_the_tests_run_with():
    (tested,) = re.findall(r'"torch==([\d.]+)"', (ROOT / "setup.py").read_text())
    assert RECORDED["version"].split(".")[:2] == tested.split(".")[:2]
    assert f"torch_npu-{RECORDED['version']}-" in RECORDED["wheel"]


def test_the_file_is_as_the_script_writes_it():
    assert RECORD.read_text(encoding="utf-8") == as_text(RECORDED)


@pytest.mark.parametrize("name", sorted(stand_in_names()))
def test_the_stand_in_is_declared_as_the_real_one(torch_npu, name):
    assert name in DECLARED, f"the record lacks torch_npu.{name}: run tests/stand_ins/refresh_signatures.py"
    parameters = inspect.signature(attrgetter(name)(torch_npu)).parameters.values()
    empty = inspect.Parameter.empty
    assert DECLARED[name] == [
        {"name": parameter.name}
        | ({} if parameter.default is empty else {"default": parameter.default})
        | ({"keyword_only": True} if parameter.kind is parameter.KEYWORD_ONLY else {})
        for parameter in parameters
    ]


@pytest.mark.parametrize("name", sorted(used_names()))
def test_what_is_used_is_in_torch_npu(name):
    assert name in DECLARED, f"the record lacks torch_npu.{name}: run tests/stand_ins/refresh_signatures.py"


def test_what_is_asked_of_torch_cuda_is_in_torch_npu():
    """On an NPU transfer_to_npu puts the public names of torch_npu.npu there; all others stay CUDA's."""
    asked = {node.attr for tree in trees("torch.cuda").values() for node in ast.walk(tree)
             if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"}  # fmt: skip
    assert asked and asked <= set(RECORDED["torch_npu.npu.__all__"])


@pytest.mark.parametrize("call", CALLS)
def test_operators_are_called_with_arguments_that_they_have(call):
    names = {argument["name"] for argument in DECLARED[call.func.attr]}
    assert len(call.args) <= len(names)
    assert {keyword.arg for keyword in call.keywords if keyword.arg} <= names  # a ** has no name of its own


def test_there_are_operators_and_calls():
    assert {"npu_fusion_attention", "npu_rms_norm", "npu_swiglu"} <= used_names() & stand_in_names()
    assert len(CALLS) >= 4


# The script


def test_every_way_to_name_a_thing_of_torch_npu_is_seen():
    source = """
    torch_npu().npu_a(x); torch_npu.b.c; torch.npu.d(); getattr(torch, self.kind).e(0); module.npu_f(x)
    importlib.import_module("torch_npu.g.h"); Shim("torch_npu:i", None, "torch_npu is a package")
    getattr(other, kind).no; torch.nothing; npu_local(x)
    """
    found = set(names_in(ast.parse(inspect.cleandoc(source))))
    assert found == {"npu_a", "b.c", "npu.d", "npu.e", "npu_f", "g.h", "i"}


def test_schemas_and_functions_are_read_alike():
    schema = "op(Tensor x, float scale=1., int[]? ends=None, *, str layout=\"\", bool sync=False, Tensor(a!) out) -> ()"
    function = "def op(x, scale=1.0, ends=None, *, layout='', sync=False, out): ..."
    expected = [
        {"name": "x"}, {"name": "scale", "default": 1.0}, {"name": "ends", "default": None},
        {"name": "layout", "default": "", "keyword_only": True},
        {"name": "sync", "default": False, "keyword_only": True}, {"name": "out", "keyword_only": True},
    ]  # fmt: skip
    assert schema_signature(schema) == expected
    assert python_signature(ast.parse(function).body[0].args) == expected


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    with zipfile.ZipFile(tmp_path / "small.whl", "w") as archive:
        source = "from .utils import a\nfrom .more import *\nclass C: ...\nd = 1\n"
        archive.writestr("torch_npu/npu/__init__.py", source)
        archive.writestr("torch_npu/npu/utils.py", "def a(device=None): ...\n")
        archive.writestr("torch_npu/npu/more.py", "def b(seed): ...\n")
        archive.writestr("torch_npu/lib/a.so", b"\0npu_x(Tensor x) -> Tensor\0_npu_y(Tensor x, T\0ensor y) -> ()\0")
        archive.writestr("torch_npu/lib/b.so", b"\0see npu_x(y) -> z\0npu_x(Tensor x) -> Tensor\0")
    return Wheel(tmp_path / "small.whl")


def test_a_wheel_is_read_without_importing_it(wheel: Wheel):
    assert wheel.declaration("npu_x") == [{"name": "x"}]
    assert wheel.declaration("npu.a") == [{"name": "device", "default": None}]
    assert wheel.declaration("npu.b") == [{"name": "seed"}]
    assert (wheel.declaration("npu.C"), wheel.declaration("npu.more")) == ("class", "module")
    assert wheel.declaration("npu.d") is wheel.declaration("npu.missing") is wheel.declaration("other.a") is None
    assert wheel.constant("torch_npu/npu/__init__.py", "d") == 1


def test_a_schema_in_pieces_is_an_error(wheel: Wheel):
    with pytest.raises(SystemExit, match="holds 0 schemas of _npu_y"):
        wheel.declaration("_npu_y")
