"""Whether the packages of this environment are those that the trainer needs, can be imported, and hide each other.

Versions are read from metadata alone, because a broken package may be impossible to import.
"""

import importlib
import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.environment import DISTRIBUTION, declared, declared_names, installed, is_outside, without_collection
from mm.errors import counted

_ROOT = Path(__file__).resolve().parent.parent.parent
"""The folder that holds the package ``mm``."""
_ADAPTOR = "mindspeed.megatron_adaptor"
_MODULES = {"pillow": "PIL", "megatron-core": "megatron.core"}
"""What is imported for a package whose module has another name."""
_TRIED_LATER = ("torch", "megatron-core")
"""Other checks import them, and megatron only once a device is chosen; here they are only looked up."""


def package_findings() -> Iterator[Diagnosis]:
    yield ok("python", f"{sys.version.split()[0]} in {sys.prefix}")
    if sys.flags.optimize:
        yield warning("python", "PYTHONOPTIMIZE or -O is set, which removes the program's own checks",
                      "unset PYTHONOPTIMIZE")
    yield from _versions()
    yield from _imports()
    yield from _mindspeed()


def _versions() -> Iterator[Diagnosis]:
    if installed(DISTRIBUTION) is None:
        yield fault("package", f"{DISTRIBUTION} is not installed in this Python, so its requirements are not known",
                    f"{sys.executable} -m pip install --editable '{_ROOT}'")
        return
    if installed("packaging") is None:  # which compares versions
        for name in declared_names():
            if installed(name) is None:
                yield fault(name, "not installed", f"{sys.executable} -m pip install '{name}'")
        return
    found = list[str]()
    for requirement in declared():
        version, name = installed(requirement.name), requirement.name
        install = f"{sys.executable} -m pip install '{name}{requirement.specifier}'"
        if version is None:
            yield fault(name, "not installed", install)
        elif is_outside(requirement, version):
            yield warning(name, f"{version} is outside the tested range, {requirement.specifier}", install)
        else:
            found.append(f"{name} {version}")
    yield ok("versions", ", ".join(found))


def _imports() -> Iterator[Diagnosis]:
    """Import the installed packages, as a program in the current folder would."""
    names, num_good = [name for name in declared_names() if installed(name) is not None], 0
    for name in names:
        module = _MODULES.get(name, name.replace("-", "_"))
        try:
            place = _hiding(name, module)
            if name not in _TRIED_LATER:
                with without_collection():
                    importlib.import_module(module)
        except Exception as error:  # an import may raise anything, and it is reported
            yield fault(name, f"`import {module}` fails: {type(error).__name__}: {error}",
                        f"{sys.executable} -m pip install --force-reinstall --no-deps '{name}=={installed(name)}', "
                        f"and what the message names")
            continue
        if place is None:
            num_good += 1
        else:
            yield warning(name, f"`import {module}` finds {place}, not {name} {installed(name)}, which is installed",
                          f"remove {place.parents[module.count('.')]} from PYTHONPATH, or start from another folder")
    yield ok("imports", counted(num_good, "package"))


def _hiding(name: str, module: str) -> Path | None:
    """Where ``module`` is, if that is not where the package ``name`` was installed."""
    spec, own = importlib.util.find_spec(module), distribution(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    origin = Path(spec.origin)
    is_editable = '"editable": true' in (own.read_text("direct_url.json") or "")
    if is_editable or origin.is_relative_to(str(own.locate_file(""))):
        return None
    return origin.parent if origin.name == "__init__.py" else origin


def _mindspeed() -> Iterator[Diagnosis]:
    """MindSpeed-MM has a package and a command of our names, and MindSpeed patches megatron."""
    spec = importlib.util.find_spec("checkpoint")
    places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or "built in"])
    if others := [one for one in places if Path(one).resolve() != _ROOT / "checkpoint"]:
        yield fault("package checkpoint", f"`import checkpoint` finds {', '.join(others)}, not {_ROOT / 'checkpoint'}",
                    f"remove {' and '.join(str(Path(one).parent) for one in others)} from PYTHONPATH, or use an "
                    f"environment of its own for this trainer, apart from MindSpeed-MM's")
    path, own = shutil.which("mm-convert"), Path(sysconfig.get_path("scripts")) / "mm-convert"
    if path is not None and own.exists() and not own.samefile(path):
        yield warning("PATH", f"a shell starts {path}; this environment's is {own}", f"export PATH={own.parent}:$PATH")
    if _ADAPTOR in sys.modules:
        place = getattr(sys.modules.get("sitecustomize"), "__file__", None) or "sitecustomize.py"
        yield fault("mindspeed", f"{_ADAPTOR} is loaded in every Python here, and replaces parts of megatron",
                    f"remove its import from {place} or a .pth file of site-packages; MindSpeed may stay")
