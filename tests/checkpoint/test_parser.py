"""The help of ``mm-convert``, and what it says of misspelt words."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import get_type_hints

import pytest

from checkpoint import commands
from checkpoint.cli import main
from mm.console import COMPLETION, NEEDED, STATUSES

COMMANDS = (commands.hf_to_mm, commands.mm_to_hf, commands.resplit, commands.lora_hf_to_mm, commands.lora_mm_to_hf,
            commands.merge_lora, commands.verify, commands.diff, commands.show)  # fmt: skip


@pytest.mark.parametrize(("words", "wrong", "hint"), [
    ("Qwen2_5_VLConvertor hf_to_mm", "'Qwen2_5_VLConvertor' is not a command of mm-convert", "Qwen2_5_VLConverter"),
    ("Qwen2_5_VLConverter hf_to_m", "'hf_to_m' is not a command of mm-convert Qwen2_5_VLConverter", "hf_to_mm"),
    ("Qwen2_5_VLConverter hf_to_mm --cfg.mm_dirr x", "--cfg.mm_dirr is not a known flag", "--cfg.mm_dir"),
    ("Qwen2_5_VLConverter hf_to_mm --cfg.hf_config.hf_dri=x", "--cfg.hf_config.hf_dri is", "--cfg.hf_config.hf_dir"),
    ("Qwen2_5_VLConverter hf_to_mm --cfg.hf_confg.hf_dir x", "--cfg.hf_confg.hf_dir is", "--cfg.hf_config.hf_dir"),
    ("Qwen2_5_VLConverter resplit --cfg.target_paralel_config.tp_size 2", "--cfg.target_paralel_config.tp_size is",
     "--cfg.target_parallel_config.tp_size"),
    ("Qwen2_5_VLConverter hf_to_mm --cfg.parallel_config.llm_pp_layer 3", "--cfg.parallel_config.llm_pp_layer is",
     "--cfg.parallel_config.llm_pp_layers"),
    ("Qwen2_5_VLConverter verify --cfg.parallel_config.tp_siz 2", "--cfg.parallel_config.tp_siz is",
     "--cfg.parallel_config.tp_size"),
    ("Qwen2_5_VLConverter hf_to_mm --confg x", "--confg is not a known flag", "--config"),
])
def test_what_is_misspelt_gets_the_nearest_name(words, wrong, hint, capsys):
    """Also a field of an optional section, which the help does not show, and one that two others begin with."""
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {wrong}") and f"(did you mean '{hint}'?)" in line


def test_all_misspelt_flags_are_reported_together(capsys):
    assert main(["Qwen2_5_VLConverter", "verify", "--cfg.mm_dr", "x", "--cfg.hf_config.hf_dr", "y"]) == 2
    assert capsys.readouterr().err.count("is not a known flag (did you mean ") == 2


def test_a_converter_that_is_left_out(capsys):
    assert main(["show", "--cfg.dir", "x"]) == 2
    assert "must stand before it: mm-convert Qwen2_5_VLConverter show" in capsys.readouterr().err


def needed(cls: type, start: str = "cfg") -> Iterator[str]:
    """The fields of ``cls`` without which its command does nothing."""
    hints = get_type_hints(cls)
    for one in fields(cls):
        if one.default is MISSING and one.default_factory is MISSING:
            name = f"{start}.{one.name}"
            yield from needed(hints[one.name], name) if is_dataclass(hints[one.name]) else (name,)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.__name__)
def test_each_help_begins_with_what_the_command_needs(command, capsys):
    """It says of a directory what it is for; facts that the files state themselves stand last."""
    with pytest.raises(SystemExit):
        main(["Qwen2_5_VLConverter", command.__name__, "--help"])
    printed = capsys.readouterr().out
    titles = re.findall(r"^(\S.*):$", printed, re.MULTILINE)
    assert titles[0] == NEEDED and not any("Facts" in title for title in titles[:-1])
    first = printed[printed.index(NEEDED) : printed.index("options:\n")]
    shown = re.findall(r"^  --([\w.]+)", first, re.MULTILINE)
    assert set(needed(get_type_hints(command)["cfg"])) <= set(shown)
    assert "Holds config.json" not in first
    assert all(len(re.findall(rf"^  --{re.escape(name)} ", printed, re.MULTILINE)) == 1 for name in shown)
    assert " ".join(printed.split()).endswith(" ".join(STATUSES.split()))


def test_a_shell_without_completion(capsys):
    assert main([COMPLETION, "fish"]) == 2
    assert "--print-completion is 'fish'; expected bash or zsh" in capsys.readouterr().err
