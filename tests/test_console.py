"""The completion scripts in a real bash and zsh: what TAB offers, without starting the command; and each help."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest

from mm.config.evaluate import EVALUATE
from mm.config.generate import GENERATE
from mm.config.schema import fields_of
from mm.console import COMPLETION, NEEDED, SHELLS, STATUSES
from tests.files import ROOT

COMMANDS = {name: import_module(module).main for name, module in re.findall(
    r'"(mm-\w+) = ([\w.]+):main"', (ROOT / "setup.py").read_text(encoding="utf-8"))}
"""The console scripts of setup.py."""
ZSH = shutil.which("zsh")
needs_zsh = pytest.mark.skipif(ZSH is None, reason="no zsh is installed to complete in; on Debian: apt install zsh")
_TAB = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Calls the completion function as bash does at TAB, with the words of the command line."""
_TYPE = """
zmodload zsh/zpty
zpty shell env -i PATH=/usr/bin:/bin TERM=dumb HOME=$PWD zsh -f -i
zpty -w shell "source session.zsh"
for line; do
    zpty -w shell "$line"
    zpty -r shell shown $'*\\ngiven: *.\\r\\n*'
    print -r -- "$shown"
    print "next line"
done
"""
"""Types each line into an interactive zsh, and waits for what its command prints."""

TABS: list[tuple[str, list[str]]] = [
    ("mm-train --context-parallel-a", ["--context-parallel-algo"]),
    ("mm-train --mm-model model.json --device c", ["cuda", "cpu"]),
    ("mm-train --context-parallel-algo=u", ["ulysses_cp_algo"]),
    ("mm-train --mm-model m", []),
    ("mm-train --lora-apply-modules", []),
    ("mm-plan pre", ["predict"]),
    ("mm-plan --network", ["--network-gbit"]),
    ("mm-plan --context-parallel-s", ["--context-parallel-size"]),
    ("mm-plan predict --cal", ["--calibration"]),
    ("mm-plan predict --context-parallel-s", []),
    ("mm-plan predict --calibration c.json -- --context-parallel-s", ["--context-parallel-size"]),
    ("mm-plan predict --calibration c.json -- --device n", ["npu"]),
    ("mm-data sh", ["show"]),
    ("mm-data show --split v", ["validation"]),
    ("mm-data index --mm-m", ["--mm-model"]),
    ("mm-doctor --device n", ["npu"]),
    ("mm-generate --pro", ["--prompt", "--prompts"]),
    ("mm-generate --save", []),
    ("mm-evaluate --benchmark d", ["docvqa"]),
    ("mm-convert Q", ["Qwen2_5_VLConverter"]),
    ("mm-convert Qwen2_5_VLConverter lora_", ["lora_hf_to_mm", "lora_mm_to_hf"]),
    ("mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.hf_config.h", ["--cfg.hf_config.hf_dir"]),
    ("mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.save_format t", ["torch"]),
    ("mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.overwrite ", ["true", "false"]),
    ("mm-convert Qwen2_5_VLConverter verify --cfg.hf_config.hf_", ["--cfg.hf_config.hf_dir"]),
    ("mm-convert --print-completion z", ["zsh"]),
    ("mm-page --ht", ["--html"]),
]
"""A line, and the words that are offered for its last one; where there are none, the shell offers files."""


def _run(command: Callable[..., int], *words: str) -> None:
    try:
        assert command(list(words)) == 0
    except SystemExit as left:
        assert left.code in (0, None)


def printed_by(name: str, *words: str) -> str:
    """What a command prints with these words, which start no work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream := StringIO())
        _run(COMMANDS[name], *words)
    return stream.getvalue()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """The scripts of all commands in a folder, as the commands print them: NAME for bash, NAME.zsh for zsh."""
    folder = tmp_path_factory.mktemp("completion")
    for name in COMMANDS:
        for shell, file in zip(SHELLS, (name, f"{name}.zsh"), strict=True):
            (folder / file).write_text(printed_by(name, COMPLETION, shell))
    return folder


def tab(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    done = subprocess.run(["bash", "-c", _TAB, "bash", str(script), script.name, *words], capture_output=True,
                          text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_a_script_for_each_shell(name: str, scripts: Path) -> None:
    """It ends with the line that makes the shell use it for this command."""
    ends = [(scripts / file).read_text().splitlines()[-1] for file in (name, f"{name}.zsh")]
    assert ends[0].startswith("complete -o default ") and ends[1].startswith("compdef ")
    assert all(end.endswith(f" {name}") for end in ends)


@pytest.mark.parametrize(("words", "offered"), TABS)
def test_tab_offers_flags_and_words(scripts: Path, words: str, offered: list[str]) -> None:
    """A value after "=" arrives as words of its own, because bash breaks words there."""
    name, *rest = words.replace("=", " = ").split(" ")
    assert tab(scripts / name, *rest) == offered


def test_bash_offers_files_where_no_words_are_known(scripts: Path, tmp_path: Path) -> None:
    """A real TAB: readline completes the path of the only file."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").touch()
    lines = f"source {scripts / 'mm-train'}\nmm-train() {{ echo \"given: $2\"; }}\n"
    lines += "mm-train --mm-model weig\tcon\t\nexit\n"
    done = subprocess.run(["bash", "--norc", "-i"], input=lines, cwd=tmp_path, capture_output=True, text=True,
                          check=False, env={"PATH": "/usr/bin:/bin", "TERM": "dumb", "INPUTRC": "/dev/null"})
    assert "given: weights/config.json" in done.stdout


def typed_in_zsh(folder: Path, source: Sequence[Path], lines: Sequence[str]) -> list[str]:
    """What an interactive zsh in ``folder`` shows for each line that is typed; commands only print their words."""
    stubs = [f'{name}() {{ print -r -- "given: $*." }}' for name in COMMANDS]
    session = ["unsetopt auto_menu", *(f"source {path}" for path in source), *stubs]
    (folder / "session.zsh").write_text("\n".join(session))
    done = subprocess.run([str(ZSH), "-f", "-c", _TYPE, "zsh", *lines], cwd=folder, capture_output=True, text=True,
                          check=True, timeout=120)
    return done.stdout.split("\nnext line\n")[:-1]


@needs_zsh
def test_zsh_offers_the_same(scripts: Path, tmp_path: Path) -> None:
    """A real TAB, after which the line is entered; a second one lists several words.  Elsewhere come files."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").touch()
    files = ["mm-train --mm-model weig\tcon", "mm-train --mm-model=weig\tcon", "mm-page weig\tcon"]
    tabs = [one for one in TABS if one[1]]
    lines = [line + "\t" * min(len(offered), 2) for line, offered in tabs] + [f"{line}\t" for line in files]
    shown = typed_in_zsh(tmp_path, [scripts / f"{name}.zsh" for name in COMMANDS], lines)
    for (line, offered), found in zip(tabs, shown, strict=False):
        if len(offered) == 1:
            whole = re.sub(r"[^ =]*$", offered[0], line, count=1).partition(" ")[2]
            assert f"\ngiven: {whole}." in found
        else:
            assert set(offered) <= set(found.split()), found
    assert [re.findall(r"\ngiven: (.*)\.", found)[-1] for found in shown[len(tabs) :]] == [
        "--mm-model weights/config.json", "--mm-model=weights/config.json", "weights/config.json"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_the_exit_statuses(name: str) -> None:
    printed = " ".join(printed_by(name, "--help").split())
    assert printed.endswith(" ".join(STATUSES.split()))
    assert COMPLETION in printed


@pytest.mark.parametrize("words", [
    "mm-data check", "mm-data show", "mm-data index", "mm-data mock", "mm-plan calibrate", "mm-plan predict",
    "mm-plan compare", "mm-plan lists",
])
def test_the_help_of_a_command_ends_with_them_too(words: str) -> None:
    printed = " ".join(printed_by(*words.split(), "--help").split())
    assert printed.endswith(" ".join(STATUSES.split()))


@pytest.mark.parametrize(("words", "first"), [
    ("mm-data check", ["--mm-data", "--mm-model", "--seq-length"]),
    ("mm-data show", ["--mm-data", "--mm-model", "--seq-length"]),
    ("mm-data mock", ["--output"]),
])
def test_the_flags_that_a_command_needs_stand_first(words: str, first: list[str]) -> None:
    printed = printed_by(*words.split(), "--help")
    needed, *others = printed[printed.index(NEEDED) : printed.rindex("\n\n")].split("\n\n")
    assert re.findall(r"^  (--[\w-]+)", needed, re.MULTILINE) == first
    assert all(re.fullmatch(r"[A-Z][\w ,]+:", group.splitlines()[0]) for group in others), "they have titles"


def test_the_help_of_the_doctor_is_in_groups() -> None:
    """Beside --help and the like, no flag is without one."""
    printed = printed_by("mm-doctor", "--help")
    titles = re.findall(r"^(\S.*):$", printed, re.MULTILINE)
    assert titles == ["options", "What is examined", "The trial: ranks that compute and talk to each other",
                      "Several nodes"]
    options = printed[printed.index("options:") : printed.index("What is examined:")]
    assert re.findall(r"^  (?:-h, )?(--[\w-]+)", options, re.MULTILINE) == ["--help", "--version", COMPLETION]


@pytest.mark.parametrize("line", [GENERATE, EVALUATE], ids=["generate", "evaluate"])
def test_the_help_of_questions_is_in_groups_too(line) -> None:
    fields = list(fields_of(line.cls))
    assert len(line.first) == 10 and set(line.first) | set(line.groups) <= set(fields)
    assert fields[0] in line.groups, "each flag has a group"
