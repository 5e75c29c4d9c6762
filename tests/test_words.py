"""One word, one meaning: class names are unique, and the README's terms name nothing else."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from tests.files import ROOT

PACKAGES = ("mm", "checkpoint")
PLACES = {
    "stage": ("mm",),
    "chunk": ("mm.config", "mm.formats", "mm.generation", "mm.model", "mm.parallel", "mm.placement", "mm.plan",
              "mm.planner", "mm.timeline", "mm.training", "checkpoint.options"),
    "slot": ("mm.data.order.cost", "mm.formats.mindspeed", "mm.model", "mm.parallel", "mm.placement", "mm.plan",
             "mm.planner"),
    "part": ("mm.config", "mm.formats.hf_config", "mm.plan", "mm.training.schedule", "mm.weights"),
    "cut": ("mm.model", "mm.parallel", "mm.weights", "checkpoint.causes"),
    "run": ("mm", "checkpoint"),
    "view": ("mm.conversion", "mm.formats", "mm.weights", "checkpoint"),
    "source": ("mm.conversion", "mm.formats", "mm.generation.source", "mm.model.load", "mm.training", "mm.weights",
               "checkpoint"),
}  # fmt: skip
"""Terms of the README -> the only modules and folders whose names may contain them.  "run" is also a verb and may stand
anywhere; values called so have a test of their own."""

WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


@cache
def trees() -> dict[str, ast.Module]:
    """Module -> its parsed source."""
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text()) for path in files}


def defined(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """All names that a module gives: to classes, functions, parameters, fields and variables."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name, node
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node


def words(name: str) -> set[str]:
    """The words of a name, in lower case and without a plural s."""
    return {word.lower().removesuffix("s") for word in WORDS.findall(name)}


def test_no_class_or_type_has_the_name_of_another() -> None:
    found = defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(module)
            elif isinstance(node, ast.Assign) and not _is_type_variable(node.value):
                for name in (one.id for one in node.targets if isinstance(one, ast.Name) and _is_type_name(one.id)):
                    found[name.lstrip("_")].append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def _is_type_name(name: str) -> bool:
    return bool(re.fullmatch(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name))


def _is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")


def test_no_text_begins_with_of() -> None:
    """Docstrings, also those of fields and constants: they begin with the thing itself."""
    files = (path for folder in (*PACKAGES, "demo", "tests", "benchmarks")
             for path in sorted((ROOT / folder).rglob("*.py")))
    found = [f"{path}:{node.lineno}" for path in files for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
             and isinstance(node.value.value, str) and node.value.value.lstrip().startswith("Of ")]
    assert found == []


def test_the_readmes_terms_are_these() -> None:
    table = (ROOT / "README.md").read_text().partition("| term | meaning |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| (\w+) \|", table, flags=re.MULTILINE)) == sorted(PLACES)


def test_a_term_of_the_readme_names_nothing_else() -> None:
    elsewhere = [
        f"{module}: {name}"
        for module, tree in trees().items()
        for name, _ in defined(tree)
        for word in words(name) & PLACES.keys()
        if not any(f"{module}.".startswith(f"{place}.") for place in PLACES[word])
    ]
    assert elsewhere == []


def test_a_value_called_run_is_the_settings_of_a_run() -> None:
    others = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in trees().items()
        for name, node in defined(tree)
        if name in ("run", "_run") and isinstance(node, ast.arg) and node.annotation is not None
        and ast.unparse(node.annotation).strip("'\"") not in ("Run", "Run | None")
    ]
    assert others == []
