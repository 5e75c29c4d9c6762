"""The Dockerfiles, as far as a machine without a Docker daemon can check them.

The steps of the CPU's run here, in an empty environment beside a copy of the build context.  The other two differ in
lines that the installation pages have, and were never built: no base image can be fetched here.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mm.environment import VERSION
from tests.bare import bare_environment, bare_variables, copied_source
from tests.files import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def steps(path: Path) -> list[tuple[str, str]]:
    """Instruction and argument of each line."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_every_line_is_an_instruction_and_the_comment_builds_this_file(path: Path) -> None:
    found = steps(path)
    assert {word for word, _ in found} <= {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN"}
    assert [rest for word, rest in found if word in ("FROM", "WORKDIR", "COPY")] == ["${BASE}", "/workspace", ". ."]
    (build,) = re.findall("^#     (docker build .*)$", path.read_text(), re.MULTILINE)
    words = shlex.split(build)
    assert words[words.index("--file") + 1] == str(path.relative_to(ROOT)) and words[-1] == "."
    has_default = ("ARG", "BASE") not in found
    assert ("--build-arg" in words) is not has_default, "a base without default is given on the command line"


def test_nothing_that_is_tracked_is_left_out_of_the_image() -> None:
    ignored = set((ROOT / ".gitignore").read_text().split())
    for pattern in (ROOT / ".dockerignore").read_text().split():
        name = pattern.removeprefix("**/")
        assert pattern == ".git" or {name, f"{name}/"} & ignored, pattern


@pytest.mark.parametrize(("name", "page"), [
    ("cpu", "install.md"), ("cuda", "install.md"), ("ascend", "ascend.md")])
def test_the_lines_are_those_of_the_page(name: str, page: str) -> None:
    """But for the interpreter, --editable, and the version, which is an argument on Ascend."""
    found = steps(ROOT / "docker" / f"{name}.Dockerfile")
    arguments = dict(rest.split("=", 1) for word, rest in found if word == "ARG" and "=" in rest)
    text = (ROOT / "docs" / page).read_text()
    lines = [rest for word, rest in found if word == "RUN" and "pip install" in rest]
    assert lines
    for line in lines:
        line = line.replace("${TORCH}", arguments.get("TORCH", "")).replace("python3 ", ".venv/bin/python ")
        assert {line, line.replace("--editable ", "")} & set(text.splitlines()), line


def test_the_steps_of_the_cpus_run_in_an_empty_environment(tmp_path: Path) -> None:
    """With the packages of this environment at hand, so pip fetches none."""
    context, environment = copied_source(tmp_path / "workspace"), bare_environment(tmp_path / "env")
    variables = bare_variables() | {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0 means without
    output = ""
    for word, rest in steps(ROOT / "docker/cpu.Dockerfile"):
        if word == "RUN":
            done = subprocess.run(["sh", "-c", rest], cwd=context, env=variables, text=True, capture_output=True,
                                  check=False)
            assert done.returncode == 0, f"{rest}\n{done.stdout}{done.stderr}"
            output = done.stdout
    assert VERSION in output
