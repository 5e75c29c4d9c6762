"""The commands of mm-convert for adapters: PEFT to MindSpeed-MM's layout and back, and merging with the base model.

MindSpeed-MM stores adapters in its canonical structure: separate ones for q, k, v and gate, up.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

from mm.checkpoint.convert import HF_DIR, LAYOUT, Conversion, to_mindspeed
from mm.checkpoint.hf import HFDirectory
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
from mm.checkpoint.peft import CONFIG_FILE, AdapterDirectory
from mm.checkpoint.source import Kind, Source, find_kind, open_adapter, open_hf
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.errors import UserError, naming
from mm.weights.adapters import model_adapters
from mm.weights.names import ALL_LINEAR

BASE = "--cfg.base_dir"


def lora_hf_to_mm(
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


def lora_mm_to_hf(
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
    """Open adapters in MindSpeed-MM's layout; arguments as for ``lora_mm_to_hf``."""
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


def merge_lora(lora_dir: str | Path, hf_dir: str | Path, save_hf_dir: str | Path) -> Conversion:
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
