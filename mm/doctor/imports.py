"""Whether the packages can be imported, and from where: another folder may come before them on Python's path.

``python -m mm.doctor.imports NAME ...`` is the other process in which they are imported, because an import can crash.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.errors import counted
from mm.files import json_value
from mm.requirements import declared_names, installed

MODULES = {"pillow": "PIL", "megatron-core": "megatron.core"}
"""What is imported for a package whose module has another name."""
TRIED_LATER = ("torch", "megatron-core")
"""They take seconds, and other checks import them; here they are only looked up."""
_SECONDS = 120.0


def start_imports() -> "subprocess.Popen[str]":
    """Import the installed packages as a program in the current folder would, in a process for ``import_findings``."""
    names = [name for name in declared_names() if installed(name) is not None]
    return subprocess.Popen([sys.executable, "-m", "mm.doctor.imports", *names], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def import_findings(process: "subprocess.Popen[str]") -> Iterator[Diagnosis]:
    try:
        output, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        errors += f"no end within {_SECONDS:.0f} s"
    rows = map(json_value, output.splitlines())
    results = {name: (module, problem, missing, place) for name, module, problem, missing, place in rows}
    good = list[str]()
    for name, (module, problem, missing, place) in results.items():
        version = installed(name)
        if problem is not None:
            again = f"{sys.executable} -m pip install " + (
                f"--force-reinstall --no-deps '{name}=={version}'" if missing is None else f"'{_package_of(missing)}'")
            yield fault(name, f"`import {module}` fails: {problem}", again if place is None else _away(module, place))
        elif place is not None:
            yield warning(name, f"`import {module}` finds {place}, not {name} {version}, which is installed",
                          _away(module, place))
        else:
            good.append(name)
    if process.returncode and (tail := errors.strip().splitlines()[-1:]):
        begun = next((name for name in declared_names() if installed(name) is not None and name not in results), "")
        yield fault(begun or "imports", f"the import ends Python with status {process.returncode}: {tail[0]}",
                    f"{sys.executable} -c 'import {module_of(begun)}' shows all of it; install the package again")
    yield ok("imports", counted(len(good), "package"))


def _away(module: str, place: str) -> str:
    """How to remove another package's ``module``, at ``place``, from Python's path."""
    entry = Path(place).parents[module.count(".")]
    return f"rename {place}, or start from another folder" if entry == Path.cwd() else (
        f"remove {entry} from PYTHONPATH")


def module_of(name: str) -> str:
    """What is imported for the package ``name``."""
    return MODULES.get(name, name.replace("-", "_"))


def _package_of(module: str) -> str:
    """The package that brings ``module``; it is not installed, so this is a guess if nothing of ours needs it."""
    return next((name for name in declared_names() if module_of(name) == module), module)


def main(names: Sequence[str]) -> None:
    """Print for each package, as JSON, its name, its module, and three values that may be None: why its import fails,
    which other module it lacks, and the place of a module that hides it."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a module prints while it is imported must not stand between the lines
    for name in names:
        module, problem, missing, place = module_of(name), None, None, None
        try:
            place = _stranger(name, module)
            if name not in TRIED_LATER:
                importlib.import_module(module)
        except BaseException as error:  # an import may raise anything, and it is reported
            problem = f"{type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError) and error.name is not None:
                other = error.name.partition(".")[0]
                missing = None if other == module.partition(".")[0] else other
        lines.write(json.dumps([name, module, problem, missing, place]) + "\n")


def _stranger(name: str, module: str) -> str | None:
    """Where ``module`` is, if that is not where the package ``name`` was installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    own = distribution(name)
    inside = Path(*module.split("."))
    places = [Path(str(own.locate_file(one))) for one in (inside / "__init__.py", inside.with_suffix(".py"))]
    if any(place.exists() and os.path.samefile(place, spec.origin) for place in places):
        return None
    if '"editable": true' in (own.read_text("direct_url.json") or ""):
        return None  # its files lie elsewhere
    origin = Path(spec.origin)
    return str(origin.parent if origin.name == "__init__.py" else origin)


if __name__ == "__main__":
    main(sys.argv[1:])
