"""The layering of the source: who may import whom, who alone touches what, and how long functions may get."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from tests.files import ROOT

PACKAGES = ("mm", "checkpoint", "demo")
MAX_FUNCTION_LINES = 60

FLOORS = {
    "mm.errors": 0, "mm.families": 0, "mm.files": 0, "mm.placement": 0, "mm.environment": 0,
    "mm.console": 1, "mm.report": 1, "mm.process": 1,
    "mm.config": 2, "mm.device": 2, "mm.lock": 2,
    "mm.batch": 3, "mm.weights": 3,
    "mm.parallel": 4, "mm.checkpoint": 4,
    "mm.model": 5, "mm.timeline": 5,
    "mm.data": 6,
    "mm.data_tool": 7, "mm.cost": 7, "mm.generation": 7, "mm.scoring": 7, "mm.page": 7,
    "mm.run": 8,
    "mm.launch": 9, "mm.recipe": 9, "mm.plan": 9, "mm.generate": 9, "mm.evaluate": 9, "checkpoint": 9,
    "mm.train": 10, "mm.doctor": 10,
    "demo": 11,
}  # fmt: skip
"""Folders, and files beside them, with their floors.  Each imports only itself and lower floors: two of one floor are
neighbours that do not see each other."""

ROOMS = {
    "mm.parallel": {
        "mm.parallel.activity": 0, "mm.parallel.context": 0, "mm.parallel.pipeline_schedule": 0,
        "mm.parallel.mesh": 1,
        "mm.parallel.agreement": 2, "mm.parallel.megatron": 2,
        "mm.parallel.zero": 3,
        "mm.parallel.pipeline": 4,
        "mm.parallel.health": 5,
    },
    "mm.data": {
        "mm.data.sample": 0, "mm.data.workers": 0, "mm.data.fork_server": 0,
        "mm.data.media": 1, "mm.data.records": 1, "mm.data.sampler": 1,
        "mm.data.encode": 2,
        "mm.data.index": 3,
        "mm.data.loader": 4,
    },
    "mm.run": {
        "mm.run.schedule": 0, "mm.run.resources": 0, "mm.run.stopping": 0,
        "mm.run.progress": 1, "mm.run.sources": 1,
        "mm.run.optim": 2,
        "mm.run.step": 3,
        "mm.run.checkpoint": 4,
        "mm.run.watch": 5,
        "mm.run.start": 6, "mm.run.preflight": 6, "mm.run.summary": 6,
        "mm.run.validation": 7,
        "mm.run.loop": 8,
    },
}  # fmt: skip
"""Folders that have rooms inside: the rooms with their floors, by the same rule.  A folder's own ``__init__`` imports
nothing."""

WITHOUT_PROCESSES = ("mm.errors", "mm.families", "mm.placement", "mm.config", "mm.batch", "mm.weights", "mm.checkpoint",
                     "checkpoint", "mm.model.qwen2_5_vl.positions", "mm.data.sampler", "mm.data.records")
"""Mathematics, rules and files: neither megatron nor torch.distributed, so mm-convert and the tests of these run on any
machine."""

BEFORE_THE_DEVICE = ("mm.train", "mm.run.preflight", "mm.run.resources", "mm.device", "mm.doctor.trial",
                     "mm.plan.commands", "mm.parallel.health", "mm.generate", "mm.evaluate", "mm.generation.setup")
"""What runs before a device is chosen: megatron looks at the device while it is imported."""

WITHOUT_TORCH = ("mm.errors", "mm.families", "mm.console", "mm.environment", "mm.process", "mm.placement",
                 "mm.config")
"""What reads and checks settings, before torch is loaded."""

FILES = {"mm.checkpoint", "checkpoint"}
"""What reads and writes weights, from the formats up to ``mm-convert``."""

FILES_MAY_IMPORT = FILES | {"mm.errors", "mm.families", "mm.files", "mm.placement", "mm.console", "mm.environment",
                            "mm.process", "mm.config", "mm.weights"}
"""The other rooms below are about devices and batches, which files know nothing of."""

KNOW_A_DEVICE = {"mm.device.cpu", "mm.device.cuda", "mm.device.npu"}
"""All others ask the ``Platform`` that one of these files fills in."""

MAY_LIST_DEVICES = {"mm.config.args"}
"""The choices of --device."""

MAY_PATCH = {"mm.device.shims"}

NAMED_MODULE = re.compile(r"(?<![\w./-])(?:mm|checkpoint)(?:\.\w+)+")
"""In a text."""


@dataclass(frozen=True)
class Source:
    """One module of ours."""

    name: str
    path: Path
    tree: ast.Module

    @cached_property
    def imports(self) -> tuple[tuple[str, bool], ...]:
        """Every imported dotted name, and whether it is imported when the module is (not inside a function)."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[tuple[str, bool]]:
        top_level = set(_outside_functions(self.tree))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node in top_level
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}:{node.lineno} imports relatively"
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node in top_level
                yield str(node.module), node in top_level


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not _is_for_types(child):
            yield from _outside_functions(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def sources() -> dict[str, Source]:
    """Our modules by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Source(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return found


def our_imports(source: Source, *, top_level_only: bool = False) -> set[str]:
    """Which of our modules ``source`` imports."""
    names = {name for name, top_level in source.imports if top_level or not top_level_only}
    return {name for name in names if name in sources()} - {source.name}


def reachable(name: str) -> set[str]:
    """Our modules that are loaded when ``name`` is imported."""
    found, queue = set(), [name]
    while queue:
        for imported in our_imports(sources()[queue.pop()], top_level_only=True) - found:
            found.add(imported)
            queue.append(imported)
    return found


def _is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room(name: str, floors: Mapping[str, int] = FLOORS) -> str:
    """The folder or file of ``floors`` that the module ``name`` belongs to."""
    found = [room for room in floors if _is_under(name, room)]
    assert found, f"{name} stands on no floor; add its folder to FLOORS or ROOMS"
    return max(found, key=len)


def modules_inside(folder: str) -> list[str]:
    """The modules of a folder, without its own ``__init__``."""
    return [name for name in sources() if name.startswith(folder + ".")]


def rooms_of_imports(source: Source) -> set[str]:
    return {room(name) for name in our_imports(source) if name != "mm"}


def test_the_sources_are_found():
    rooms = {room(name) for name in sources() if name != "mm"}
    assert rooms == set(FLOORS)
    for folder, floors in ROOMS.items():
        assert {room(name, floors) for name in modules_inside(folder)} == set(floors)


def test_no_import_cycles():
    for name in sources():
        assert name not in reachable(name), f"importing {name} leads back to it"


def test_arrows_point_down():
    assert not our_imports(sources()["mm"])
    wrong = [f"{name} (floor {FLOORS[room(name)]}) imports {imported}"
             for name, source in sources().items() if name != "mm"
             for imported in rooms_of_imports(source) - {room(name)} if FLOORS[imported] >= FLOORS[room(name)]]
    assert not wrong


@pytest.mark.parametrize("folder", ROOMS)
def test_arrows_between_the_rooms_of_a_folder_point_down(folder: str):
    floors, inside, wrong = ROOMS[folder], set(modules_inside(folder)), []
    for name in inside:
        own = room(name, floors)
        for imported in our_imports(sources()[name]) & inside:
            other = room(imported, floors)
            if other != own and floors[other] >= floors[own]:
                wrong.append(f"{name} (floor {floors[own]}) imports {imported}")
    assert not wrong


@pytest.mark.parametrize("folder", ROOMS)
def test_a_folder_with_rooms_hands_nothing_on(folder: str):
    for name in {folder, *ROOMS[folder]}:
        if sources()[name].path.name == "__init__.py":
            assert not our_imports(sources()[name]), f"{name} imports; import from the module that has it"


def test_modules_that_texts_name_exist():
    """Docstrings, messages, and what is imported or preloaded by its name."""
    wrong = [f"{source.path}:{node.lineno} names {name}"
             for source in sources().values() for node in ast.walk(source.tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str)
             for name in NAMED_MODULE.findall(node.value) if not _exists(name)]
    assert not wrong


def _exists(name: str) -> bool:
    """Whether ``name`` is a module or folder of ours, or something that a module of ours defines."""
    module, _, rest = name.rpartition(".")
    if name in sources():
        return True
    if module not in sources():
        return bool(module) and _exists(module)
    return any(rest in _defined(node) for node in sources()[module].tree.body)


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module makes."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Assign(targets=targets):
            return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def test_weights_on_disk_know_no_device_and_no_batch():
    for name in modules_under(tuple(FILES)):
        assert rooms_of_imports(sources()[name]) <= FILES_MAY_IMPORT, name


def test_the_proof_of_export_uses_nothing_of_ours():
    assert our_imports(sources()["demo.evaluate"]) == set()


def modules_under(folders: tuple[str, ...]) -> list[str]:
    assert all(any(_is_under(name, folder) for name in sources()) for folder in folders)
    return [name for name in sources() if any(_is_under(name, folder) for folder in folders)]


def assert_never_loads(name: str, *packages: str, in_functions: bool = True) -> None:
    """Neither directly nor through another module of ours; ``in_functions``: nor in a function of these modules."""
    for loaded in {name} | reachable(name):
        for imported, is_top_level in sources()[loaded].imports:
            for package in packages if in_functions or is_top_level else ():
                assert not _is_under(imported, package), f"{name} loads {imported} through {loaded}"


def test_some_need_no_processes():
    for name in modules_under(WITHOUT_PROCESSES):
        assert_never_loads(name, "torch.distributed", "megatron")


def test_megatron_is_imported_after_the_device_is_chosen():
    for name in modules_under(BEFORE_THE_DEVICE):
        assert_never_loads(name, "megatron", in_functions=False)


def test_some_need_no_torch():
    for name in modules_under(WITHOUT_TORCH):
        assert_never_loads(name, "torch", "transformers", "safetensors")


def test_each_device_is_known_to_its_own_file():
    """No ``torch.cuda``, ``torch.npu``, ``torch_npu``, "cuda" or "npu" elsewhere; only the flags name the choices."""
    named = []
    for source in sources().values():
        if source.name not in KNOW_A_DEVICE:
            named += [f"{source.path}: {one}" for one in _devices_named(source)]
    assert not named


def _devices_named(source: Source) -> Iterator[str]:
    yield from (name for name, _ in source.imports if name.startswith(("torch.cuda", "torch.npu", "torch_npu")))
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr="cuda" | "npu") | ast.Name("torch_npu"):
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Constant(str(text)) if source.name not in MAY_LIST_DEVICES and re.match("(cuda|npu)(:|$)", text):
                yield f"{node.lineno}: {text!r}"


def test_one_file_patches():
    """No assignment to an attribute of an imported module, or to a class of one; no setattr on one; no sys.modules."""
    for source in sources().values():
        if source.name not in MAY_PATCH:
            _check_patches_nothing(source)


def _check_patches_nothing(source: Source) -> None:
    foreign = _imported_names(source)
    for node in ast.walk(source.tree):
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Delete) else [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            targets = [ast.Attribute(value=node.args[0], attr="")]
        for target in targets:
            where = f"{source.path}:{node.lineno} patches {ast.unparse(target)}"
            if isinstance(target, ast.Attribute):
                assert _base_name(target.value) not in foreign, where
            if isinstance(target, ast.Subscript):
                assert ast.unparse(target.value) != "sys.modules", where


def _imported_names(source: Source) -> set[str]:
    """Names that stand for something imported at the top of the module."""
    names = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def _base_name(node: ast.AST) -> str | None:
    """``a`` of ``a.b.c``; None when the expression does not start with a name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_nothing_but_a_command_leads_from_tests_to_benchmarks():
    """Tests run benchmarks as commands, and what both need lives with the tests; what is shipped needs neither."""
    folders = (*PACKAGES, "tests")
    wrong = [f"{path.relative_to(ROOT)} imports {name}"
             for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))
             for name, _ in Source(path.stem, path, ast.parse(path.read_text(encoding="utf-8"))).imports
             if _is_under(name, "benchmarks") or (_is_under(name, "tests") and folder != "tests")]
    assert not wrong


def test_functions_stay_short():
    folders = (*PACKAGES, "tests", "benchmarks")
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        _check_short(path)


def _check_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = node.end_lineno - node.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {num_lines} lines"


def test_every_module_says_what_it_is_for():
    silent = [source.name for source in sources().values()
              if not ast.get_docstring(source.tree) and source.path.read_text(encoding="utf-8").strip()]
    assert not silent
