"""The stand-in torch_npu, and what is asked of torch_npu here, against the real package's own declarations.

They stand in tests/stand_ins/torch_npu_signatures.json, which tests/stand_ins/refresh_signatures.py reads from a wheel.
"""

import ast
import inspect
import json
import re
from operator import attrgetter

import pytest

from tests.files import ROOT
from tests.stand_ins.refresh_signatures import OPERATOR, RECORD, as_text, stand_in_names, trees, used_names

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
    parameters, empty = inspect.signature(attrgetter(name)(torch_npu)).parameters.values(), inspect.Parameter.empty
    assert DECLARED[name] == [
        {"name": one.name} | ({} if one.default is empty else {"default": one.default})
        | ({"keyword_only": True} if one.kind is one.KEYWORD_ONLY else {}) for one in parameters]


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
