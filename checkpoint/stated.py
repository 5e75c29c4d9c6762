"""Compares what ``--cfg`` states of the model with the model itself: what is given twice must agree."""

from pathlib import Path

from checkpoint.formats.hf import HFDirectory
from checkpoint.formats.spelling import Spelling, hf_spelling
from checkpoint.lists import read_lists
from checkpoint.options import CommonModelConfig, HFToMMConfig, ParallelConfig
from mm.errors import UserError

_COMMON = "--cfg.common_model_config"


def check_common(common: CommonModelConfig, hf_dir: str | None) -> None:
    """Refuse statements that are not true of the model in ``hf_dir``, or concern another kind of model.

    Raises:
        UserError: naming each.
    """
    problems = []
    if common.model_prefix:
        problems.append(
            f"{_COMMON}.model_prefix is {common.model_prefix!r}; only the names of adapters carry a prefix, and they "
            f"are not converted: merge the adapter into its model, and leave the flag out."
        )
    problems += [
        f"{_COMMON}.{name} is {value}; expected 0: the model has no {what}."
        for name, value, what in (("num_experts", common.num_experts, "experts"),
                                  ("audio_num_layers", common.audio_num_layers, "audio encoder"))
        if value
    ]
    stated = {
        "num_key_value_heads": common.num_key_value_heads, "tie_word_embeddings": common.tie_word_embeddings,
        "llm_num_layers": common.llm_num_layers, "vit_num_layers": common.vit_num_layers,
        "new_transformers_weight_key": common.new_transformers_weight_key,
    }  # fmt: skip
    if any(value is not None for value in stated.values()) and hf_dir is not None:
        found = _facts(HFDirectory.open(hf_dir, weights_required=False))
        problems += [
            f"{_COMMON}.{name} is {value}, but {hf_dir} has {found[name]}; leave the flag out, or give the right "
            f"directory."
            for name, value in stated.items()
            if value is not None and value != found[name]
        ]
    if problems:
        raise UserError(problems)


def _facts(directory: HFDirectory) -> dict[str, object]:
    model = directory.model_config()
    spelling = hf_spelling(tensor.name for tensor in directory.tensors.values())
    return {
        "num_key_value_heads": model.language.num_query_groups,
        "tie_word_embeddings": model.language.tied,
        "llm_num_layers": model.language.num_layers,
        "vit_num_layers": model.vision.num_layers,
        "new_transformers_weight_key": spelling is Spelling.MODULE,
    }


def language_dir(cfg: HFToMMConfig) -> str | None:
    """The directory of the LLM where it is not that of the whole model.

    Raises:
        UserError: two are given.
    """
    one, other = cfg.llm_hf_config and cfg.llm_hf_config.hf_dir, cfg.common_model_config.llm_hf_dir
    if one and other and Path(one).resolve() != Path(other).resolve():
        raise UserError(
            f"--cfg.llm_hf_config.hf_dir is {one}, but {_COMMON}.llm_hf_dir is {other}; give one of them."
        )
    return one or other


def parallel_problems(given: ParallelConfig, flag: str) -> list[str]:
    """What is wrong with a ``parallel_config`` apart from its layer lists; ``flag`` gives it."""
    problems = []
    if given.vit_tp_size not in (0, given.tp_size):
        problems.append(
            f"{flag}.vit_tp_size is {given.vit_tp_size}; expected 0 or tp_size = {given.tp_size}, because both towers "
            f"are cut alike."
        )
    if given.ep_size != 1:
        problems.append(f"{flag}.ep_size is {given.ep_size}; expected 1: the model has no experts.")
    if given.audio_pp_layers is not None:
        lists = read_lists(given.audio_pp_layers, f"{flag}.audio_pp_layers")
        if any(count for chunk in lists for count in chunk):
            problems.append(f"{flag}.audio_pp_layers is {given.audio_pp_layers}; the model has no audio encoder.")
    return problems
