"""The commands of ``mm-convert``, each a function of its fields in ``checkpoint.options``.

The commands of mm-convert for adapters: PEFT to MindSpeed-MM's layout and back, and merging with the base model.

MindSpeed-MM stores adapters in its canonical structure: separate ones for q, k, v and gate, up.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.options import (
    CommonModelConfig,
    DiffConfig,
    HFConfig,
    HFToMMConfig,
    LoraHFToMMConfig,
    LoraMMToHFConfig,
    MergeLoraConfig,
    MMToHFConfig,
    ParallelConfig,
    ResplitConfig,
    ShowConfig,
    VerifyConfig,
)
from checkpoint.verify import diff_directories, show_directory, verify_directory
from mm.checkpoint import convert
from mm.checkpoint.convert import HF_DIR, LAYOUT, Conversion, to_mindspeed
from mm.checkpoint.hf import HFDirectory, are_module_names
from mm.checkpoint.layout import Layout, check_layout
from mm.checkpoint.merge_lora import (
    check_base,
    export_peft,
    holds_adapters,
    merge,
    open_beside,
    open_mindspeed,
    open_saved,
)
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.checkpoint.mindspeed_layout import Format, Storage, Structure, mindspeed_name
from mm.checkpoint.peft import CONFIG_FILE, PREFIX, AdapterDirectory
from mm.checkpoint.source import Kind, Source, find_kind, open_adapter, open_hf
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.errors import UserError, naming, printable, refuse
from mm.weights.adapters import model_adapters
from mm.weights.names import ALL_LINEAR

BASE = "--cfg.base_dir"


def peft_to_mindspeed(
    lora_dir: str | Path, mm_dir: str | Path, layout: Layout, format: Format, base_dir: str | None = None
) -> Conversion:
    """PEFT directory -> MindSpeed-MM's layout; ``base_dir`` is the base model, by default the one the adapters name.

    Raises UserError if the base model is missing, does not match the adapters, or the layout is invalid.
    """
    directory = AdapterDirectory.open(lora_dir)
    model = directory.model(_base_model(directory, base_dir))
    if model.trainable_modules:
        raise UserError(f"{directory.path} holds {model.trainable_modules[0]}, which was fully trained; MindSpeed-MM's "
                        f"layout stores adapters only: make a whole model with merge_lora, and convert that.")
    source = open_adapter(directory, model, is_own=True)
    check_layout(layout, model, LAYOUT)
    return to_mindspeed(source, Path(mm_dir), layout, Storage(format, Structure.CANONICAL, adapters_only=True))


def mindspeed_to_peft(
    mm_dir: str | Path, save_hf_dir: str | Path, layout: Layout | None, base_dir: str | None, alpha: float | None
) -> Conversion:
    """MindSpeed-MM's adapters, or a training checkpoint of adapters -> PEFT directory, which names ``base_dir``.

    Without a manifest, ``layout``, ``base_dir`` and ``alpha`` must be given; raises UserError if one is missing, or if
    a training checkpoint was trained on another model than ``base_dir``, by default the one that it states.
    """
    if find_kind(mm_dir, "--cfg.mm_dir") is Kind.TRAINING:
        source = open_saved(mm_dir)
    else:
        source = open_mindspeed_adapters(mm_dir, layout, base_dir, alpha)
    if base_dir is not None and source.base_crc32 is not None and os.path.isdir(base_dir):
        named = HFDirectory.open(base_dir, weights_required=False)
        if named.tensors:
            check_base(source, open_hf(named), HF_DIR)
    return export_peft(source, save_hf_dir, base_dir or source.base_name)


def open_mindspeed_adapters(
    mm_dir: str | Path, layout: Layout | None, base_dir: str | None, alpha: float | None
) -> Source:
    """Open adapters in MindSpeed-MM's layout; arguments as for ``mindspeed_to_peft``."""
    directory = MindSpeedDirectory.open(mm_dir)
    if not directory.storage.adapters_only:
        raise UserError(f"{directory.path} does not hold adapters only; for a whole model use mm_to_hf.")
    model = None
    if directory.manifest is None:
        if layout is None or base_dir is None or alpha is None:
            raise UserError(f"{directory.path} has no manifest that describes its adapters; give {HF_DIR}, {LAYOUT} "
                            f"and --cfg.lora_alpha: the base model, its layout and the alpha of the training.")
        with naming(HF_DIR):
            base = HFDirectory.open(base_dir, weights_required=False).model_config()
        model = _found_model(directory, base, alpha)
    return open_mindspeed(directory, model, layout)


def merge_into_base(lora_dir: str | Path, hf_dir: str | Path, save_hf_dir: str | Path) -> Conversion:
    """Adapters of any kind and the Hugging Face directory of their base model -> a whole model.

    Adapters in MindSpeed-MM's layout need a manifest.
    """
    with naming(HF_DIR):
        base = open_hf(HFDirectory.open(hf_dir))
    if not holds_adapters(lora_dir, "--cfg.lora_dir"):
        raise UserError(f"{lora_dir} holds a whole model, not adapters; if it is their base model, give it as "
                        f"--cfg.hf_config.hf_dir.")
    return merge(open_beside(lora_dir, base.model), base, hf_dir, save_hf_dir)


def _base_model(directory: AdapterDirectory, base_dir: str | None) -> ModelConfig:
    path = base_dir or directory.base_name
    if not path or not (Path(path) / "config.json").is_file():
        raise UserError(f"{directory.path} names {path!r} as its base model, which is not a directory with a "
                        f"config.json here; give the base model with {BASE}.")
    with naming(BASE if base_dir else f"{directory.path / CONFIG_FILE}: base_model_name_or_path"):
        return HFDirectory.open(path, weights_required=False).model_config()


def _found_model(directory: MindSpeedDirectory, base: ModelConfig, alpha: float) -> ModelConfig:
    """``base`` with adapters inferred from tensors.  All layers of a tower have the same, so layer numbers are ignored.
    """
    ranks = {_kind(name): stored.shape[0] for contents in directory.contents.values()
             for name, stored in contents.items() if ".lora_A." in name and stored.shape and stored.shape[0]}
    whole = replace(base.unfrozen, lora=LoraConfig((ALL_LINEAR,), alpha=alpha))
    kinds = {one.layer: _kind(mindspeed_name(one.a.name)) for one in model_adapters(whole)}
    layers = {layer: ranks[kind] for layer, kind in kinds.items() if kind in ranks}
    return replace(whole, lora=LoraConfig(tuple(layers), alpha=alpha, rank_pattern=tuple(layers.items())))


def _kind(name: str) -> str:
    """MindSpeed-MM's name of a matrix without the chunk of a torch file and the layer number, which restarts at 0 on
    every stage."""
    return re.sub(r"^model\d*/|\.layers\.\d+", "", name)


_COMMON = "--cfg.common_model_config"


def hf_to_mm(cfg: HFToMMConfig) -> None:
    """Hugging Face -> MindSpeed-MM's directories on a layout."""
    common, hf_dir = cfg.common_model_config, cfg.hf_config.hf_dir
    language_dir, same = _dir(cfg.llm_hf_config), common.llm_hf_dir
    if language_dir and same and Path(language_dir).resolve() != Path(same).resolve():
        raise UserError(f"--cfg.llm_hf_config.hf_dir is {language_dir}, but {_COMMON}.llm_hf_dir is {same}; give one "
                        f"of them.")
    _check(common, hf_dir)
    storage = Storage(Format(cfg.save_format), _structure(common) or Structure.FUSED, cfg.save_vit_only)
    layout = _layout(cfg.parallel_config, convert.LAYOUT)
    convert.hf_to_mm(hf_dir, cfg.mm_dir, layout, storage, language_dir or same).run(cfg)


def mm_to_hf(cfg: MMToHFConfig) -> None:
    """MindSpeed-MM's directories, on any layout, or a training checkpoint -> Hugging Face."""
    layout = cfg.parallel_config and _layout(cfg.parallel_config, convert.LAYOUT)
    common, hf_dir = cfg.common_model_config, cfg.hf_config.hf_dir
    _check(common, hf_dir)
    convert.mm_to_hf(cfg.mm_dir, hf_dir, cfg.save_hf_dir, layout, _structure(common), common.vit_qkv_order).run(cfg)


def resplit(cfg: ResplitConfig) -> None:
    """MindSpeed-MM's directories, or a training checkpoint, from one layout to another."""
    source = cfg.source_parallel_config and _layout(cfg.source_parallel_config, convert.SOURCE_LAYOUT)
    target = _layout(cfg.target_parallel_config, convert.TARGET_LAYOUT)
    common, hf_dir = cfg.common_model_config, _dir(cfg.hf_config)
    _check(common, hf_dir)
    format = cfg.save_format and Format(cfg.save_format)
    convert.resplit(cfg.source_dir, cfg.target_dir, source, target, hf_dir, format, _structure(common),
                    common.vit_qkv_order).run(cfg)


def lora_hf_to_mm(cfg: LoraHFToMMConfig) -> None:
    """A PEFT directory of adapters -> MindSpeed-MM's directories on a layout."""
    _check(cfg.common_model_config, None, of_adapters=True)
    layout = _layout(cfg.parallel_config, convert.LAYOUT)
    peft_to_mindspeed(cfg.hf_config.hf_dir, cfg.mm_dir, layout, Format(cfg.save_format), cfg.base_dir).run(cfg)


def lora_mm_to_hf(cfg: LoraMMToHFConfig) -> None:
    """Adapters in MindSpeed-MM's directories, or a training checkpoint of adapters -> PEFT."""
    _check(cfg.common_model_config, None, of_adapters=True)
    layout = cfg.parallel_config and _layout(cfg.parallel_config, convert.LAYOUT)
    mindspeed_to_peft(cfg.mm_dir, cfg.save_hf_dir, layout, _dir(cfg.hf_config), cfg.lora_alpha).run(cfg)


def merge_lora(cfg: MergeLoraConfig) -> None:
    """Adapters added to the weights of their model -> Hugging Face."""
    merge_into_base(cfg.lora_dir, cfg.hf_config.hf_dir, cfg.save_hf_dir).run(cfg)


def verify(cfg: VerifyConfig) -> None:
    """Compare a directory with its manifest, and with a Hugging Face directory if one is given."""
    layout = cfg.parallel_config and _layout(cfg.parallel_config, convert.LAYOUT)
    print(printable("\n".join(verify_directory(Path(cfg.mm_dir), _dir(cfg.hf_config), layout, cfg.num_workers))))


def diff(cfg: DiffConfig) -> int:
    """Compare two directories of any kind and layout; the exit status is 1 if they differ."""
    found = diff_directories(cfg.source_dir, cfg.target_dir, _dir(cfg.hf_config), cfg.num_workers)
    print(printable("\n".join(found.lines)))
    return 0 if found.is_equal else 1


def show(cfg: ShowConfig) -> None:
    """Print layout, sizes and dtypes of a directory."""
    print(printable("\n".join(show_directory(Path(cfg.dir)))))


_COMMANDS: Mapping[type, Callable[[Any], int | None]] = {
    HFToMMConfig: hf_to_mm, MMToHFConfig: mm_to_hf, ResplitConfig: resplit, LoraHFToMMConfig: lora_hf_to_mm,
    LoraMMToHFConfig: lora_mm_to_hf, MergeLoraConfig: merge_lora, VerifyConfig: verify, DiffConfig: diff,
    ShowConfig: show}  # fmt: skip


def run(cfg: object) -> int:
    """Run the command that ``cfg`` belongs to; returns the exit status."""
    return _COMMANDS[type(cfg)](cfg) or 0


def _dir(given: HFConfig | None) -> str | None:
    return given and given.hf_dir


def _layout(given: ParallelConfig, flag: str) -> Layout:
    """The layout that the section ``flag`` describes."""
    if given.vit_tp_size not in (0, given.tp_size):
        raise UserError(f"{flag}.vit_tp_size is {given.vit_tp_size}; expected 0 or tp_size = {given.tp_size}, because "
                        f"both towers are cut the same way; for a ViT that is not cut, give {flag}.encoder_placement "
                        f"tensor_ranks.")
    return Layout(given.vit_pp_layers, given.llm_pp_layers, given.tp_size, given.encoder_placement)


def _structure(common: CommonModelConfig) -> Structure | None:
    """The requested structure; None: the default."""
    if common.enable_canonical_hf_struct is None:
        return None
    return Structure.CANONICAL if common.enable_canonical_hf_struct else Structure.FUSED


def _check(common: CommonModelConfig, hf_dir: str | None, of_adapters: bool = False) -> None:
    """Raise UserError naming each stated fact that is false for the model in ``hf_dir``."""
    problems: list[str] = []
    if common.model_prefix and not (of_adapters and common.model_prefix == PREFIX):
        problems.append(
            f"{_COMMON}.model_prefix is {common.model_prefix!r}; only the names of adapters carry a prefix, which is "
            f"{PREFIX!r}: leave the flag out."
        )
    if of_adapters and common.enable_canonical_hf_struct is False:
        problems.append(f"{_COMMON}.enable_canonical_hf_struct is false, but adapters always have separate q, k, v "
                        f"and gate, up; leave the flag out.")
    for name, fact in _facts(hf_dir).items() if hf_dir is not None else ():
        stated = getattr(common, name)
        if stated not in (None, fact):
            problems.append(f"{_COMMON}.{name} is {stated}, but {hf_dir} has {fact}; leave the flag out, or give "
                            f"the right directory.")
    refuse(problems)


def _facts(hf_dir: str) -> dict[str, object]:
    """The true values of the fields of ``CommonModelConfig`` that describe the model."""
    with naming(convert.HF_DIR):
        directory = HFDirectory.open(hf_dir, weights_required=False)
        model = directory.model_config()
    names = (stored.name for stored in directory.tensors.values())
    return {"num_key_value_heads": model.language.num_query_groups, "tie_word_embeddings": model.language.tied,
            "llm_num_layers": model.language.num_layers, "vit_num_layers": model.vision.num_layers,
            "new_transformers_weight_key": are_module_names(names)}
