"""Whether the packages of this environment are those that the trainer needs, and none hides another.

Reads only metadata, because a broken package may be impossible to import.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.requirements import DISTRIBUTION, declared, declared_names, installed, is_outside
from mm.version import VERSION

_ROOT = Path(__file__).resolve().parent.parent.parent
"""The folder that holds the package ``mm``."""
_ADAPTOR = "mindspeed.megatron_adaptor"


def package_findings() -> Iterator[Diagnosis]:
    yield ok("python", f"{sys.version.split()[0]} in {sys.prefix}")
    yield from _versions()
    yield from _shadows()
    yield from _command()
    if _ADAPTOR in sys.modules:
        place = getattr(sys.modules.get("sitecustomize"), "__file__", None) or "sitecustomize.py"
        yield fault("mindspeed", f"{_ADAPTOR} is loaded in every Python here, and replaces parts of megatron",
                    f"remove its import from {place} or a .pth file of site-packages; MindSpeed may stay")
    if sys.flags.optimize:
        yield warning("python", "PYTHONOPTIMIZE or -O is set, which removes the program's own checks",
                      "unset PYTHONOPTIMIZE")


def _versions() -> Iterator[Diagnosis]:
    ours = installed(DISTRIBUTION)
    if ours is None:
        yield fault("package", f"{DISTRIBUTION} is not installed in this Python, so its requirements are not known",
                    f"{sys.executable} -m pip install --editable '{_ROOT}'")
        return
    if ours != VERSION:
        yield warning("package", f"the source is version {VERSION}, but {ours} is installed",
                      f"{sys.executable} -m pip install --editable '{_ROOT}'")
    if installed("packaging") is None:
        yield from _missing(declared_names(), "packaging, which compares versions, is missing")
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


def _missing(names: Sequence[str], why: str) -> Iterator[Diagnosis]:
    """Faults for those of ``names`` that are not installed, and a warning that versions were not compared."""
    for name in names:
        if installed(name) is None:
            yield fault(name, "not installed", f"{sys.executable} -m pip install '{name}'")
    yield warning("versions", f"not compared: {why}", "install it, and start mm-doctor again")


def _shadows() -> Iterator[Diagnosis]:
    """Other packages of our names, such as MindSpeed-MM's ``checkpoint``."""
    spec = importlib.util.find_spec("checkpoint")
    places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or "built in"])
    others = [one for one in places if Path(one).resolve() != _ROOT / "checkpoint"]
    if others or not places:
        parents = " and ".join(str(Path(one).parent) for one in others) or "what hides it"
        yield fault("package checkpoint", f"`import checkpoint` finds {', '.join(others) or 'nothing'}, not "
                    f"{_ROOT / 'checkpoint'}", f"remove {parents} from PYTHONPATH, or use an environment of its own "
                    f"for this trainer, apart from MindSpeed-MM's")
    if Path.cwd() == _ROOT:
        return
    is_clone = Path(__file__).resolve().relative_to(_ROOT).exists()
    for name in ("mm", "checkpoint"):
        if is_clone and _content(Path(name)) != _content(_ROOT / name):
            yield warning(f"folder {name}", f"the current folder's {name} differs from the installed one in {_ROOT}: "
                          f"`python -m` and the scripts run the former, mm-train and the other commands the latter",
                          f"{sys.executable} -m pip install --editable '{Path.cwd()}', which makes them one")
        elif not is_clone and any(Path(name).glob("*.py")):
            yield fault(f"folder {name}", f"the current folder has its own {name}, which `python -m` would import",
                        "start from another folder")


def _content(package: Path) -> dict[Path, bytes]:
    return {path.relative_to(package): path.read_bytes() for path in package.rglob("*.py")}


def _command() -> Iterator[Diagnosis]:
    """Which ``mm-convert`` a shell starts: MindSpeed-MM has one, too."""
    owners = {one.dist.name for one in importlib.metadata.entry_points(group="console_scripts", name="mm-convert")
              if one.dist is not None}
    if others := sorted(owners - {DISTRIBUTION}):
        yield fault("mm-convert", f"{', '.join(others)} in this environment has a command of this name, too, and the "
                    f"one installed last replaces the other", "use an environment of its own for each")
    path, own = shutil.which("mm-convert"), Path(sysconfig.get_path("scripts")) / "mm-convert"
    if path is None or not own.exists() or os.path.samefile(path, own):
        return
    activate = own.parent / "activate"
    cure = f"source {activate}" if activate.exists() else f"export PATH={own.parent}:$PATH"
    yield warning("PATH", f"a shell starts {path}; this environment's is {own}", cure)
