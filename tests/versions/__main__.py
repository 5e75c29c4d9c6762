"""Tests each combination of versions in an environment of its own: quick tests, parity and the tiny training.

    make test-versions                     # all of them
    make test-versions ONLY="oldest"       # some of them

uv makes the environments in build/versions, with interpreters that it finds on PATH or can download, and keeps them
for the next call.  Each result is appended to tests/versions/records.jsonl at once; the tables of docs/install.md
are written from that file.  Exits with 1 if anything failed or could not run.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tests.files import ROOT
from tests.versions.combinations import COMBINATIONS, Combination
from tests.versions.render import KEPT, STEPS
from tests.versions.render import main as render

_PARITY_RANKS = 2
"""Most processes of a parity case: larger layouts take more minutes, and their parts are in these."""
_ASK_VERSIONS = """import importlib.metadata, json, platform
versions = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core", "transformers")}
print(json.dumps({"python": platform.python_version(), **versions}))"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("combinations", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--uv", default="uv", help="the program that makes environments (default: the one on PATH)")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "versions", help="default: build/versions")
    flags = parser.parse_args()
    known = {one.name: one for one in COMBINATIONS}
    if unknown := [name for name in flags.combinations if name not in known]:
        parser.error(f"no combination {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in flags.combinations] or COMBINATIONS
    results = [_tested(one, flags.steps, flags.uv, flags.directory.resolve() / one.name) for one in chosen]
    render()
    sys.exit(0 if all(results) else 1)


def _tested(combination: Combination, steps: Sequence[str], uv: str, folder: Path) -> bool:
    """Whether every step passed; each is recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "env" / "bin" / "python"
    print(f"{combination.name}: Python {combination.python}, {', '.join(combination.pins()[:3])}", flush=True)
    if not _installed(combination, uv, folder, python):
        return False
    asked = subprocess.run([python, "-c", _ASK_VERSIONS], stdout=subprocess.PIPE, text=True, check=True)
    passed = True
    for step in steps:
        begin = time.monotonic()
        is_passed = _ran(_command(step, python, folder), folder / f"{step}.log")
        record = {
            "combination": combination.name, "step": step, "passed": is_passed,
            "seconds": round(time.monotonic() - begin), "date": datetime.now().date().isoformat(),
            "versions": json.loads(asked.stdout),
        }  # fmt: skip
        with KEPT.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{combination.name}: {step} {'passed' if is_passed else f'failed, see {folder / step}.log'}", flush=True)
        passed &= is_passed
    return passed


def _installed(combination: Combination, uv: str, folder: Path, python: Path) -> bool:
    """Make the environment, or bring a kept one to the versions of today."""
    pins, log = folder / "pins.txt", folder / "install.log"
    pins.write_text("\n".join(combination.pins()) + "\n", encoding="utf-8")
    make = [uv, "venv", "--python", combination.python, str(python.parent.parent)]
    install = [uv, "pip", "install", "--python", str(python), "--constraint", str(pins), "--editable", f"{ROOT}[test]"]
    if (python.exists() or _ran(make, log)) and _ran(install, log):
        return True
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
    print(f"{combination.name}: not run, for its environment could not be made. The end of {log}:\n{tail}",
          file=sys.stderr, flush=True)
    return False


def _command(step: str, python: Path, folder: Path) -> list[str]:
    if step == "quick":
        return ["make", "quick", f"RUN={python}", "READY="]
    if step == "training":
        return [str(python), "-m", "demo.run", "--quick", "--directory", str(folder / "demo")]
    from tests.parallel.cases import CASES

    cases = [one.name for one in CASES if one.world_size <= _PARITY_RANKS]
    test = "tests/test_parity.py::test_layout_equals_transformers"
    return [str(python), "-m", "pytest", *(f"{test}[{name}]" for name in cases)]


def _ran(command: Sequence[str | Path], log: Path) -> bool:
    """Run ``command`` with its output in ``log``; whether it ended with 0."""
    with log.open("w", encoding="utf-8") as file:
        return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                              check=False).returncode == 0  # fmt: skip


if __name__ == "__main__":
    main()
