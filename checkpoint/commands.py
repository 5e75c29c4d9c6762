"""The commands of ``mm-convert``: turns flags into calls, and user errors into messages with exit status 2."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli, capture_parser, set_parsing_settings

from checkpoint import lora
from checkpoint.diff import diff_directories
from checkpoint.options import (
    DiffConfig,
    HFToMMConfig,
    LoraHFToMMConfig,
    LoraMMToHFConfig,
    MergeLoraConfig,
    MMToHFConfig,
    ResplitConfig,
    ShowConfig,
    VerifyConfig,
)
from checkpoint.parser import ConvertParser, completed_commands, refuse_misspelt
from checkpoint.verify import show_directory, verify_directory
from mm.console import COMPLETION, SHELLS, completion_script
from mm.conversion import convert
from mm.environment import version_line
from mm.errors import UserError, printable
from mm.families.known import FAMILIES
from mm.formats.mindspeed_layout import Format, Storage, Structure
from mm.process import refused

_CONVERTERS = {family.mindspeed.converter: family.title for family in FAMILIES}
_NOT_HERE = {
    "hf_to_mm_dcp": "torch's distributed checkpoints are not supported; the trainer's --load reads the Hugging Face "
                    "directory itself, on any layout",
    "hf_to_mm_ldt": "the trainer has no disaggregated training; hf_to_mm places the layers freely over the stages",
}
"""MindSpeed-MM's commands that are missing here -> the reason, and what to do instead."""


def hf_to_mm(cfg: HFToMMConfig) -> None:
    """Hugging Face -> MindSpeed-MM's directories on a layout."""
    layout, common, hf_dir = cfg.parallel_config.layout(convert.LAYOUT), cfg.common_model_config, cfg.hf_config.hf_dir
    common.check(hf_dir)
    storage = Storage(Format(cfg.save_format), common.structure or Structure.FUSED, cfg.save_vit_only)
    convert.hf_to_mm(hf_dir, cfg.mm_dir, layout, storage, cfg.language_dir()).run(cfg)


def mm_to_hf(cfg: MMToHFConfig) -> None:
    """MindSpeed-MM's directories, on any layout, or a training checkpoint -> Hugging Face."""
    layout = cfg.parallel_config and cfg.parallel_config.layout(convert.LAYOUT)
    common, hf_dir = cfg.common_model_config, cfg.hf_config.hf_dir
    common.check(hf_dir)
    convert.mm_to_hf(cfg.mm_dir, hf_dir, cfg.save_hf_dir, layout, common.structure, common.vit_qkv_order).run(cfg)


def resplit(cfg: ResplitConfig) -> None:
    """MindSpeed-MM's directories, or a training checkpoint, from one layout to another."""
    source = cfg.source_parallel_config and cfg.source_parallel_config.layout(convert.SOURCE_LAYOUT)
    target = cfg.target_parallel_config.layout(convert.TARGET_LAYOUT)
    common, hf_dir = cfg.common_model_config, cfg.hf_config and cfg.hf_config.hf_dir
    common.check(hf_dir)
    format = cfg.save_format and Format(cfg.save_format)
    convert.resplit(cfg.source_dir, cfg.target_dir, source, target, hf_dir, format, common.structure,
                    common.vit_qkv_order).run(cfg)


def lora_hf_to_mm(cfg: LoraHFToMMConfig) -> None:
    """A PEFT directory of adapters -> MindSpeed-MM's directories on a layout."""
    cfg.common_model_config.check(None, of_adapters=True)
    layout = cfg.parallel_config.layout(convert.LAYOUT)
    lora.lora_hf_to_mm(cfg.hf_config.hf_dir, cfg.mm_dir, layout, Format(cfg.save_format), cfg.base_dir).run(cfg)


def lora_mm_to_hf(cfg: LoraMMToHFConfig) -> None:
    """Adapters in MindSpeed-MM's directories, or a training checkpoint of adapters -> PEFT."""
    cfg.common_model_config.check(None, of_adapters=True)
    layout = cfg.parallel_config and cfg.parallel_config.layout(convert.LAYOUT)
    base_dir = cfg.hf_config and cfg.hf_config.hf_dir
    lora.lora_mm_to_hf(cfg.mm_dir, cfg.save_hf_dir, layout, base_dir, cfg.lora_alpha).run(cfg)


def merge_lora(cfg: MergeLoraConfig) -> None:
    """Adapters added to the weights of their model -> Hugging Face."""
    lora.merge_lora(cfg.lora_dir, cfg.hf_config.hf_dir, cfg.save_hf_dir).run(cfg)


def verify(cfg: VerifyConfig) -> None:
    """Compare a directory with its manifest, and with a Hugging Face directory if one is given."""
    layout = cfg.parallel_config and cfg.parallel_config.layout(convert.LAYOUT)
    hf_dir = cfg.hf_config and cfg.hf_config.hf_dir
    print(printable("\n".join(verify_directory(Path(cfg.mm_dir), hf_dir, layout, cfg.num_workers))))


def diff(cfg: DiffConfig) -> int:
    """Compare two directories of any kind and layout: the first differing tensors.

    Exit status 0: equal; 1: different.
    """
    hf_dir = cfg.hf_config and cfg.hf_config.hf_dir
    found = diff_directories(cfg.source_dir, cfg.target_dir, hf_dir, cfg.num_workers)
    print(printable("\n".join(found.lines)))
    return 0 if found.is_equal else 1


def show(cfg: ShowConfig) -> None:
    """Print layout, sizes and dtypes of a directory."""
    print(printable("\n".join(show_directory(Path(cfg.dir)))))


def run(words: Sequence[str]) -> int:
    """Run a command and return the exit status: 0, 1 if ``diff`` found differences, 2 for user errors."""
    if "--version" in words[:2]:
        print(version_line("mm-convert"))
        return 0
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # --help shows the docstrings of the fields
    converting = (hf_to_mm, mm_to_hf, resplit, lora_hf_to_mm, lora_mm_to_hf, merge_lora)
    commands = {command.__name__: command for command in (*converting, verify, diff, show)}
    converter, command = (*words, "", "")[:2]
    is_known = converter in _CONVERTERS and command in commands
    offered = {command: commands[command]} if is_known else commands  # the parsers of all take half a second
    components: Any = {
        name: {"_help": f"{title}, all sizes.  --version prints the version; {COMPLETION} bash, or zsh, prints a "
                        f"script that completes this command there (docs/install.md).", **offered}
        for name, title in _CONVERTERS.items()
    }
    called: Any = {"components": components, "as_positional": False, "prog": "mm-convert",
                   "parser_class": ConvertParser}
    completed = completed_commands(capture_parser(lambda: auto_cli(**called, args=[])), commands)
    try:
        if next(iter(words), None) == COMPLETION:
            sys.stdout.write(completion_script(_shell(words[1:]), "mm-convert", completed))
            return 0
        _refuse_others(words)
        refuse_misspelt(words, completed)
        status = auto_cli(**called, args=list(words))
    except UserError as error:
        return refused(error)
    return status if isinstance(status, int) else 0


def _shell(words: Sequence[str]) -> str:
    """The shell that the words after ``COMPLETION`` name."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise UserError(f"{COMPLETION} is {' '.join(words)!r}; expected {' or '.join(SHELLS)}")
    return words[0]


def _refuse_others(words: Sequence[str]) -> None:
    """Raise UserError for commands of MindSpeed-MM's mm-convert that are missing here."""
    converter, command = (*words, "", "")[:2]
    if converter == "GenericDCPConverter":
        raise UserError(f"{converter} is for checkpoints of MindSpeed-MM's FSDP2 trainer, which are not supported "
                        f"here.  Instead of hf_to_dcp, give --load the Hugging Face directory itself.  Export a model "
                        f"trained with FSDP2 with MindSpeed-MM's own dcp_to_hf, and --load that directory.")
    if converter.endswith("Converter") and converter not in _CONVERTERS:
        ours = "; ".join(f"the converter of {title} is {name}" for name, title in _CONVERTERS.items())
        raise UserError(f"{converter} is for a model that is not supported here, or misspelt; {ours}.")
    if command in _NOT_HERE:
        raise UserError(f"{command} is not available here: {_NOT_HERE[command]}.")
