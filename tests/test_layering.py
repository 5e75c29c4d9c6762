"""The layering of the source: who may import whom, who alone touches what, and how long things may get."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.files import ROOT

PACKAGES = ("mm", "checkpoint", "demo")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_HOUSE_LINES = 33_680
"""mm and checkpoint together, as ``git ls-files mm checkpoint | xargs cat | wc -l`` counts.  It goes down with them; a
change that needs more says why here: 11,500 when the floors were laid; 550 for MindSpeed-MM's loss, rules of pictures
and of cutting, old words and checkpoints, and for the keys of config.json that ask for another model; 1,400 for
accelerators: weight gradients added in fp32 and a loss without a tensor of the vocabulary's size (310), fused SwiGLU
and rope, selective recompute and moved rows (270), an update that the host reads once, deterministic runs and what a
run ran on (330), a dry run that counts activations and logits (320), an ffn that is wider in memory (125), and
Ascend's shims; 230 for virtual chunks: their order, messages and memory; 270 for sequence parallelism; 90 for the
simulated step; 210 for learning rates and weight decay by part and by pattern; 120 for what a rank says it does; 560
for the timeline, the picture and the timers of a step; 820 for context parallelism: shares, exchanges, a ring with
kernels of its own on each device, and its memory; 270 for freezing by layer and by pattern, exact in messages, memory
and FLOPs (190), and modules that are recomputed; 530 for a watchdog that ends all ranks with a report, and for messages
that both sides compare; 50 for the order of a step's microbatches; 200 for messages and inputs that come while a stage
computes; 100 for the one form of a sample inside; 600 for picture files of all kinds, bytes that the device makes
numbers of, reports on data, and samples that are left out; 3,700 for data: an index of every record with readers of all
forms and roots of media (1,600), videos in a process of their own with two rules of frames (950), packs and samplers by
cost (750), and what joins them; 1,000 for what users see of their data and of long work: validation samples in reports,
places of records, edits of media, interruptions, progress without a terminal, and pictures inside Parquet files; 800
for whose checkpoints and logs a run may write (ids of runs, locks), and for the schedule that a resumed run has; 300
for ranks that meet before their first group, whatever an earlier attempt has left, and a hub that outlives what comes
in wrong; 180 for data: the way of a record and the exchange of samples, drawn, the question of each room, one list of
samplers, and a step's message whose head has names."""

FLOORS = {
    "mm.errors": 0, "mm.files": 0, "mm.placement": 0, "mm.version": 0,
    "mm.ending": 1, "mm.progress": 1, "mm.report": 1,
    "mm.config": 1, "mm.device": 1,
    "mm.batch": 2, "mm.weights": 2,
    "mm.parallel": 3, "mm.formats": 3,
    "mm.model": 4, "mm.conversion": 4,
    "mm.data": 5,
    "mm.data_tool": 6, "mm.plan": 6, "mm.generation": 6, "mm.scoring": 6,
    "mm.training": 7,
    "mm.train": 8, "mm.generate": 8, "mm.evaluate": 8, "checkpoint": 8,
    "demo": 9,
}  # fmt: skip
"""Folders, and files beside them, with their floors.  Each imports only itself and lower floors: two of one floor are
neighbours that do not see each other."""

ROOMS = {
    "mm.data": {
        "mm.data.sample": 0, "mm.data.lengths": 0, "mm.data.record_name": 0, "mm.data.workers": 0,
        "mm.data.media": 1, "mm.data.read": 1, "mm.data.order": 1,
        "mm.data.encode": 2,
        "mm.data.index": 3,
        "mm.data.feed": 4,
    },
}  # fmt: skip
"""Folders that have rooms inside: the rooms with their floors, by the same rule.  A folder's own ``__init__`` imports
nothing."""

WITHOUT_PROCESSES = ("mm.errors", "mm.placement", "mm.config", "mm.batch", "mm.weights", "mm.formats",
                     "mm.conversion", "checkpoint", "mm.model.rope", "mm.model.positions", "mm.data.order",
                     "mm.data.read")  # fmt: skip
"""Mathematics, rules and files: neither megatron nor torch.distributed, so mm-convert and the tests of these run on any
machine."""

WITHOUT_TORCH = ("mm.errors", "mm.ending", "mm.placement", "mm.config")
"""What reads and checks settings, before torch is loaded."""

FILES = {"mm.formats", "mm.conversion", "checkpoint"}
"""What reads and writes weights, from the formats up to ``mm-convert``."""

FILES_MAY_IMPORT = FILES | {"mm.errors", "mm.files", "mm.placement", "mm.version", "mm.ending", "mm.progress",
                            "mm.config", "mm.weights"}
"""The other rooms below are about devices and batches, which files know nothing of."""

MAY_LIST_DEVICES = {"mm.config.flags"}
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

    def imports(self) -> Iterator[tuple[str, bool]]:
        """Every imported dotted name, and whether it is imported when the module is (not inside a function)."""
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
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _outside_functions(child)


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
    names = {name for name, top_level in source.imports() if top_level or not top_level_only}
    return {name for name in names if name in sources()} - {source.name}


def reachable(name: str) -> set[str]:
    """Our modules that are loaded when ``name`` is imported."""
    found, queue = set(), [name]
    while queue:
        for imported in our_imports(sources()[queue.pop()], top_level_only=True) - found:
            found.add(imported)
            queue.append(imported)
    return found


def each_source() -> list:
    return [pytest.param(source, id=name) for name, source in sources().items()]


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


@pytest.mark.parametrize("source", each_source())
def test_arrows_point_down(source: Source):
    if source.name == "mm":
        assert not our_imports(source)
        return
    own = room(source.name)
    for imported in rooms_of_imports(source) - {own}:
        assert FLOORS[imported] < FLOORS[own], f"{source.name} (floor {FLOORS[own]}) imports {imported}"


@pytest.mark.parametrize(("folder", "name"), [(folder, name) for folder in ROOMS for name in modules_inside(folder)])
def test_arrows_between_the_rooms_of_a_folder_point_down(folder: str, name: str):
    floors = ROOMS[folder]
    own = room(name, floors)
    for imported in our_imports(sources()[name]) & set(modules_inside(folder)):
        other = room(imported, floors)
        assert other == own or floors[other] < floors[own], f"{name} (floor {floors[own]}) imports {imported}"


@pytest.mark.parametrize("folder", ROOMS)
def test_a_folder_with_rooms_hands_nothing_on(folder: str):
    for name in {folder, *ROOMS[folder]}:
        if sources()[name].path.name == "__init__.py":
            assert not our_imports(sources()[name]), f"{name} imports; import from the module that has it"


@pytest.mark.parametrize("source", each_source())
def test_modules_that_texts_name_exist(source: Source):
    """Docstrings, messages, and what is imported or preloaded by its name."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for name in NAMED_MODULE.findall(node.value):
                assert _exists(name), f"{source.path}:{node.lineno} names {name}"


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


@pytest.mark.parametrize("source", each_source())
def test_weights_on_disk_know_no_device_and_no_batch(source: Source):
    if any(_is_under(source.name, folder) for folder in FILES):
        assert rooms_of_imports(source) <= FILES_MAY_IMPORT


def test_the_proof_of_export_uses_nothing_of_ours():
    assert our_imports(sources()["demo.evaluate"]) == set()


def modules_under(folders: tuple[str, ...]) -> list[str]:
    return [name for name in sources() if any(_is_under(name, folder) for folder in folders)]


def assert_never_loads(name: str, *packages: str) -> None:
    """Neither directly nor through another module of ours."""
    for loaded in {name} | reachable(name):
        for imported, _ in sources()[loaded].imports():
            for package in packages:
                assert not _is_under(imported, package), f"{name} loads {imported} through {loaded}"


@pytest.mark.parametrize("name", modules_under(WITHOUT_PROCESSES))
def test_some_need_no_processes(name: str):
    assert_never_loads(name, "torch.distributed", "megatron")


@pytest.mark.parametrize("name", modules_under(WITHOUT_TORCH))
def test_some_need_no_torch(name: str):
    assert_never_loads(name, "torch", "transformers", "safetensors")


@pytest.mark.parametrize("source", each_source())
def test_one_folder_knows_the_devices(source: Source):
    """No ``torch.cuda``, ``torch.npu``, ``torch_npu``, "cuda" or "npu" elsewhere; only the flags name the choices."""
    if _is_under(source.name, "mm.device"):
        return
    named = [name for name, _ in source.imports() if name.startswith(("torch.cuda", "torch.npu", "torch_npu"))]
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr="cuda" | "npu") | ast.Name("torch_npu"):
                named.append(f"{node.lineno}: {ast.unparse(node)}")
            case ast.Constant(str(text)) if source.name not in MAY_LIST_DEVICES and re.match("(cuda|npu)(:|$)", text):
                named.append(f"{node.lineno}: {text!r}")
    assert not named


@pytest.mark.parametrize("source", each_source())
def test_one_file_patches(source: Source):
    """No assignment to an attribute of an imported module, or to a class of one; no setattr on one; no sys.modules."""
    if source.name in MAY_PATCH:
        return
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


def each_python_file() -> list:
    folders = (*PACKAGES, "tests", "benchmarks")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


@pytest.mark.parametrize("path", each_python_file())
def test_files_and_functions_stay_short(path: Path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES, f"{path} has {text.count(chr(10))} lines; split it along a real seam"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = node.end_lineno - node.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {num_lines} lines"


def test_the_house_stays_small():
    files = [source.path for name, source in sources().items() if not _is_under(name, "demo")]
    num_lines = sum(path.read_bytes().count(b"\n") for path in files)
    assert num_lines <= MAX_HOUSE_LINES, f"mm and checkpoint have {num_lines} lines; the budget is {MAX_HOUSE_LINES}"


@pytest.mark.parametrize("source", each_source())
def test_every_module_says_what_it_is_for(source: Source):
    assert ast.get_docstring(source.tree) or not source.path.read_text(encoding="utf-8").strip()
