"""Reads and writes Hugging Face model directories, through the weight table.

Knows nothing of devices or processes; every name, shape and fusion comes from ``mm.weights.table``.
"""

import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.formats.hf_compare import hf_problems
from checkpoint.formats.hf_config import for_both_versions, model_from_hf
from checkpoint.formats.hf_files import (
    INDEX_FILE,
    SINGLE_FILE,
    HFTensor,
    dtype_name,
    find_shards,
    is_model_weights,
    read_config,
    read_tensors,
    with_dtype,
)
from checkpoint.formats.spelling import published_name
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.placement import PipelineLayout
from mm.weights.table import (
    HF_EMBEDDING_NAME,
    HF_OUTPUT_LAYER_NAME,
    Weight,
    fuse_parts,
    hf_ranges,
    model_weights,
    unfuse,
)

_COMPARED_ROWS = 8192
"""Rows of a vocabulary matrix compared at once: bounds the memory."""
_SHARD_BYTES = 5_000_000_000
"""Size of a shard file where the base has none to follow; transformers 4 wrote 5 GB too."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".bin.index.json")


@dataclass(frozen=True)
class HFDirectory:
    """A Hugging Face directory whose files were found whole and consistent."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, HFTensor]
    """By published name, in the order of the files."""
    index: Mapping[str, Any] | None
    """The parsed index; None for a single file."""

    @classmethod
    def open(cls, path: str | Path, weights_required: bool = True) -> "HFDirectory":
        """Find and check config and shards; only headers are read.

        With ``weights_required=False`` a directory without any weights is accepted too (``tensors`` is empty).

        Raises:
            UserError: not a Qwen2.5-VL directory, or its weights are incomplete, damaged or of another format.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory; expected a Hugging Face model directory.")
        files = sorted(file.name for file in directory.iterdir())
        has_weights = any(is_model_weights(name) for name in files)
        if not has_weights and any(name.startswith("adapter_") for name in files):
            raise UserError(
                f"{directory} holds a LoRA adapter ({', '.join(n for n in files if n.startswith('adapter_'))}), not a "
                f"model; give the directory of its base model (adapter_config.json: base_model_name_or_path)."
            )
        config = read_config(directory)
        if not (has_weights or weights_required or any(name.endswith(".bin") for name in files)):
            return cls(directory, config, {}, None)
        index, shards = find_shards(directory, files)
        return cls(directory, config, read_tensors(directory, index, shards), index)

    def model_config(
        self, vision_layout: PipelineLayout | None = None, language_layout: PipelineLayout | None = None
    ) -> ModelConfig:
        """The model that ``config.json`` describes (see ``checkpoint.formats.hf_config.model_from_hf``)."""
        return model_from_hf(self.config, vision_layout, language_layout)

    def check(self, model: ModelConfig) -> None:
        """Make sure that the directory holds exactly the weights of ``model``.

        Raises:
            UserError: naming each setting that differs from config.json, else each tensor that is missing, has
                another shape, or belongs to nothing.
        """
        problems = hf_problems(model, self.path, "The model JSON")
        if not problems and self.tensors:
            for weight in model_weights(model):
                for hf_name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
                    problems += self._tensor_problems(hf_name, shape)
            problems += [
                f"{self.tensors[published_name(name)].file} holds {name}, which is no weight of the model"
                f"{_hint(name)}."
                for name in self.unclaimed(model)
            ]
        if problems:
            raise UserError(problems)

    def unclaimed(self, model: ModelConfig) -> tuple[str, ...]:
        """Names, as in the files, of tensors that no weight of ``model`` reads.

        A tied model may come with an ``lm_head.weight`` when it equals the embedding.
        """
        claimed = {name for weight in model_weights(model) for name in weight.hf_names}
        left = [name for name in self.tensors if name not in claimed]
        if model.language.tied and HF_OUTPUT_LAYER_NAME in left and self._output_layer_is_embedding():
            left.remove(HF_OUTPUT_LAYER_NAME)
        return tuple(self.tensors[name].name for name in left)

    def load_weight(
        self, weight: Weight, tp_size: int = 1, tp_rank: int = 0, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """One TP rank's shard of ``weight``, padded; only the rows or columns that it needs are read.

        ``dtype`` converts; None keeps the dtype on disk.

        Raises:
            UserError: a tensor is missing or has another shape.
        """
        problems = [
            problem
            for hf_name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True)
            for problem in self._tensor_problems(hf_name, shape)
        ]
        if problems:
            raise UserError(problems)
        if weight.tp_dim is None:
            dim, ranges = 0, tuple((range(shape[0]),) for shape in weight.hf_shapes)
        else:
            dim, ranges = weight.tp_dim, hf_ranges(weight, tp_size, tp_rank)
        parts = [self.tensors[name].read(dim, kept) for name, kept in zip(weight.hf_names, ranges, strict=True)]
        shard = fuse_parts(weight, parts, tp_size)
        return shard if dtype is None else shard.to(dtype)

    def _tensor_problems(self, hf_name: str, shape: tuple[int, ...]) -> list[str]:
        tensor = self.tensors.get(hf_name)
        if tensor is None:
            return [f"{self.path} lacks the tensor {hf_name} of shape {list(shape)}{_hint(hf_name)}."]
        if tensor.shape != shape:
            return [
                f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}; the model needs {list(shape)}. "
                f"Give the weights that belong to the model JSON."
            ]
        return []

    def _output_layer_is_embedding(self) -> bool:
        head, embedding = self.tensors[HF_OUTPUT_LAYER_NAME], self.tensors.get(HF_EMBEDDING_NAME)
        if embedding is None or (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
            return False
        num_rows = head.shape[0]
        chunks = (range(row, min(row + _COMPARED_ROWS, num_rows)) for row in range(0, num_rows, _COMPARED_ROWS))
        return all(torch.equal(head.read(0, [rows]), embedding.read(0, [rows])) for rows in chunks)


def _hint(name: str) -> str:
    """Why an output layer may be missing or left over."""
    if published_name(name) != HF_OUTPUT_LAYER_NAME:
        return ""
    return (
        f" (the model JSON's text_decoder.untie_embeddings_and_output_weights must be true exactly when the model "
        f"has an output layer that differs from {HF_EMBEDDING_NAME})"
    )


# Writing


@dataclass(frozen=True)
class HFOutput:
    """One tensor to write: its key in the file, the published name that it comes from, its final dtype and size."""

    key: str
    source: str
    dtype: torch.dtype
    num_bytes: int


def write_hf(
    target_dir: str | Path,
    base_dir: str | Path,
    model: ModelConfig,
    tensors: Callable[[Weight], Tensor],
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write ``model`` as a Hugging Face directory like ``base_dir``, complete or not at all.

    ``tensors`` gives the whole fused tensor of a weight and is asked once for each; one shard file is in memory at a
    time.  Shard names, key spelling and dtypes are the base's where it has weights, else published names in shards of
    5 GB in the config's dtype.  ``dtype`` overrides them all, in config.json too.  Every other file at the top of
    the base is copied, except hidden ones and pickles (see ``copy_other_files``).

    Raises:
        UserError: the base does not fit the model, the target is the base, or is not empty (with ``overwrite``, a
            Hugging Face directory is replaced), or lacks space.
    """
    base = HFDirectory.open(base_dir, weights_required=False)
    base.check(model)
    target = Path(target_dir).resolve()
    shards = planned_shards(base, model, dtype)
    check_target(target, base.path.resolve(), overwrite, sum(o.num_bytes for part in shards.values() for o in part))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        copy_other_files(base, temporary, dtype)
        _write_shards(temporary, shards, model, tensors)
        if base.index is not None or len(shards) > 1:
            sizes_bytes = {file: {output.key: output.num_bytes for output in part} for file, part in shards.items()}
            write_index(temporary, sizes_bytes, base.index)
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        _replace(target, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def planned_shards(base: HFDirectory, model: ModelConfig, dtype: torch.dtype | None) -> dict[str, list[HFOutput]]:
    """What each shard file of a new directory like ``base`` holds, in order; see ``write_hf``."""
    return _shards_of_base(base, model, dtype) if base.tensors else _new_shards(base, model, dtype)


def _shards_of_base(base: HFDirectory, model: ModelConfig, dtype: torch.dtype | None) -> dict[str, list[HFOutput]]:
    shards: dict[str, list[HFOutput]] = {}
    for name, tensor in base.tensors.items():
        # A tied model's spare lm_head.weight stays, as what it is: the embedding.
        source = HF_EMBEDDING_NAME if model.language.tied and name == HF_OUTPUT_LAYER_NAME else name
        output = _output(tensor.name, source, dtype or tensor.dtype, tensor.shape)
        shards.setdefault(tensor.file.name, []).append(output)
    return shards


def _new_shards(base: HFDirectory, model: ModelConfig, dtype: torch.dtype | None) -> dict[str, list[HFOutput]]:
    dtype = dtype or _stated_dtype(base)
    parts, free_bytes = [[]], _SHARD_BYTES
    for weight in model_weights(model):
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            output = _output(name, name, dtype, shape)
            if parts[-1] and output.num_bytes > free_bytes:
                parts.append([])
                free_bytes = _SHARD_BYTES
            parts[-1].append(output)
            free_bytes -= output.num_bytes
    if len(parts) == 1:
        return {SINGLE_FILE: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, start=1)}


def _stated_dtype(base: HFDirectory) -> torch.dtype:
    name = dtype_name(base.config)
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"{base.path / 'config.json'} says dtype {name!r} and the directory has no weights to follow; expected "
            f"for example 'bfloat16'. Give the dtype to write."
        )
    return dtype


def _output(key: str, source: str, dtype: torch.dtype, shape: tuple[int, ...]) -> HFOutput:
    return HFOutput(key, source, dtype, torch.Size(shape).numel() * dtype.itemsize)


def check_target(target: Path, base: Path, overwrite: bool, num_bytes: int) -> None:
    """Refuse, before any work, a target that must not or cannot be written.  Both paths are resolved."""
    if base.is_relative_to(target):
        raise UserError(f"The target {target} is or contains the base directory {base}; give another target.")
    if target.exists() and not target.is_dir():
        raise UserError(f"The target {target} is a file; give a directory that does not exist yet.")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise UserError(f"The target {target} is not empty; give another one, or allow it to be overwritten.")
        if not (target / "config.json").is_file():
            raise UserError(
                f"The target {target} is not empty and no Hugging Face directory (it has no config.json), "
                f"so it is not overwritten; give another one."
            )
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if not os.access(existing if existing != target else target.parent, os.W_OK):
        raise UserError(f"The target {target} cannot be written: no permission for {existing}.")
    free_bytes = shutil.disk_usage(existing).free
    if num_bytes > free_bytes:
        raise UserError(
            f"The target {target} needs {num_bytes / 1e9:.1f} GB, but only {free_bytes / 1e9:.1f} GB are "
            f"free; make room or give another disk."
        )


def copy_other_files(base: HFDirectory, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy what is neither weights, pickle nor hidden.

    config.json says ``dtype`` unless that is None, and gets what one of transformers 4.57 and 5 would miss in it; where
    neither changes anything, it is the base's to the byte.
    """
    for file in sorted(base.path.iterdir()):
        is_weights = is_model_weights(file.name) or file.name.endswith(_PICKLE_SUFFIXES)
        if file.is_file() and not is_weights and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
    config = base.config if dtype is None else with_dtype(base.config, str(dtype).removeprefix("torch."))
    patched = for_both_versions(config)
    if patched != base.config:
        (folder / "config.json").write_text(json.dumps(patched, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shards(
    folder: Path, shards: Mapping[str, list[HFOutput]], model: ModelConfig, tensors: Callable[[Weight], Tensor]
) -> None:
    weights = {name: weight for weight in model_weights(model) for name in weight.hf_names}
    uses = Counter(output.source for outputs in shards.values() for output in outputs)
    pending: dict[str, Tensor] = {}  # what a fused weight gave beyond the tensor asked for, perhaps for a later shard
    for file, outputs in shards.items():
        content = {}
        for output in outputs:
            if output.source not in pending:
                weight = weights[output.source]
                pending.update(zip(weight.hf_names, unfuse(weight, tensors(weight)), strict=True))
            uses[output.source] -= 1
            used_again = uses[output.source] > 0
            piece = pending[output.source] if used_again else pending.pop(output.source)
            content[output.key] = piece.detach().to("cpu", output.dtype, copy=used_again)
        path = folder / file
        path.touch()
        mode = path.stat().st_mode  # as the umask has it; safetensors makes files of mode 600
        save_file(content, path, metadata={"format": "pt"})
        path.chmod(mode)


def write_index(
    folder: Path, sizes_bytes: Mapping[str, Mapping[str, int]], base_index: Mapping[str, Any] | None
) -> None:
    """Write the index of tensors, given their sizes by file and key; further metadata of ``base_index`` is kept."""
    total_bytes = sum(num_bytes for tensors in sizes_bytes.values() for num_bytes in tensors.values())
    metadata = {**(base_index or {}).get("metadata", {}), "total_size": total_bytes}
    weight_map = {key: file for file, tensors in sizes_bytes.items() for key in tensors}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    (folder / INDEX_FILE).write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Put a file or directory on the disk for good."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(target: Path, temporary: Path) -> None:
    """Put the finished directory in place; what stood there is removed only afterwards."""
    old = temporary.with_suffix(".old")
    if target.exists():
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    sync(target.parent)
    if old.exists():
        shutil.rmtree(old)
