"""Adapters and their base models: opens and compares them, converts adapters, and merges them into the weights.

PEFT stores adapters as Hugging Face tensors.  MindSpeed-MM stores them in its canonical structure: separate ones for q,
k, v and gate, up.
"""

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm.checkpoint.convert import HF_DIR, LAYOUT, Conversion, copying, to_mindspeed
from mm.checkpoint.directories import Crc32s
from mm.checkpoint.hf import HF_CONFIG_FILE, HFDirectory, hf_targets, write_other_files
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure, check_layout, mindspeed_name
from mm.checkpoint.peft import CONFIG_FILE, AdapterDirectory, adapter_targets, config_text, is_peft_directory
from mm.checkpoint.source import (
    Kind,
    QkvOrder,
    Source,
    find_kind,
    open_adapter,
    open_hf,
    open_to_train,
    open_training,
)
from mm.checkpoint.tensor_io import Blocks, tensor_bytes
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.errors import UserError, naming, refuse
from mm.weights.table import ALL_LINEAR, Place, Weight, model_weights
from mm.weights.trained import model_adapters, saved_weights
from mm.weights.views import View

BASE = "--cfg.base_dir"


def holds_adapters(path: str | Path, flag: str = "--load") -> bool:
    """Whether the directory that ``flag`` gave holds adapters without their base model."""
    if is_peft_directory(path):
        return True
    match find_kind(path, flag):
        case Kind.TRAINING:
            return TrainingDirectory.open(path).manifest.model.lora.is_on
        case Kind.MINDSPEED:
            return MindSpeedDirectory.open(path).storage.adapters_only
    return False


def open_adapters(path: str | Path, model: ModelConfig, layout: Layout | None = None) -> Source:
    """Open a directory of adapters, which must be those of ``model``; see ``open_saved`` for ``layout``."""
    if is_peft_directory(path):
        return open_adapter(AdapterDirectory.open(path), model)
    source = open_saved(path, model, layout)
    source.check_model(model)
    refuse(_difference(source, model))
    return source


def open_saved(path: str | Path, model: ModelConfig | None = None, layout: Layout | None = None) -> Source:
    """Open the adapters of a training checkpoint or in MindSpeed-MM's layout.

    The latter do not describe themselves without a manifest: they are read as those of ``model`` on ``layout``.
    """
    if find_kind(path) is not Kind.MINDSPEED:
        return open_training(TrainingDirectory.open(path), takes_adapters=True)
    directory = MindSpeedDirectory.open(path)
    if directory.manifest is not None:
        return open_mindspeed(directory, None, None)
    if layout is None:
        raise UserError(f"{path} has no manifest that describes its adapters; make a PEFT directory with mm-convert "
                        f"lora_mm_to_hf, and give that.")
    return open_mindspeed(directory, model, layout)


def open_mindspeed(directory: MindSpeedDirectory, model: ModelConfig | None, layout: Layout | None) -> Source:
    """Open adapters in MindSpeed-MM's layout; without a manifest, as those of ``model`` on ``layout``."""
    placed, tp_size = directory.placed_model(layout, LAYOUT, model)
    views, problems = directory.views(placed, tp_size)
    if problems and directory.manifest is None:
        problems.append(f"{directory.path} was read as the adapters of {', '.join(placed.lora.target_modules[:3])} on "
                        f"{Layout.of(placed, tp_size)}; give the settings and the layout of its training.")
    refuse(problems)
    return Source(directory.path, Kind.MINDSPEED, placed, tp_size, tuple(views), directory.files, directory,
                  directory.storage, iteration=directory.iteration, consumed_samples=directory.consumed_samples)


def open_beside(path: str | Path, base: ModelConfig) -> Source:
    """Open any directory of adapters; PEFT's, which do not describe their model, as adapters of ``base``."""
    if not is_peft_directory(path):
        return open_saved(path)
    directory = AdapterDirectory.open(path)
    return open_adapter(directory, directory.model(base), is_own=True)


def _difference(source: Source, model: ModelConfig) -> list[str]:
    """How the content of an adapter directory differs from what ``model`` trains."""
    stored, trained = ({one.name: (list(one.shape), one.scale) for one in saved_weights(each)}
                       for each in (source.model, model))
    flags = "give the --lora-* flags, lora_mixed_training and --trainable-modules of that run"
    return [f"{source.path} has {name} of shape and scale {stored.get(name, 'none')}, but this run trains "
            f"{trained.get(name, 'none')}; {flags}." for name in sorted(stored.keys() | trained.keys())
            if stored.get(name) != trained.get(name)][:1]


def open_base(path: str | Path, model: ModelConfig, qkv: QkvOrder | None = None) -> Source:
    """Open the base model of the adapters of ``model``."""
    return open_to_train(path, model.base, needs_optimizer=False, qkv=qkv)


def model_crc32(base: Source) -> int:
    """A checksum that identifies the base model of adapters: of qkv in the first and last LLM layer, as bfloat16.

    It does not depend on the kind of directory, the layout or the precision; training changes it.
    """
    last, crc32 = base.model.language.num_layers - 1, 0
    for weight in model_weights(base.model.base):
        if weight.place is Place.LANGUAGE_LAYER and weight.layer in (0, last) and "linear_qkv" in weight.name:
            for number in range(len(weight.hf_names)):
                rounded = base.read_hf(weight, number).to(torch.bfloat16).contiguous()
                crc32 = zlib.crc32(rounded.view(torch.uint8).numpy().data, crc32)
    return crc32


def check_base(adapters: Source | None, base: Source, flag: str) -> int:
    """The checksum of ``base``, which ``flag`` gave; UserError if ``adapters`` state that theirs is another model."""
    found = model_crc32(base)
    if adapters is not None and adapters.base_crc32 not in (None, found):
        named = f" ({adapters.base_name})" if adapters.base_name else ""
        raise UserError(f"{adapters.path} holds adapters of another base model than {base.path}: its checksum was "
                        f"{adapters.base_crc32}, but {base.path} has {found}. Give the model that they were trained "
                        f"on{named} as {flag}.")
    return found


def base_to_name(base: Mapping[str, Any] | None, hf_dir: str, model: ModelConfig) -> str | None:
    """The directory that an export names as the base model of its adapters, ``CheckpointManifest.base``.

    PEFT cannot load another format than Hugging Face's, so then ``hf_dir`` is named if it holds the same weights.
    """
    if base is None:
        return None
    if not (Path(base["path"]) / "config.json").is_file():
        with suppress(UserError, OSError):
            if model_crc32(open_base(hf_dir, model)) == base["crc32"]:
                return os.path.abspath(hf_dir)
    return base["path"]


def base_notes(adapters: Source, base: Source) -> list[str]:
    """A note if ``adapters`` have no checksum, as PEFT writes them, and name another model than ``base``."""
    name = adapters.base_name
    if adapters.base_crc32 is not None or not name:
        return []
    if Path(name).name in (base.path.absolute().name, base.path.resolve().name):
        return []
    return [f"{adapters.path} names {name!r} as its base model, and {base.path} is given; the files do not show "
            f"whether that is the same model, so make sure that it is"]


# Conversions


def peft_to_mindspeed(
    lora_dir: str | Path, mm_dir: str | Path, layout: Layout, format: Format, base_dir: str | None = None
) -> Conversion:
    """PEFT directory -> MindSpeed-MM's layout; ``base_dir`` is the base model, by default the one the adapters name."""
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

    Without a manifest, ``layout``, ``base_dir`` and ``alpha`` must be given.
    """
    is_training = find_kind(mm_dir, "--cfg.mm_dir") is Kind.TRAINING
    source = open_saved(mm_dir) if is_training else _open_mindspeed_adapters(mm_dir, layout, base_dir, alpha)
    if base_dir is not None and source.base_crc32 is not None and os.path.isdir(base_dir):
        named = HFDirectory.open(base_dir, weights_required=False)
        if named.tensors:
            check_base(source, open_hf(named), HF_DIR)
    return export_peft(source, save_hf_dir, base_dir or source.base_name)


def _open_mindspeed_adapters(
    mm_dir: str | Path, layout: Layout | None, base_dir: str | None, alpha: float | None
) -> Source:
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
    """Adapters of any kind and the Hugging Face directory of their base model -> a whole model."""
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
    """``base`` with adapters inferred from tensors; all layers of a tower have the same."""
    ranks = {_kind(name): stored.shape[0] for contents in directory.contents.values()
             for name, stored in contents.items() if ".lora_A." in name and stored.shape and stored.shape[0]}
    whole = replace(base.unfrozen, lora=LoraConfig((ALL_LINEAR,), alpha=alpha))
    kinds = {one.layer: _kind(mindspeed_name(one.a.name)) for one in model_adapters(whole)}
    layers = {layer: ranks[kind] for layer, kind in kinds.items() if kind in ranks}
    return replace(whole, lora=LoraConfig(tuple(layers), alpha=alpha, rank_pattern=tuple(layers.items())))


def _kind(name: str) -> str:
    """MindSpeed-MM's name of a matrix without chunk and layer number, which restarts at 0 on every stage."""
    return re.sub(r"^model\d*/|\.layers\.\d+", "", name)


def export_peft(adapters: Source, target: str | Path, base: str | None) -> Conversion:
    """Export ``adapters`` and fully trained weights to a PEFT directory, which names ``base`` as its base model.

    A directory is named absolutely, because the export may be loaded from anywhere; any other name is one on a hub.
    """
    if base is not None and os.path.isdir(base):
        base = os.path.abspath(base)
    views, file = adapter_targets(adapters.model, adapters.dtypes, adapters.base_crc32)

    def write_others(folder: Path, _: Mapping[str, Crc32s]) -> None:
        (folder / CONFIG_FILE).write_text(config_text(adapters.model, base), encoding="utf-8")

    return copying(adapters, Path(target), [file], views, write_others, CONFIG_FILE)


def merge(adapters: Source, base: Source, hf_dir: str | Path, target: str | Path) -> Conversion:
    """Write a Hugging Face directory modelled on ``hf_dir``: the weights of ``base``, any source, with ``adapters``."""
    model = adapters.model
    like = HFDirectory.open(hf_dir, weights_required=False)
    like.check(model.base)
    check_base(adapters, base, HF_DIR)
    adapters = replace(adapters, notes=(*adapters.notes, *base_notes(adapters, base)))
    views, files = hf_targets(like, model.base, base.dtypes)
    found = {f"{one.layer}.weight": one for one in model_adapters(model)}
    trained = {one.name for one in saved_weights(model) if not one.is_adapter}

    def value(weight: Weight, key: str) -> Tensor:
        number = weight.hf_names.index(key)
        own = base.read_hf(weight, number)
        if weight.name in trained:
            return adapters.read_hf(weight, number).to(own.dtype)
        if key not in found:
            return own
        a, b = (adapters.read_hf(one, 0).float().flatten(1) for one in (found[key].a, found[key].b))
        return (own.float() + ((b @ a) * found[key].scale).view(own.shape)).to(own.dtype)

    def blocks(group: Sequence[View]) -> Blocks:
        for view in group:
            (span,) = view.spans
            assert span.key is not None, view
            yield view.stored, 0, tensor_bytes(value(view.weight, span.key))

    return Conversion((base, adapters), Path(target), files, views, blocks,
                      lambda folder, _: write_other_files(like, folder, files), HF_CONFIG_FILE, max_workers=1)
