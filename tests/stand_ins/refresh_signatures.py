"""Write torch_npu_signatures.json anew: what a wheel of torch_npu declares of the names that are used here.

    python -m pip download torch-npu==2.13.0 --no-deps --only-binary :all: --dest /tmp/wheels \\
        --platform manylinux_2_28_aarch64 --python-version 311
    python -m tests.stand_ins.refresh_signatures /tmp/wheels/torch_npu-2.13.0-*.whl

The wheel is read, never imported: it needs no NPU and no CANN.  Python functions are read from their source, operators
from the schemas in the shared libraries.  Names are those that mm and checkpoint use, those that the stand-in has, and
what torch_npu.npu makes public, which transfer_to_npu puts into torch.cuda.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.files import ROOT

RECORD = Path(__file__).with_name("torch_npu_signatures.json")
STAND_IN = Path(__file__).with_name("torch_npu")
LISTS = {  # of transfer_to_npu.py -> the object whose functions it names
    "torch_fn_white_list": "torch", "torch_tensor_fn_white_list": "torch.Tensor",
    "torch_module_fn_white_list": "torch.nn.Module", "torch_cuda_fn_white_list": "torch.cuda",
    "device_kwargs_list": "keyword arguments",
}  # fmt: skip
OPERATOR = re.compile(r"_?npu_\w+")
_QUOTED = re.compile(r"torch_npu[\w.:]*\Z")
_OF_A_KIND = re.compile(r"^getattr\(torch, [^()]*\)")
"""The kind of device is npu or cuda."""
_ATTRIBUTE = re.compile(r"(?:torch_npu(?:\(\))?|torch(?=\.npu\.))\.([\w.]+)")
_parsed = cache(ast.parse)


# What is used


def used_names() -> set[str]:
    """Dotted names below ``torch_npu`` that our packages use, such as "npu.set_device" and "npu_rms_norm"."""
    return {name for tree in trees("npu", "getattr").values() for name in names_in(tree)}


def trees(*words: str) -> dict[Path, ast.Module]:
    """The files of our packages that hold one of ``words``: to parse all of them takes seconds."""
    texts = {path: path.read_text(encoding="utf-8")
             for package in ("mm", "checkpoint") for path in sorted((ROOT / package).rglob("*.py"))}  # fmt: skip
    return {path: ast.parse(text) for path, text in texts.items() if any(word in text for word in words)}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Attributes of ``torch_npu``, of ``torch.npu`` and of ``getattr(torch, kind)``, operators, and quoted names."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _QUOTED.match(node.value):
            quoted = node.value.replace(":", ".").removeprefix("torch_npu").strip(".")
            yield from [quoted] if quoted else []
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            if found := _ATTRIBUTE.fullmatch(_OF_A_KIND.sub("torch.npu", ast.unparse(node))):
                yield found[1]
            elif OPERATOR.fullmatch(node.attr):
                yield node.attr


def stand_in_names() -> set[str]:
    """Public functions of the stand-in, as dotted names below ``torch_npu``."""
    files = {"": STAND_IN / "__init__.py", "npu.": STAND_IN / "npu.py"}
    return {prefix + node.name for prefix, path in files.items()
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef) and (prefix or OPERATOR.fullmatch(node.name))}  # fmt: skip


# What the wheel declares


class Wheel:
    """The files of a wheel of torch_npu."""

    def __init__(self, path: Path):
        self.name = path.name
        with zipfile.ZipFile(path) as archive:
            self._files = {name: archive.read(name) for name in archive.namelist() if name.endswith((".py", ".so"))}

    def constant(self, file: str, name: str) -> Any:
        """The literal that the file assigns to ``name``."""
        for node in _parsed(self._files[file]).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    return ast.literal_eval(value)
        raise SystemExit(f"{self.name}: {file} assigns no {name}")

    def declaration(self, name: str) -> list[dict[str, Any]] | str | None:
        """The signature of the dotted ``name`` below torch_npu, "module" or "class"; None where it is not defined."""
        if OPERATOR.fullmatch(name):
            return self._operator(name)
        if self._module(f"torch_npu.{name}"):
            return "module"
        owner, _, last = f"torch_npu.{name}".rpartition(".")
        node = self._definition(self._module(owner), last)
        return signature(node.args) if isinstance(node, ast.FunctionDef) else "class" if node else None

    def _operator(self, name: str) -> list[dict[str, Any]]:
        """From its schema in one of the shared libraries."""
        pattern = re.compile(rb"\0" + name.encode() + rb"\(([^\0]*)\) -> [^\0]*\0")
        schemas = {found.decode() for file, content in self._files.items() if file.endswith(".so")
                   for found in pattern.findall(content)}  # fmt: skip
        if len(schemas) != 1:
            raise SystemExit(f"{self.name} holds {len(schemas)} schemas of {name}, expected 1; the compiler may have "
                             f"cut the text into pieces: try the wheel of the other machine (aarch64, x86_64)")
        return schema_signature(schemas.pop())

    def _module(self, dotted: str) -> str | None:
        stem = dotted.replace(".", "/")
        return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if file in self._files), None)

    def _definition(self, file: str | None, name: str) -> ast.FunctionDef | ast.ClassDef | None:
        """Where ``file`` defines ``name``, or a file of the same folder that it imports from."""
        for node in _parsed(self._files[file]).body if file else ():
            match node:
                case ast.FunctionDef(name=found) | ast.ClassDef(name=found) if found == name:
                    return node
                case ast.ImportFrom(module=str(module), level=1) if {name, "*"} & {alias.name for alias in node.names}:
                    if there := self._definition(self._module(f"{file.rpartition('/')[0]}.{module}"), name):
                        return there
        return None


def signature(arguments: ast.arguments) -> list[dict[str, Any]]:
    """Each argument: its "name", its "default" where it has one, and "keyword_only" where it is."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    kinds = (({}, positional, defaults), ({"keyword_only": True}, arguments.kwonlyargs, arguments.kw_defaults))
    return [{"name": argument.arg} | ({} if default is None else {"default": ast.literal_eval(default)}) | options
            for options, *both in kinds for argument, default in zip(*both, strict=True)]


def schema_signature(schema: str) -> list[dict[str, Any]]:
    """``Tensor x, int dim=-1, *, bool sync=False``: Python's arguments behind their types."""
    arguments = ", ".join(part.split()[-1] for part in schema.split(", "))
    return signature(ast.parse(f"lambda {arguments}: 0", mode="eval").body.args)  # pyright: ignore


def record(wheel: Wheel) -> dict[str, Any]:
    """What stands in the JSON file."""
    public = wheel.constant("torch_npu/npu/__init__.py", "__all__")
    wanted = used_names() | stand_in_names()
    found = {name: wheel.declaration(name) for name in sorted({*wanted, *(f"npu.{name}" for name in public)})}
    if missing := [name for name in sorted(wanted) if found[name] is None]:
        raise SystemExit(f"{wheel.name} declares no torch_npu.{', torch_npu.'.join(missing)}")
    return {
        "wheel": wheel.name,
        "version": wheel.constant("torch_npu/version.py", "__version__"),
        "declarations": {name: declared for name, declared in found.items() if declared is not None},
        "torch_npu.npu.__all__": public,
        "transfer_to_npu": {what: wheel.constant("torch_npu/contrib/transfer_to_npu.py", name)
                            for name, what in LISTS.items()},
    }  # fmt: skip


def as_text(recorded: dict[str, Any]) -> str:
    """JSON with one line for each entry of each part."""
    parts = {}
    for name, part in recorded.items():
        parts[name] = json.dumps(part)
        if isinstance(part, dict):
            entries = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()]
            parts[name] = "{\n" + ",\n".join(entries) + "\n }"
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {text}" for name, text in parts.items()) + "\n}\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    RECORD.write_text(as_text(record(Wheel(Path(sys.argv[1])))), encoding="utf-8")
