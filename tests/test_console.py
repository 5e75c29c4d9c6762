"""The completion scripts in a real bash: what TAB offers, without starting the command; and the end of each help."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.cli import main as convert
from mm.config.evaluate import EVALUATE
from mm.config.generate import GENERATE
from mm.config.schema import fields_of
from mm.console import COMPLETION, STATUSES, Completed, completion_script
from mm.data_tool.cli import main as data
from mm.doctor.cli import main as doctor
from mm.evaluate import main as evaluate
from mm.generate import main as generate
from mm.planner.cli import main as plan
from mm.train import main as train

COMMANDS = {"mm-train": train, "mm-plan": plan, "mm-data": data, "mm-convert": convert, "mm-doctor": doctor,
            "mm-generate": generate, "mm-evaluate": evaluate}
_TAB = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Calls the completion function as bash does at TAB, with the words of the command line."""


def _run(command: Callable[..., int], *words: str) -> None:
    try:
        assert command(list(words)) == 0
    except SystemExit as left:
        assert left.code in (0, None)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """The scripts of all commands in a folder, as the commands print them."""
    folder = tmp_path_factory.mktemp("completion")
    for name, command in COMMANDS.items():
        with pytest.MonkeyPatch.context() as patch, (folder / name).open("w") as stream:
            patch.setattr(sys, "stdout", stream)
            _run(command, COMPLETION, "bash")
    return folder


def tab(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    done = subprocess.run(["bash", "-c", _TAB, "bash", str(script), script.name, *words], capture_output=True,
                          text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(("words", "offered"), [
    ("mm-train --context-parallel-a", ["--context-parallel-algo"]),
    ("mm-train --mm-model model.json --device c", ["cuda", "cpu"]),
    ("mm-train --context-parallel-algo=u", None),
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
    ("mm-data convert l", ["llava"]),
    ("mm-data convert llava --med", ["--media-folder"]),
    ("mm-doctor --device n", ["npu"]),
    ("mm-generate --pro", ["--prompt", "--prompts"]),
    ("mm-generate --save", []),
    ("mm-evaluate --benchmark d", ["docvqa"]),
    ("mm-convert Q", ["Qwen2_5_VLConverter"]),
    ("mm-convert Qwen2_5_VLConverter lora_", ["lora_hf_to_mm", "lora_mm_to_hf"]),
    ("mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.hf_config.h", ["--cfg.hf_config.hf_dir"]),
    ("mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.save_format t", ["torch"]),
    ("mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.overwrite ", ["true", "false"]),
    ("mm-convert --print-completion z", ["zsh"]),
])
def test_tab_offers_flags_and_words(scripts: Path, words: str, offered: list[str] | None) -> None:
    """A value after "=" arrives as words of its own, because bash breaks words there.  Nothing: bash offers files."""
    name, *rest = words.replace("=", " = ").split(" ")
    assert tab(scripts / name, *rest) == (["ulysses_cp_algo"] if offered is None else offered)


def test_bash_offers_files_where_no_words_are_known(scripts: Path, tmp_path: Path) -> None:
    """A real TAB: readline completes the path of the only file."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").touch()
    lines = f"source {scripts / 'mm-train'}\nmm-train() {{ echo \"given: $2\"; }}\n"
    lines += "mm-train --mm-model weig\tcon\t\nexit\n"
    done = subprocess.run(["bash", "--norc", "-i"], input=lines, cwd=tmp_path, capture_output=True, text=True,
                          check=False, env={"PATH": "/usr/bin:/bin", "TERM": "dumb", "INPUTRC": "/dev/null"})
    assert "given: weights/config.json" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_the_exit_statuses(name: str, capsys) -> None:
    _run(COMMANDS[name], "--help")
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith(" ".join(STATUSES.split()))
    assert COMPLETION in printed


@pytest.mark.parametrize("line", [GENERATE, EVALUATE], ids=["generate", "evaluate"])
def test_the_help_of_questions_is_in_groups_too(line) -> None:
    fields = list(fields_of(line.cls))
    assert len(line.first) == 10 and set(line.first) | set(line.groups) <= set(fields)
    assert fields[0] in line.groups, "each flag has a group"


def test_zsh_gets_the_same_function_and_what_it_needs_for_it() -> None:
    completed = Completed({"--a": ("x", "y")})
    bash, zsh = (completion_script(shell, "mm-a", completed).splitlines()[1:] for shell in ("bash", "zsh"))
    assert zsh == ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit", *bash]
