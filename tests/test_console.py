"""The completion scripts in a real bash and zsh, each command's help, and the progress of long work."""

import fcntl
import os
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest

from mm import console
from mm.console import COMPLETION, NEEDED, SHELLS, STATUSES, Progress, duration, ongoing
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


HELPS = [*COMMANDS, "mm-data check", "mm-data stats", "mm-data show", "mm-data index", "mm-data mock",
          "mm-plan calibrate", "mm-plan predict", "mm-plan compare",
         "mm-plan lists", "mm-convert Qwen2_5_VLConverter", "mm-convert Qwen2_5_VLConverter hf_to_mm",
         "mm-convert Qwen2_5_VLConverter diff"]  # fmt: skip


@pytest.mark.parametrize("words", HELPS)
def test_every_help_has_titled_groups_and_the_exit_statuses(words: str) -> None:
    printed = printed_by(*words.split(), "--help")
    assert " ".join(printed.split()).endswith(" ".join(STATUSES.split())) and COMPLETION in printed
    groups = [part for part in printed.split("\n\n") if "\n  " in part and not part.startswith("usage:")]
    assert groups and all(re.fullmatch(r"[A-Z][^\n]+:", group.splitlines()[0]) for group in groups)
    if NEEDED in printed:
        assert groups[0].startswith(NEEDED)


@pytest.mark.parametrize(("words", "first"), [
    ("mm-data check", ["--mm-data", "--mm-model", "--seq-length"]),
    ("mm-convert Qwen2_5_VLConverter merge_lora", ["--cfg.lora_dir", "--cfg.hf_config.hf_dir", "--cfg.save_hf_dir"]),
    ("mm-plan predict", ["--calibration"]),
])
def test_the_flags_that_a_command_needs_stand_first(words: str, first: list[str]) -> None:
    printed = printed_by(*words.split(), "--help")
    assert re.findall(r"^  (--[\w.-]+)", printed[: printed.index("\n\n", printed.index(NEEDED))], re.MULTILINE) == first


def test_help_and_completion_load_no_torch() -> None:
    """Each takes a fraction of a second."""
    code = """if True:
        import sys
        from importlib import import_module
        for module, word in (%s):
            try:
                import_module(module).main([*word.split()])
            except SystemExit:
                pass
        assert "torch" not in sys.modules and "transformers" not in sys.modules"""
    pairs = [(command.__module__, word) for command in COMMANDS.values() for word in ("--help", f"{COMPLETION} bash")]
    subprocess.run([sys.executable, "-c", code % repr(pairs)], check=True, capture_output=True, cwd=ROOT)


@pytest.mark.parametrize(("words", "what"), [
    ("mm-data chek", "'chek' is not a command of mm-data (did you mean 'check'?); expected one of check, index,"),
    ("mm-data show --mm-dat x", "--mm-dat is not a known flag (did you mean '--mm-data'?); see mm-data show --help"),
    ("mm-data show --part training", "--part is not available here: write --split"),
    ("mm-plan predict", "--calibration is missing: the file that mm-plan calibrate has written"),
    ("mm-doctor --num-proceses 2", "--num-proceses is not a known flag (did you mean '--num-processes'?)"),
    ("mm-doctor --nnodes 0", "--nnodes is 0; expected an integer of at least 1"),
    ("mm-page --htm x", "RUN_DIR is missing: the --log-dir of a run"),
    ("mm-page --print-completion fish", "--print-completion is 'fish'; expected bash or zsh"),
])
def test_mistakes_on_any_command_line(words: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = words.split()
    assert COMMANDS[name](rest) == 2
    assert f"error: {what}" in capsys.readouterr().err


# Progress: without a terminal, long work prints a line every so often, and short work prints none

@pytest.fixture
def clock(monkeypatch):
    """A clock that advances one second per call."""
    seconds = iter(range(1_000))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(seconds)))


def test_long_work_prints_lines(clock, monkeypatch, capsys) -> None:
    monkeypatch.setattr(console, "EVERY_SECONDS", 10.0)
    assert list(Progress("checking \x1b a.json", 25, "records").each(range(25))) == list(range(25))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["checking \\x1b a.json: 10 of 25 (40%) records, 10 s, about 15 s left",
                                "checking \\x1b a.json: 20 of 25 (80%) records, 20 s, about 5 s left",
                                "checking \\x1b a.json: 25 of 25 (100%) records, 26 s in all"]


def test_bytes_and_an_unknown_total(clock, monkeypatch, capsys) -> None:
    """The time left counts only what this process has done: 1 of 3 GiB were there before."""
    monkeypatch.setattr(console, "FIRST_SECONDS", 1.0)
    with Progress("writing", 3 << 30, "B", done=1 << 30) as work:
        work.update(1 << 29)
    with Progress("reading", unit="records") as work:
        work.update(1234)
    assert capsys.readouterr().err.splitlines() == [
        "writing: 1.5 GiB of 3.0 GiB (50%), 1 s, about 3 s left", "writing: 1.5 GiB of 3.0 GiB (50%), 2 s in all",
        "reading: 1,234 records, 1 s", "reading: 1,234 records, 2 s in all"]


def test_short_work_and_other_ranks_print_nothing(clock, monkeypatch, capsys) -> None:
    list(Progress("short", 9, "records").each(range(9)))
    monkeypatch.setattr(console, "FIRST_SECONDS", 1.0)
    list(Progress("another rank's", 20, "records", is_shown=False).each(range(20)))
    assert capsys.readouterr() == ("", "")


def test_nothing_is_left_after_a_resumed_part_that_was_all_done_before(clock, monkeypatch, capsys) -> None:
    monkeypatch.setattr(console, "FIRST_SECONDS", 1.0)
    with Progress("answering", 5, "answers", done=5) as work:
        work.update(0)
    assert capsys.readouterr().err.splitlines()[0] == "answering: 5 of 5 (100%) answers, 1 s"


def test_work_without_parts_prints_lines_until_it_ends(monkeypatch, capsys) -> None:
    monkeypatch.setattr(console, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(console, "EVERY_SECONDS", 0.1)
    with ongoing("waiting \x1b"):
        assert len(threads()) == 1
        time.sleep(1.0)
    assert not threads()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and 3 <= len(lines) <= 10
    assert set(lines) <= {"waiting \\x1b: 0 s so far", "waiting \\x1b: 1 s so far"}


def test_an_error_ends_the_lines_too(monkeypatch, capsys) -> None:
    monkeypatch.setattr(console, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(console, "EVERY_SECONDS", 60.0)
    with pytest.raises(KeyboardInterrupt), ongoing("saving"):  # it must not wait for a minute
        _wait_for(lambda: capsys.readouterr().err == "saving: 0 s so far\n")
        raise KeyboardInterrupt
    assert not threads()


def test_short_work_without_parts_and_other_ranks_print_nothing(monkeypatch, capsys) -> None:
    with ongoing("short"):
        pass
    monkeypatch.setattr(console, "FIRST_SECONDS", 0.0)
    with ongoing("another rank's", is_shown=False):
        assert not threads()
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


_ON_A_TERMINAL = """
import time
from mm import console
console._DELAY_SECONDS = console._BEAT_SECONDS = 0.2
with console.ongoing("the first step"):
    time.sleep(1.5)
"""


def test_a_terminal_shows_the_seconds_and_then_nothing() -> None:
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 80, 0, 0))
    done = subprocess.run([sys.executable, "-c", _ON_A_TERMINAL], stdout=subprocess.PIPE, stderr=terminal, check=True)
    os.write(terminal, b"END")  # so that a read never waits in vain
    shown = ""
    while not shown.endswith("END"):
        shown += os.read(screen, 1 << 16).decode()
    shown = shown.removesuffix("END")
    os.close(terminal)
    os.close(screen)
    assert done.stdout == b""
    assert "the first step: 00:01" in shown and "\n" not in shown
    assert shown.rstrip("\r").rpartition("\r")[2].strip() == ""  # the line is cleared


@pytest.mark.parametrize(("seconds", "text"), [
    (0.4, "0 s"), (119.4, "119 s"), (120, "2 min"), (7100, "118 min"), (7200, "2 h 0 min"), (8000, "2 h 13 min"),
    (171_000, "47 h 30 min"), (172_799, "2 days 0 h"), (172_800, "2 days 0 h"), (4_918_698, "56 days 22 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "progress"]


def _wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
