"""Opens a weight directory of any kind, and reads any of its weights for any layout.

A source is a set of views that cover the model: a Hugging Face directory, one in MindSpeed-MM's layout, a training
checkpoint or a PEFT directory.  Opening reads headers only.
"""

import hashlib
import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm.checkpoint.directories import LATEST_FILE, complete_iterations, find_checkpoint
from mm.checkpoint.hf import HFDirectory, language_views, output_layer_hint
from mm.checkpoint.hf_config import FREE_ON_RESUME, model_from_hf, stored_problems
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.checkpoint.mindspeed_layout import Layout, Storage, Structure
from mm.checkpoint.peft import AdapterDirectory, is_peft_directory
from mm.checkpoint.tensor_io import Files
from mm.checkpoint.training_manifest import CheckpointManifest, TrainingDirectory
from mm.config.args import VitQkvOrder
from mm.config.model import ModelConfig
from mm.errors import UserError, naming, refuse
from mm.families import FAMILIES
from mm.weights.fuse import local_shape
from mm.weights.table import Fusion, Weight, model_weights
from mm.weights.views import View, ViewIndex, cut_dim, shard_spans

BLOCK_BYTES = 1 << 26
"""Bytes of a tensor read at once: the memory that reading takes besides the weight itself."""
Directory = HFDirectory | MindSpeedDirectory | TrainingDirectory
"""Each has ``path``, ``contents`` (tensors by file and name), ``files`` and ``describe()``."""


class Kind(Enum):
    """Kinds of weight directories."""

    HUGGING_FACE = "Hugging Face directory"
    MINDSPEED = "MindSpeed-MM's layout"
    TRAINING = "training checkpoint"
    ADAPTER = "PEFT directory of adapters"


@dataclass(frozen=True)
class Source:
    """A set of weights on disk, of which only headers were read."""

    path: Path
    """The files of the views are relative to this directory."""
    kind: Kind
    model: ModelConfig
    """The model, on the layout of the directory."""
    tp_size: int
    views: tuple[View, ...]
    files: tuple[Path, ...]
    """All weight files, and config.json or manifest."""
    directory: Directory | AdapterDirectory
    storage: Storage | None = None
    iteration: int | None = None
    """Iteration of the training that wrote it; None if no training did."""
    consumed_samples: int | None = None
    """Samples consumed by that training; None if unknown."""
    notes: tuple[str, ...] = ()
    """Notes for the user: leftovers of an interrupted save, or how the order of the ViT's qkv was determined."""
    base_crc32: int | None = None
    """Checksum of the model that adapters were trained on (``model_crc32`` in mm.checkpoint.adapters), if stated."""
    base_name: str | None = None
    """Directory of that model, or its name on the hub, if stated."""

    @property
    def manifest(self) -> CheckpointManifest | None:
        """The manifest of a training checkpoint; None for any other kind."""
        return self.directory.manifest if isinstance(self.directory, TrainingDirectory) else None

    @property
    def is_vit_only(self) -> bool:
        """Whether it lacks the LLM (``save_vit_only``)."""
        return self.storage is not None and self.storage.vit_only

    @property
    def has_checksums(self) -> bool:
        """Whether a manifest has the checksum of every tensor; then its writer has checked copies and padding."""
        return all(view.stored.crc32 is not None for view in self.views)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes by published name; of a tensor that is stored in two, which a conversion refuses, the last."""
        return {span.key: view.stored.dtype for view in self.views for span in view.spans if span.key is not None}

    @property
    def layout(self) -> Layout:
        return Layout.of(self.model, self.tp_size)

    @property
    def fingerprint(self) -> str:
        """Identifies a version of the files without reading their weights: sizes, headers, modification times."""
        self.check_here()
        digest = hashlib.sha256()
        for path in sorted(self.files):
            state = path.stat()
            digest.update(f"{os.path.relpath(path, self.path)} {state.st_size} {state.st_mtime_ns}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(65536))
        return digest.hexdigest()

    @cached_property
    def index(self) -> ViewIndex:
        """Which tensor holds which range of the model, which must be equal, and which must be zero."""
        return ViewIndex(self.views)

    def check(self) -> None:
        """Raise UserError unless copies are equal and padding, which ``read`` does not read, is zero."""
        self.check_here()
        problems = []
        with Files(self.path) as files:
            for one, other in ((one.stored, other.stored) for one, other in self.index.copies):
                if not files.are_equal(one, other):
                    problems.append(
                        f"{self.path / other.file}: {other.name} differs from {one.name} in {self.path / one.file}, "
                        f"its copy; one of the files is damaged or of another model{output_layer_hint(other.name)}.")
            for padding in self.index.padding:
                if not files.is_zero(padding):
                    stored = padding.view.stored
                    problems.append(f"{self.path / stored.file}: the padding of {stored.name} is not zero; the file is "
                                    f"damaged or was cut for another TP size.")
        refuse(problems)

    def check_here(self) -> None:
        """Raise UserError if another node's disk holds some of the weights."""
        if isinstance(self.directory, TrainingDirectory):
            self.directory.check_here(view.stored.file for view in self.views)

    def check_model(self, model: ModelConfig) -> None:
        """Raise UserError naming every field in which ``model``, on any layout, differs from the stored model."""
        match self.directory:
            case HFDirectory():
                self.directory.check_config(model)
            case MindSpeedDirectory():
                refuse(stored_problems(self.path, self.model, model))
            case TrainingDirectory():
                refuse(stored_problems(self.path, self.model, model, but=FREE_ON_RESUME))
            case AdapterDirectory():
                refuse(self.directory.problems(model))

    def check_optimizer(self) -> None:
        """Raise UserError if a training of MindSpeed-MM wrote it, because its optimizer state cannot be read."""
        if self.iteration is not None and self.kind is Kind.MINDSPEED:
            raise UserError(f"--load {self.path} is a training checkpoint of MindSpeed-MM (iteration "
                            f"{self.iteration}), whose optimizer state cannot be read here; add --no-load-optim to "
                            f"continue from that iteration with new optimizer state, or --finetune to start at step 0 "
                            f"from its weights.")

    def read(
        self, weight: Weight, tp_size: int, tp_rank: int, dtype: torch.dtype, block_bytes: int = BLOCK_BYTES
    ) -> Tensor:
        """One tensor-parallel rank's shard of ``weight``, padded with zeros, as ``dtype``.

        A stored tensor with a checksum is read completely and verified; of others, only the rank's part is read.
        """
        advice = cure_of_damage(self.directory)
        shard = torch.zeros(local_shape(weight, tp_size), dtype=dtype)
        spans, filled, checked = shard_spans(weight, tp_size, tp_rank), 0, set()
        whole = shard.view(math.prod(shard.shape[: cut_dim(weight)]), sum(span.length for span in spans), -1)
        with Files(self.path) as files:
            for span in spans:
                found = self.index.find(span)
                for one in found:
                    if one.view not in checked:
                        if isinstance(self.directory, TrainingDirectory):
                            self.directory.check_here([one.view.stored.file])
                        files.check(one.view.stored, advice)
                        checked.add(one.view)
                    into = whole[:, filled + one.span.start - span.start :]
                    for rows, indices in one.view.blocks(range(one.start, one.stop), block_bytes):
                        block = files.tensor(one.view, rows, indices)
                        into[rows.start : rows.stop, indices.start - one.start :][:, : len(indices)] = block
                filled += span.length
        return shard

    def read_hf(self, weight: Weight, number: int) -> Tensor:
        """The Hugging Face tensor ``number`` of ``weight`` as stored, without verifying checksums."""
        key, shape, dim = weight.hf_names[number], weight.hf_shapes[number], cut_dim(weight)
        with Files(self.path) as files:
            return files.block(self.index, key, range(math.prod(shape[:dim])), range(shape[dim])).reshape(shape)


def cure_of_damage(directory: Directory | AdapterDirectory) -> str:
    """What to do if tensors of ``directory`` differ from its manifest, which ends the messages that say so."""
    return directory.instead if isinstance(directory, TrainingDirectory) else "convert again"


# Opening


@dataclass(frozen=True)
class QkvOrder:
    """How to find the row order of the ViT's qkv in a directory by MindSpeed-MM, which no file states.

    Its converters of 2.1.0 and since 26.0.0 write qkv per head, as its runtime reads it; those of 2.2.0 and 2.3.0 leave
    it as [Q; K; V] and cut that as a whole.  Comparing with a Hugging Face directory of the model shows which it is.
    """

    stated: VitQkvOrder | None = None
    """The order that the user states."""
    base: str | Path | None = None
    """A Hugging Face directory of the model, or of the model that the training started from."""
    flag: str = ""
    """The flag that states the order; if empty, the order is not examined."""


def find(path: str | Path, flag: str = "--load") -> Directory:
    """Open the directory at ``path``, which ``flag`` gave.  Only its headers are checked."""
    classes = {Kind.HUGGING_FACE: HFDirectory, Kind.MINDSPEED: MindSpeedDirectory, Kind.TRAINING: TrainingDirectory}
    return classes[find_kind(path, flag)].open(path)


def open_source(
    path: str | Path, flag: str = "--load", *, layout: Layout | None = None, layout_flag: str = "",
    model: ModelConfig | None = None, qkv: QkvOrder | None = None,
) -> Source:
    """Open a weight directory of any kind, which ``flag`` gave, as a source.

    ``layout`` is what the user stated with ``layout_flag``.  Directories in MindSpeed-MM's layout without a manifest
    need ``model`` and ``qkv``.
    """
    directory = find(path, flag)
    match directory:
        case HFDirectory():
            with naming(flag):
                source = open_hf(directory)
        case MindSpeedDirectory():
            source = _open_mindspeed(directory, layout, layout_flag, model, qkv or QkvOrder())
        case TrainingDirectory():
            source = open_training(directory)
            if layout not in (None, source.layout):
                raise UserError(f"{layout_flag} says {layout}, but {source.path} was saved with {source.layout}; leave "
                                f"{layout_flag} out.")
    return source


def open_to_train(
    path: str | Path, model: ModelConfig, needs_optimizer: bool = True, qkv: QkvOrder | None = None
) -> Source:
    """Open the directory of ``--load``, which must hold all of ``model``."""
    source = open_source(path, "--load", model=model, qkv=qkv)
    if needs_optimizer:
        source.check_optimizer()
    if source.is_vit_only:
        raise UserError(f"--load {path} holds no LLM (it was written with save_vit_only); give a whole model.")
    source.check_model(model)
    return source


def open_hf(directory: HFDirectory, language_path: str | Path | None = None) -> Source:
    """A Hugging Face directory as a source; with ``language_path``, the LLM comes from that directory."""
    model = directory.model_config()
    source = _source(directory, Kind.HUGGING_FACE, model, 1, directory.views(model))
    if language_path is None:
        return source
    language, files = language_views(language_path, directory.config, model)
    kept = (view for view in source.views if view.weight.part != "language")
    return replace(source, views=(*kept, *language), files=(*source.files, *files))


def open_training(directory: TrainingDirectory, takes_adapters: bool = False) -> Source:
    """The weights of a training checkpoint in the dtypes of the training, without its optimizer state."""
    manifest = directory.manifest
    base = manifest.base or {}
    if manifest.model.lora.is_on and not takes_adapters:
        raise UserError(f"{directory.path} holds adapters (LoRA) of the model in {base.get('path')}, not a whole "
                        f"model; continue training with the --lora-* flags of that run, or make a whole model with "
                        f"mm-convert merge_lora.")
    return _source(directory, Kind.TRAINING, manifest.model, manifest.tp_size, directory.views(),
                   iteration=manifest.iteration, consumed_samples=manifest.consumed_samples, notes=directory.notes,
                   base_crc32=base.get("crc32"), base_name=base.get("path"))


def open_adapter(directory: AdapterDirectory, model: ModelConfig, is_own: bool = False) -> Source:
    """A PEFT directory as a source: the adapters and fully trained modules of ``model`` (a run's, or its own)."""
    refuse(directory.problems(model, is_own))
    return _source(directory, Kind.ADAPTER, model, 1, directory.views(model), base_crc32=directory.base_crc32,
                   base_name=directory.base_name)


def _open_mindspeed(
    directory: MindSpeedDirectory, layout: Layout | None, layout_flag: str, model: ModelConfig | None, qkv: QkvOrder
) -> Source:
    if directory.storage.adapters_only:
        raise UserError(f"{directory.path} holds adapters (LoRA) in MindSpeed-MM's layout, not a model; give the "
                        f"--lora-* flags of their training, or make a PEFT directory with mm-convert lora_mm_to_hf.")
    if directory.manifest is None and model is None:
        model = _recognized(directory)
    placed, tp_size = directory.placed_model(layout, layout_flag, model)
    directory, notes = _in_qkv_order(directory, placed, tp_size, qkv)
    return _source(directory, Kind.MINDSPEED, placed, tp_size, directory.views(placed, tp_size),
                   storage=directory.storage, notes=notes, iteration=directory.iteration,
                   consumed_samples=directory.consumed_samples)


def _in_qkv_order(
    directory: MindSpeedDirectory, model: ModelConfig, tp_size: int, order: QkvOrder
) -> tuple[MindSpeedDirectory, tuple[str, ...]]:
    """Return ``directory`` annotated with its qkv order, and notes for the user.

    Directories by this project, and those of the canonical structure, have one possible order.
    """
    if directory.manifest is not None or directory.storage.structure is Structure.CANONICAL or not order.flag:
        return directory, ()
    whole = replace(directory, storage=replace(directory.storage, whole_vision_qkv=True))
    found = order.stated
    if found is None and order.base is not None:
        base = HFDirectory.open(order.base, weights_required=False)
        if base.tensors:
            found = _order_by_comparison(directory, whole, model, tp_size, base)
    if found is None:
        return directory, (
            f"{directory.path} has no manifest, so the order of the ViT's qkv is unknown; it is read per head.  If "
            f"MindSpeed-MM 2.2.0 or 2.3.0 converted it, give {order.flag} whole",)
    if found == "per_head":
        return directory, ()
    return whole, (f"{directory.path} has the ViT's qkv as a whole, as MindSpeed-MM 2.2.0 and 2.3.0 write it; it is "
                   f"read correctly here",)


def _order_by_comparison(
    per_head: MindSpeedDirectory, whole: MindSpeedDirectory, model: ModelConfig, tp_size: int, base: HFDirectory
) -> VitQkvOrder | None:
    """The order in which the ViT's first qkv is much closer to that of ``base``; None if neither is."""
    weight = next(weight for weight in model_weights(model) if weight.fusion is Fusion.PER_HEAD_QKV)
    sides = [(base.path, base.views(model)), *((one.path, one.views(model, tp_size)) for one in (per_head, whole))]
    if any(problems for _, (_, problems) in sides):
        return None
    expected, *both = (_rows(path, views, weight) for path, (views, _) in sides)
    one, other = (float((found - expected).abs().sum()) for found in both)
    if min(one, other) > max(one, other) / 2:
        return None
    return "whole" if other < one else "per_head"


def _rows(root: Path, views: list[View], weight: Weight) -> Tensor:
    """The whole Hugging Face tensor of ``weight`` in fp32."""
    with Files(root) as files:
        rows = range(weight.hf_shapes[0][0])
        return files.block(ViewIndex(views), weight.hf_names[0], range(1), rows)[0].float()


def _recognized(directory: MindSpeedDirectory) -> ModelConfig | None:
    """The published model whose tensors are all in ``directory``, which describes none; None if there is none.

    Heads cannot be read off the shapes of fused weights, so no other model can be recognized.
    """
    for config in (config for family in FAMILIES for config in family.config_json.published.values()):
        model = model_from_hf(config)
        with suppress(UserError):
            if not directory.views(*directory.placed_model(None, "", model))[1]:
                return model
    return None


def _source(
    directory: Directory | AdapterDirectory, kind: Kind, model: ModelConfig, tp_size: int,
    found: tuple[list[View], list[str]], **facts: Any,
) -> Source:
    views, problems = found
    refuse(problems)
    return Source(directory.path, kind, model, tp_size, tuple(views), directory.files, directory, **facts)


def holds_nothing(path: str | Path) -> bool:
    """Whether ``path`` is missing or has no weights of any kind; what interrupted saves left does not count."""
    path = Path(path)
    names = (MANIFEST_FILE, LATEST_FILE, "config.json")
    return not os.path.exists(path) or (
        path.is_dir() and not is_peft_directory(path) and not any((path / name).exists() for name in names)
        and not any(path.glob("mp_rank_*")) and not any(path.glob("*/mp_rank_*"))
        and not complete_iterations(path))


def find_kind(path: str | Path, flag: str = "--load") -> Kind:
    """Determine the kind of ``path``, which ``flag`` gave, from file names only."""
    path = Path(path)
    if not os.path.isdir(path):
        found = "is a file" if os.path.exists(path) else "does not exist"
        raise UserError(f"{flag} {path} {found}; expected a Hugging Face directory or a directory of checkpoints.")
    if any(path.glob("mp_rank_*")):
        raise UserError(f"{flag} {path} holds the ranks of one checkpoint; give the directory above, {path.parent}.")
    if any(path.glob("*/mp_rank_*")):
        return Kind.MINDSPEED
    if (path / MANIFEST_FILE).is_file() or any(path.glob(f"iter_*/{MANIFEST_FILE}")):
        return Kind.TRAINING
    if (path / "config.json").is_file():
        return Kind.HUGGING_FACE
    if is_peft_directory(path):
        raise UserError(f"{flag} {path} holds a LoRA adapter, not a model; give the directory of its base model, or "
                        f"--lora-target-modules and the other settings of its training.")
    if (path / LATEST_FILE).is_file() or any(path.glob("iter_*")):
        find_checkpoint(path)  # raises an error that explains the problem
    names = sorted(entry.name for entry in path.iterdir())
    raise UserError(f"{flag} {path} is neither a Hugging Face directory (no config.json) nor a directory of "
                    f"checkpoints (no {LATEST_FILE}); it holds {', '.join(names[:5]) or 'nothing'}.")
