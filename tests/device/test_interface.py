"""A device is its own file and a place in ``platforms.py``: nothing else asks which device it is."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from typing import get_args

import pytest

from mm.config.args import DeviceName
from mm.device import device as platforms
from mm.device.cpu import CPU
from mm.device.device import PLATFORMS, Device
from mm.device.kernels import Kernels
from mm.device.platform import AcceleratorRuntime, Platform, Runtime
from mm.errors import UserError
from tests.test_layering import our_imports, sources

OWN_FILES = frozenset(f"mm.device.{platform.name}" for platform in PLATFORMS)
WHERE_IT_IS_PICKED = "mm.device.device"
NAMES = frozenset(platform.name for platform in PLATFORMS)
ASKS_FOR_THE_KIND = re.compile(r"(.*\.)?device\.(platform\.name|kind|type)|(.*\.)?platform\.name")
"""What a comparison would look at, as source."""


def test_only_the_place_that_picks_imports_a_devices_file() -> None:
    importing = {source.name for source in sources().values() if our_imports(source) & OWN_FILES}
    assert importing == {WHERE_IT_IS_PICKED}


def test_nothing_else_branches_by_device() -> None:
    may = {*OWN_FILES, WHERE_IT_IS_PICKED}
    found = [f"{source.path}:{one}" for source in sources().values() if source.name not in may
             for one in branches_by_device(source.tree)]
    assert not found, "say it in the files of the devices, as a member of Platform"


def branches_by_device(tree: ast.AST) -> Iterator[str]:
    """Comparisons with a device's name or by a device's kind, cases of one, and tables by one."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                asks = any(names_one(one) or ASKS_FOR_THE_KIND.fullmatch(ast.unparse(one)) for one in operands)
            case ast.MatchValue(value=value):
                asks = names_one(value)
            case ast.Dict(keys=keys):
                asks = any(key is not None and names_one(key) for key in keys)
            case ast.Attribute():
                asks = node.attr in ("is_cuda", "is_npu", "is_cpu")
            case _:
                continue
        if asks:
            yield f"{getattr(node, 'lineno', '?')}: {ast.unparse(node)}"


def names_one(node: ast.expr) -> bool:
    """Whether it is the name of a device, or a collection with one."""
    elements = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return any(isinstance(one, ast.Constant) and one.value in NAMES for one in elements)


@pytest.mark.parametrize("source", [
    'x = kind == "npu"', 'x = "cuda" != name', 'x = name in ("cuda", "npu")', "x = self.device.platform.name == other",
    "x = tensor.device.type == other", "x = self.platform.name != other", "x = tensor.is_cuda", 'x = {"cpu": 1}[kind]',
    'match kind:\n    case "cuda": ...',
])  # fmt: skip
def test_a_branch_by_device_is_seen(source: str) -> None:
    assert list(branches_by_device(ast.parse(source)))


@pytest.mark.parametrize("source", [
    'x = part.kind == "image"', "x = self.kind is Kind.TRAINING", 'device = torch.device("cpu")',
    "x = device.platform.adam_obeys_scale", "match self.kind:\n    case Kind.TRAINING: ...",
])  # fmt: skip
def test_no_other_branch_is(source: str) -> None:
    assert not list(branches_by_device(ast.parse(source)))


def test_a_platform_states_every_fact() -> None:
    """A member with a default could be forgotten."""
    members = dataclasses.fields(Platform)
    assert [one.name for one in members if one.default is not dataclasses.MISSING
            or one.default_factory is not dataclasses.MISSING] == []


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda one: one.name)
def test_every_platform_gives_what_the_interface_asks_for(platform: Platform) -> None:
    for member in dataclasses.fields(Platform):
        value = getattr(platform, member.name)
        assert callable(value) is str(member.type).startswith("collections.abc.Callable"), member.name
    runtime = platform.runtime(0)
    asked = {name for name in vars(Runtime) if not name.startswith("_")}
    assert len(asked) > 10 and {name for name in asked if not hasattr(type(runtime), name)} == set()
    assert isinstance(platform.kernels(None), Kernels)
    assert all(isinstance(value, str) for value in platform.versions().values())
    assert list(platform.version_findings({})) == []


def test_the_command_line_offers_the_platforms() -> None:
    assert get_args(DeviceName) == ("auto", *(platform.name for platform in PLATFORMS))


def test_a_device_that_is_added_to_the_table_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name and, being first, by itself; one that cannot be used is passed over, or refused with its reason."""
    prepared: list[int] = []
    toy = dataclasses.replace(CPU, name="toy", backend="toys", prepare=prepared.append, max_message_ctas=3,
                              runtime=lambda index: AcceleratorRuntime("toy", index))  # fmt: skip
    broken = dataclasses.replace(toy, name="broken", fault=lambda: "it has no wheels; buy some")
    monkeypatch.setattr(platforms, "PLATFORMS", (broken, toy, *PLATFORMS))
    monkeypatch.setenv("LOCAL_RANK", "2")
    for wanted in ("toy", "auto"):
        device = Device.pick(wanted)
        assert (device.platform.name, device.platform.backend, device.index) == ("toy", "toys", 2)
    assert prepared == [2, 2]
    with pytest.raises(UserError, match="--device broken: it has no wheels; buy some"):
        Device.pick("broken")
    with pytest.raises(UserError, match="--device is 'tpu'; expected auto, broken, toy, npu, cuda or cpu"):
        Device.pick("tpu")
