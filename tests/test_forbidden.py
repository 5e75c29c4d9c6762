"""What no module of the product does, because files and data come from other people."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.files import ROOT

SOURCES = [*sorted((ROOT / "mm").rglob("*.py")), *sorted((ROOT / "checkpoint").rglob("*.py")), *ROOT.glob("*_vlm.py")]
MODULES = {"marshal", "shelve", "dill", "tarfile", "http.server", "socketserver", "xmlrpc", "urllib.request",
           "requests"}
"""Which run code of files, extract archives, or serve or fetch over HTTP."""
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "extractall", "unpack_archive",
         "pickle.load", "pickle.loads", "torch.load", "add_safe_globals",
         "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def forbidden(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (one.name for one in names if one.name in MODULES)
            case ast.ImportFrom(module=str(module)) if module in MODULES:
                yield module
            case ast.Call(func=function, keywords=keywords):
                name = ast.unparse(function)
                given = {one.arg: ast.unparse(one.value) for one in keywords}
                if name == "torch.load" and given.get("weights_only") == "True":
                    continue
                if name in CALLS or name.rpartition(".")[2] in {"extractall", "unpack_archive"}:
                    yield name
                for one in keywords:
                    if one.arg in ("shell", "trust_remote_code") and not (
                            isinstance(one.value, ast.Constant) and one.value.value is False):
                        yield f"{name}({one.arg})"


@pytest.mark.parametrize("text", [
    "import tarfile", "from http.server import HTTPServer", "eval(x)", "archive.extractall(x)", "pickle.loads(x)",
    "torch.load(x)", "run(x, shell=True)", "AutoModel.from_pretrained(x, trust_remote_code=True)", "yaml.load(x)"])
def test_each_of_them_is_seen(text: str) -> None:
    assert len(list(forbidden(ast.parse(text)))) == 1


def test_nothing_runs_code_of_files_extracts_archives_or_talks_http() -> None:
    found = {str(path.relative_to(ROOT)): names for path in SOURCES
             if (names := sorted(set(forbidden(ast.parse(Path(path).read_text(encoding="utf-8"))))))}
    assert len(SOURCES) > 200 and found == {}
