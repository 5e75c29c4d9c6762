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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("torch_npu_signatures.json")
STAND_IN = Path(__file__).with_name("torch_npu")
PACKAGES = ("mm", "checkpoint")
LISTS = {  # of transfer_to_npu.py -> the object whose functions it names
    "torch_fn_white_list": "torch",
    "torch_tensor_fn_white_list": "torch.Tensor",
    "torch_module_fn_white_list": "torch.nn.Module",
    "torch_cuda_fn_white_list": "torch.cuda",
    "device_kwargs_list": "keyword arguments",
}
OPERATOR = re.compile(r"_?npu_\w+")
QUOTED = re.compile(r"torch_npu[\w.:]*\Z")

Signature = list[dict[str, Any]]
"""Each argument: its "name", its "default" where it has one, and "keyword_only" where it is."""


# What is used


def used_names() -> set[str]:
    """Dotted names below ``torch_npu`` that our packages use, such as "npu.set_device" and "npu_rms_norm"."""
    return {name for tree in trees("npu", "getattr").values() for name in names_in(tree)}


def trees(*words: str) -> dict[Path, ast.Module]:
    """The files of our packages that hold one of ``words``: to parse all of them takes seconds."""
    texts = {path: path.read_text(encoding="utf-8")
             for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}  # fmt: skip
    return {path: ast.parse(text) for path, text in texts.items() if any(word in text for word in words)}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Attributes of ``torch_npu``, of ``torch.npu`` and of ``getattr(torch, kind)``, operators, and quoted names."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and QUOTED.match(node.value):
            quoted = node.value.replace(":", ".").removeprefix("torch_npu").strip(".")
            yield from [quoted] if quoted else []
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            path = _attribute_path(node)
            if path.startswith("torch_npu."):
                yield path.removeprefix("torch_npu.")
            elif path.startswith("torch.npu."):
                yield path.removeprefix("torch.")
            elif OPERATOR.fullmatch(node.attr):
                yield node.attr


def _attribute_path(node: ast.expr) -> str:
    """``torch_npu().npu.is_available`` -> "torch_npu.npu.is_available"; "?" for what has no name."""
    match node:
        case ast.Attribute(value=value, attr=name):
            return f"{_attribute_path(value)}.{name}"
        case ast.Name(id=name) | ast.Call(func=ast.Name(id="torch_npu" as name), args=[]):
            return name
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="torch"), _]):
            return "torch.npu"  # the kind of device is npu or cuda
        case _:
            return "?"


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
        self.path = path
        self._archive = zipfile.ZipFile(path)
        self._names = set(self._archive.namelist())
        self._libraries = {name: self._archive.read(name) for name in self._names if name.endswith(".so")}
        self._trees: dict[str, ast.Module] = {}

    def constant(self, file: str, name: str) -> Any:
        """The literal that the file assigns to ``name``."""
        for node in self._tree(file).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    return ast.literal_eval(value)
        raise SystemExit(f"{self.path.name}: {file} assigns no {name}")

    def declaration(self, name: str) -> Signature | str | None:
        """The signature of the dotted ``name`` below torch_npu, "module" or "class"; None where it is not defined."""
        if "." not in name and OPERATOR.fullmatch(name):
            return self._operator(name)
        file = self._module_file(f"torch_npu/{name.replace('.', '/')}")
        if file:
            return "module"
        owner, _, last = name.rpartition(".")
        node = self._definition(self._module_file(f"torch_npu/{owner.replace('.', '/')}") or "", last)
        if node is None:
            return None
        return "class" if isinstance(node, ast.ClassDef) else python_signature(node.args)

    def _operator(self, name: str) -> Signature:
        """From its schema in one of the shared libraries."""
        pattern = re.compile(rb"\0(" + name.encode() + rb"\([^\0]*\) -> [^\0]*)\0")
        schemas = {found.decode() for library in self._libraries.values() for found in pattern.findall(library)}
        if len(schemas) != 1:
            raise SystemExit(
                f"{self.path.name} holds {len(schemas)} schemas of {name}, expected 1; the compiler may have cut the "
                f"text into pieces: try the wheel of the other machine (aarch64, x86_64)"
            )
        return schema_signature(schemas.pop())

    def _module_file(self, stem: str) -> str | None:
        return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if file in self._names), None)

    def _tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(self._archive.read(file))
        return self._trees[file]

    def _definition(self, file: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
        """Where ``file`` defines ``name``, or a file of the same folder that it imports from."""
        for node in self._tree(file).body if file in self._names else ():
            match node:
                case ast.FunctionDef(name=found) | ast.ClassDef(name=found) if found == name:
                    return node
                case ast.ImportFrom(module=str(module), level=1) if {name, "*"} & {alias.name for alias in node.names}:
                    source = self._module_file(f"{file.rpartition('/')[0]}/{module.replace('.', '/')}")
                    if source and (there := self._definition(source, name)):
                        return there
        return None


def python_signature(arguments: ast.arguments) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    return [
        {"name": argument.arg} | ({} if default is None else {"default": ast.literal_eval(default)}) | options
        for argument, default, options in (
            *((argument, default, {}) for argument, default in zip(positional, defaults, strict=True)),
            *((argument, default, {"keyword_only": True})
              for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)),
        )
    ]  # fmt: skip


def schema_signature(schema: str) -> Signature:
    """``op(Tensor x, int dim=-1, *, bool sync=False) -> Tensor``: a type, a name and perhaps a default each."""
    signature: Signature = []
    keyword_only = {}
    for part in schema[schema.index("(") + 1 : schema.rindex(") -> ")].split(", "):
        if part == "*":
            keyword_only = {"keyword_only": True}
            continue
        declared, _, default = part.partition("=")
        given = {"default": ast.literal_eval(default)} if default else {}
        signature.append({"name": declared.split()[-1]} | given | keyword_only)
    return signature


def record(wheel: Wheel) -> dict[str, Any]:
    """What stands in the JSON file."""
    transfer = "torch_npu/contrib/transfer_to_npu.py"
    public = wheel.constant("torch_npu/npu/__init__.py", "__all__")
    wanted = used_names() | stand_in_names()
    found = {name: wheel.declaration(name) for name in sorted({*wanted, *(f"npu.{name}" for name in public)})}
    if missing := [name for name in sorted(wanted) if found[name] is None]:
        raise SystemExit(f"{wheel.path.name} declares no torch_npu.{', torch_npu.'.join(missing)}")
    return {
        "wheel": wheel.path.name,
        "version": wheel.constant("torch_npu/version.py", "__version__"),
        "declarations": {name: declared for name, declared in found.items() if declared is not None},
        "torch_npu.npu.__all__": public,
        "transfer_to_npu": {what: wheel.constant(transfer, name) for name, what in LISTS.items()},
    }


def as_text(recorded: dict[str, Any]) -> str:
    """JSON with one line for each entry of each part."""
    parts = {}
    for name, part in recorded.items():
        parts[name] = json.dumps(part)
        if isinstance(part, dict):
            entries = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()]
            parts[name] = "{\n" + ",\n".join(entries) + "\n }"
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {text}" for name, text in parts.items()) + "\n}\n"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    RECORD.write_text(as_text(record(Wheel(Path(sys.argv[1])))), encoding="utf-8")


if __name__ == "__main__":
    main()
