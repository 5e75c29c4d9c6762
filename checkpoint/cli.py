"""``mm-convert``: a command line compatible with MindSpeed-MM's.

    mm-convert CONVERTER hf_to_mm --cfg.mm_dir DIR --cfg.hf_config.hf_dir DIR \\
        --cfg.parallel_config.llm_pp_layers [[12,16]] --cfg.parallel_config.vit_pp_layers [[32,0]]

The commands themselves are in ``checkpoint.commands``, which loads torch.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from checkpoint import options
from mm.config.command_line import CommandLine, Commands
from mm.config.parse import parse_json, read_json
from mm.errors import UserError
from mm.families import FAMILIES
from mm.process import run_command

CONVERTERS = {family.mindspeed.converter: family.title for family in FAMILIES}
_CLASSES: Mapping[str, type] = {
    "hf_to_mm": options.HFToMMConfig, "mm_to_hf": options.MMToHFConfig, "resplit": options.ResplitConfig,
    "lora_hf_to_mm": options.LoraHFToMMConfig, "lora_mm_to_hf": options.LoraMMToHFConfig,
    "merge_lora": options.MergeLoraConfig, "verify": options.VerifyConfig, "diff": options.DiffConfig,
    "show": options.ShowConfig}  # fmt: skip
_USAGE = "--cfg.FIELD VALUE ...  (also --config FILE of JSON: {\"cfg\": {...}})"
COMMANDS = Commands("mm-convert", "Convert weights between Hugging Face and MindSpeed-MM.", {
    converter: Commands(f"mm-convert {converter}", f"{title}, all sizes.", {
        name: CommandLine(f"mm-convert {converter} {name}", cls.__doc__ or "", cls, _USAGE, start="--cfg.")
        for name, cls in _CLASSES.items()})
    for converter, title in CONVERTERS.items()})
_NOT_HERE = {
    "hf_to_mm_dcp": "torch's distributed checkpoints are not supported; the trainer's --load reads the Hugging Face "
                    "directory itself, on any layout",
    "hf_to_mm_ldt": "the trainer has no disaggregated training; hf_to_mm places the layers freely over the stages",
}
"""MindSpeed-MM's commands that are missing here -> the reason, and what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; status 1 if ``diff`` found differences, 2 for user errors, 130 after Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv),
                       lambda: "finished files are kept, and the same command continues from them")


def _run(words: Sequence[str]) -> int:
    from mm.console import loading

    _refuse_others(words)
    line, rest = COMMANDS.find(words)
    cfg = line.read(line.split(list(_expanded(rest, line))))
    with loading():
        from checkpoint import commands

    return commands.run(cfg)


def _expanded(words: Sequence[str], line: CommandLine[Any]) -> Iterator[str]:
    """``words`` with the flags that ``--config FILE``, and an object given for a whole section, stand for."""
    sections = {flag.rpartition(".")[0] for flag in line.flags}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag != "--config" and flag not in sections:
            yield word
            continue
        value = value if equals else next(rest, "")
        if flag in sections:
            yield from _flags(flag, parse_json(flag, value.encode()).root)
        elif isinstance(content := read_json(value).root, dict):
            for name, inner in content.items():
                yield from _flags(f"--{name}", inner)
        else:
            raise UserError(f"--config {value} is not a JSON object; expected {{\"cfg\": {{...}}}}.")


def _flags(name: str, value: Any) -> Iterator[str]:
    """``value`` as the flag ``name``; if it is an object, each of its values as a flag below."""
    if isinstance(value, dict):
        for key, inner in cast(dict[str, Any], value).items():
            yield from _flags(f"{name}.{key}", inner)
    elif value is not None:
        yield f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def _refuse_others(words: Sequence[str]) -> None:
    """Raise UserError for commands of MindSpeed-MM's mm-convert that are missing here."""
    converter, command = (*words, "", "")[:2]
    if converter == "GenericDCPConverter":
        raise UserError(f"{converter} is for checkpoints of MindSpeed-MM's FSDP2 trainer, which are not supported "
                        f"here.  Instead of hf_to_dcp, give --load the Hugging Face directory itself.  Export a model "
                        f"trained with FSDP2 with MindSpeed-MM's own dcp_to_hf, and --load that directory.")
    if command in _NOT_HERE:
        raise UserError(f"{command} is not available here: {_NOT_HERE[command]}.")


if __name__ == "__main__":
    sys.exit(main())
