"""A small random model as transformers saves it, for tests to read, copy and damage."""

import shutil
from enum import Enum
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests import tiny


class Spelling(Enum):
    """The two ways Hugging Face names these weights: prefixes of (ViT, LLM)."""

    PUBLISHED = ("visual.", "model.")
    """On the hub, and what ``save_pretrained`` writes."""
    MODULE = ("model.visual.", "model.language_model.")
    """Names of the live module since transformers 4.52, and of files saved from its state dict."""


def save(directory: Path, tied: bool) -> Path:
    """Write the small model of ``tests.tiny`` in several bfloat16 shards, with other files beside them."""
    tiny.hf_model(tied).bfloat16().save_pretrained(directory, max_shard_size="60KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "preprocessor_config.json").write_text("{}")
    (directory / "training_args.bin").write_bytes(b"a pickle")
    return directory


def as_single_file(directory: Path, spelling: Spelling = Spelling.PUBLISHED) -> dict[str, torch.Tensor]:
    """Rewrite the weights of ``directory`` as one file; return them."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= {spell(name, spelling): tensor for name, tensor in load_file(file).items()}
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def cast(directory: Path, target: Path, dtype: torch.dtype) -> Path:
    """A copy of ``directory`` whose weights have another dtype than its config.json states."""
    shutil.copytree(directory, target)
    for file in target.glob("*.safetensors"):
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def weight_files(directory: Path) -> dict[str, bytes]:
    """Contents of the shards and the index by file name."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if "model.safetensors" in file.name
            or file.suffix == ".safetensors"}


def spell(name: str, spelling: Spelling) -> str:
    """A published name (see ``published_name``) in the given spelling."""
    for published, spelled in zip(Spelling.PUBLISHED.value, spelling.value, strict=True):
        if name.startswith(published):
            return spelled + name.removeprefix(published)
    return name
