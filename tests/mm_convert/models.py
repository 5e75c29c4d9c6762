"""Small random models as Hugging Face directories, written without transformers, and random valid layouts for them."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.cli import main
from mm.checkpoint.hf_config import model_from_hf
from mm.checkpoint.mindspeed_layout import RELEASE, Layout, Storage, mindspeed_targets
from mm.checkpoint.safetensors import safetensors_file
from mm.config.model import ModelConfig
from mm.placement import PipelineLayout
from mm.weights.table import model_weights
from mm.weights.views import TargetFile
from tests.saved_hf import Spelling, spell


@dataclass(frozen=True)
class SmallModel:
    """The random properties of a model."""

    max_tp_size: int
    vision_layers: int = 2
    language_layers: int = 3
    vision_ffn: int = 5
    language_ffn: int = 7
    queries_per_group: int = 2
    tied: bool = False
    spelling: Spelling = Spelling.PUBLISHED
    num_shards: int = 2

    @property
    def config(self) -> dict:
        """The content of config.json, with numbers of heads that ``max_tp_size`` divides."""
        groups = self.max_tp_size
        heads = groups * self.queries_per_group
        return {
            "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16", "vocab_size": 8 * 3, "hidden_size": 4 * heads,
            "intermediate_size": self.language_ffn, "num_hidden_layers": self.language_layers,
            "num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": 64,
            "rope_scaling": {"mrope_section": [1, 1, 0]}, "tie_word_embeddings": self.tied,
            "vision_config": {
                "depth": self.vision_layers, "hidden_size": 4 * groups, "intermediate_size": self.vision_ffn,
                "num_heads": groups, "out_hidden_size": 4 * heads, "patch_size": 2, "fullatt_block_indexes": [0],
            },
        }  # fmt: skip

    @property
    def model(self) -> ModelConfig:
        return model_from_hf(self.config)

    def save(self, directory: Path) -> dict[str, Tensor]:
        """Write the directory; return the tensors by published name."""
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        (directory / "tokenizer.json").write_text("{}")
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.randn(shape, generator=generator).bfloat16()
            for weight in model_weights(self.model)
            for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True)
        }
        spelled = {spell(name, self.spelling): tensor for name, tensor in tensors.items()}
        if self.num_shards == 1:
            save_file(spelled, directory / "model.safetensors", metadata={"format": "pt"})
            return tensors
        weight_map = {}
        for number in range(self.num_shards):
            file = f"model-{number + 1:05d}-of-{self.num_shards:05d}.safetensors"
            part = dict(list(spelled.items())[number :: self.num_shards])
            save_file(part, directory / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return tensors


@st.composite
def small_models(draw) -> SmallModel:
    return SmallModel(
        max_tp_size=draw(st.sampled_from((1, 2, 4, 8))), vision_layers=draw(st.integers(1, 4)),
        language_layers=draw(st.integers(1, 4)), vision_ffn=draw(st.integers(1, 9)),
        language_ffn=draw(st.integers(1, 9)), queries_per_group=draw(st.integers(1, 3)), tied=draw(st.booleans()),
        spelling=draw(st.sampled_from(Spelling)), num_shards=draw(st.integers(1, 3)))


@st.composite
def layouts(draw, small: SmallModel) -> Layout:
    """A valid layout: stages without layers, the ViT over several stages and chunks, cut or whole."""
    num_stages, num_chunks = draw(st.integers(1, 8)), draw(st.sampled_from((1, 1, 2, 3)))
    num_slots = num_stages * num_chunks
    last_vision = draw(st.integers(0, num_slots - 1))

    def counts(num_layers: int, first: int, last: int) -> list[int]:
        found = [0] * num_slots
        for slot in draw(st.lists(st.integers(first, last), min_size=num_layers, max_size=num_layers)):
            found[slot] += 1
        return found

    vision = counts(small.vision_layers, 0, last_vision)
    ends = max(slot for slot, count in enumerate(vision) if count)
    language = counts(small.language_layers, ends, num_slots - 1)
    tp_size = draw(st.sampled_from([size for size in (1, 2, 4, 8) if small.max_tp_size % size == 0]))
    encoder = draw(st.sampled_from(("cut", "tensor_ranks"))) if tp_size > 1 else "cut"
    return Layout(nested(vision, num_stages), nested(language, num_stages), tp_size, encoder)


def nested(counts: list[int], num_stages: int) -> PipelineLayout:
    return tuple(tuple(counts[start : start + num_stages]) for start in range(0, len(counts), num_stages))


def files(directory: Path) -> dict[str, bytes]:
    """All files by relative name."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def weights(directory: Path) -> dict[str, dict[str, Tensor]]:
    """Tensors by file and name; in a torch file the name follows the key of its chunk."""
    found = {str(path.relative_to(directory)): load_file(path) for path in directory.rglob("*.safetensors")}
    for path in directory.rglob("*.pt"):
        chunks = torch.load(path, weights_only=True)
        assert chunks.pop("checkpoint_version") == 3.0
        found[str(path.relative_to(directory))] = {
            f"{chunk}/{name}": tensor for chunk, tensors in chunks.items() for name, tensor in tensors.items()
        }
    return found


TARGET = {"target_parallel_config__llm_pp_layers": "[3]", "target_parallel_config__vit_pp_layers": "[2]"}


def run(command: str, **flags: object) -> int:
    """Run ``mm-convert`` in this process; ``__`` in a flag stands for a dot."""
    argv = [f"--cfg.{name.replace('__', '.')}={value}" for name, value in flags.items()]
    return main(["Qwen2_5_VLConverter", command, *argv])


def write_sparse_mm(model: ModelConfig, tp_size: int, kind: Storage, root: Path) -> None:
    """Write a directory in MindSpeed-MM's layout as sparse files, so a model of any size takes no space."""
    dtypes = {name: torch.bfloat16 for weight in model_weights(model) for name in weight.hf_names}
    _, planned = mindspeed_targets(model, tp_size, kind, dtypes)
    for file in planned:
        write_sparse(file, root / file.name)
    (root / "latest_checkpointed_iteration.txt").write_text(RELEASE)


def write_sparse_hf(config: dict, root: Path) -> None:
    """Write a Hugging Face directory as one sparse file, so a model of any size takes no space."""
    described = [(name, torch.bfloat16, shape) for weight in model_weights(model_from_hf(config))
                 for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True)]
    write_sparse(safetensors_file("model.safetensors", described), root / "model.safetensors")
    (root / "config.json").write_text(json.dumps(config))


def write_sparse(file: TargetFile, path: Path) -> None:
    path.parent.mkdir(parents=True)
    with path.open("wb") as opened:
        for offset, content in file.frame({tensor.name: 0 for tensor in file.tensors}):
            opened.seek(offset)
            opened.write(content)
        opened.truncate(file.num_bytes)
