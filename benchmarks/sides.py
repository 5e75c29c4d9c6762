"""The two sides of a comparison: a training step by this trainer, and by plain transformers with the same weights.

Import it after ``Device.pick``.
"""

import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.fusion_mapping import register_fusion_patches
from transformers.monkey_patching import apply_patches, clear_patch_mapping

from benchmarks.measure import model_config
from mm.batch import BatchTotals, Microbatch, StepPlan, image_passes, normalised
from mm.config import args as arguments
from mm.config.model import ModelConfig
from mm.data.loader.broadcast import deal_images
from mm.device.device import Device
from mm.families.qwen2_5_vl import KEYS
from mm.model.load import set_weight
from mm.model.stage import Stage
from mm.parallel import mesh as parallel
from mm.parallel.activity import Activity, Work
from mm.parallel.megatron import DTYPES
from mm.process import free_port
from mm.run.step import Setup, forward_backward, step
from mm.weights.fuse import fuse, shard
from mm.weights.shard import MemoryLayout
from mm.weights.table import model_weights, published_name
from tests.microbatches import own_pixels

LR = 1e-5


class _AfterReduction:
    """A listener that calls a function when the gradients of a step are reduced."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def begin(self, activity: Activity) -> None: ...

    def end(self, activity: Activity) -> None:
        if activity.work is Work.REDUCTION:
            self._call()


def resized(model: ModelConfig, vision: dict[str, Any], language: dict[str, Any]) -> ModelConfig:
    """``model`` with these settings of its towers replaced, and a projector and a head width that fit them."""
    own = dataclasses.replace(model.language, **language)
    head = {"kv_channels": own.hidden_size // own.num_attention_heads}
    towers = {"vision": dataclasses.replace(model.vision, **vision),
              "language": dataclasses.replace(own, **head)}  # fmt: skip
    hidden = towers["vision"].hidden_size
    projector = dataclasses.replace(model.projector, input_size=hidden, ffn_hidden_size=4 * hidden,
                                    hidden_size=towers["language"].hidden_size)  # fmt: skip
    return dataclasses.replace(model, projector=projector, **towers)


def hf_config(model: ModelConfig) -> Qwen2_5_VLConfig:
    """transformers' config of the same model."""
    sections: dict[str, dict[str, Any]] = {"text": {}, "rope": {}, "vision": {}, "top": {}}
    for setting, key in KEYS.items():
        value = attrgetter(setting)(model)
        sections[key.section][key.names[0]] = list(value) if isinstance(value, tuple) else value
    tied = model.language.tied
    rope = {"rope_type": "default", **sections["rope"]}
    return Qwen2_5_VLConfig(
        text_config={**sections["text"], "rope_parameters": rope, "tie_word_embeddings": tied, "use_cache": False,
                     "bos_token_id": 0, "eos_token_id": 1},
        vision_config=sections["vision"],
        vision_end_token_id=model.vision_start_token_id + 1,
        tie_word_embeddings=tied,
        **sections["top"],
    )  # fmt: skip


def random_tensors(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights by Hugging Face names, none of them at a special value; rounded to bf16 in every ``dtype``."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for weight in model_weights(model):
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            std = 0.1 if len(shape) == 1 else math.prod(shape[1:]) ** -0.5
            noise = std * torch.randn(shape, generator=generator, device=device)
            tensors[name] = (noise + weight.name.endswith("norm.weight")).bfloat16().to(dtype)
    return tensors


class Ours:
    """This trainer's step; ``tensors`` are weights by Hugging Face names."""

    def __init__(
        self, model: ModelConfig, device: Device, precision: str, tensors: dict[str, Tensor], tp_size: int = 1,
        sequence_parallel: bool = False, flags: Sequence[str] = ("--use-distributed-optimizer",),
    ) -> None:  # fmt: skip
        """``flags``: further ones of the run."""
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        args = arguments.parse([
            "--lr", str(LR), "--train-iters", "1", "--clip-grad", "1.0", "--weight-decay", "0.01", "--seq-length", "1",
            "--micro-batch-size", "1", "--mm-model", "-", "--mm-data", "-", *flags,
            *([f"--{precision}"] if precision != "fp32" else []),
        ])  # fmt: skip
        mesh = parallel.start(device, model, tp_size)
        stage = Stage(model, mesh, precision, device, sequence_parallel=sequence_parallel,
                      shards_weights=args.shards_weights)
        for weight in stage.weights:
            whole = fuse(weight, [tensors[name] for name in weight.hf_names])
            set_weight(stage, weight, shard(weight, whole, mesh.tp_size, mesh.tp_rank), mesh)
        self.setup = Setup.build(stage, mesh, args)

    def batches(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """The microbatches with this rank's pixels in pinned memory, as the trainer's data thread delivers them."""
        stage, context = self.setup.stage, self.setup.mesh.context
        own = [own_pixels(m, context) for m in deal_images(microbatches, stage.model, context.num_encoders)]
        pin = stage.device.runtime.pin
        return [m if m.pixel_values is None else dataclasses.replace(m, pixel_values=pin(m.pixel_values))
                for m in own]  # fmt: skip

    def pass_over(self, microbatches: list[Microbatch]) -> float:
        """Run the forward and backward passes; returns the loss."""
        return float(forward_backward(self.setup, self._plan(microbatches)))

    def step(self, microbatches: list[Microbatch]) -> tuple[float, float]:
        """Run one optimizer step; returns loss and gradient norm."""
        result = step(self.setup, self._plan(microbatches), LR)
        return result.loss, result.grad_norm

    def report_phases(self, begin: Callable[[str], None]) -> None:
        """From now on call ``begin`` when a step reaches "forward", "backward" and "optimizer".

        Uses two of torch's hooks and the journal, which hears of the reduction's end; the step does not change.
        """
        (model,) = self.setup.models
        model.register_forward_pre_hook(lambda *_: begin("forward"))
        model.register_forward_hook(lambda *_: begin("backward"))
        self.setup.stage.journal.listeners.append(_AfterReduction(lambda: begin("optimizer")))

    def _plan(self, microbatches: list[Microbatch]) -> StepPlan:
        """Every replica has these microbatches."""
        model, num_replicas = self.setup.stage.model, self.setup.mesh.dp_size
        return StepPlan(tuple(microbatches), BatchTotals.of(microbatches * num_replicas, model.vision),
                        image_passes=image_passes(microbatches, model.encoder_batch_size))

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by our names, in fp32 on the CPU, without padding."""
        stage: Any = self.setup.stage  # torch's types lack main_grad of its parameters
        trained = {name: p.main_grad for name, p in stage.named_parameters() if p.requires_grad}
        return {
            weight.name: MemoryLayout.of(weight, tp_size=1).unpad_whole(trained[weight.name].float().cpu())
            for weight in self.setup.stage.weights
            if weight.name in trained
        }

    def close(self) -> None:
        parallel.stop_mesh()


@functools.cache
def _use_linear_patch_embedding() -> ExitStack:
    """Make transformers' ViT embed patches by a matrix product; once a process, as older transformers need it.

    transformers would exchange the class for each model that it makes, and back, which takes seconds each time: it
    searches all of its modules.  It stays exchanged here.
    """
    config, exchanged = hf_config(model_config("tiny")), ExitStack()
    register_fusion_patches(Qwen2_5_VLForConditionalGeneration, config, {"patch_embeddings": True})
    exchanged.enter_context(apply_patches())
    clear_patch_mapping()
    return exchanged


class Peer:
    """transformers' model in a plain loop, tuned: fused AdamW, SDPA or FlashAttention, a linear patch embedding.

    Weights, gradients and the optimizer's state have the dtype of ``precision``; ours keep fp32 copies of all three,
    so the peer moves less memory.
    """

    def __init__(
        self, model: ModelConfig, device: torch.device, precision: str, tensors: dict[str, Tensor],
        attention: str = "sdpa", recompute: bool = False,
    ) -> None:  # fmt: skip
        config = hf_config(model)
        _use_linear_patch_embedding()
        with torch.device(device):
            self.model = Qwen2_5_VLForConditionalGeneration._from_config(
                config, dtype=DTYPES[precision], attn_implementation=attention
            )
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[hf_name(name)].reshape(parameter.shape))
                part = "projector" if "visual.merger" in name else "vision" if "visual" in name else "language"
                parameter.requires_grad_(not getattr(model, part).freeze)
        if recompute:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        self.image_token_id, self.device = model.image_token_id, device
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, fused=True)
        self._begin: Callable[[str], None] = lambda _: None

    def report_phases(self, begin: Callable[[str], None]) -> None:
        """Like ``Ours.report_phases``."""
        self.model.register_forward_pre_hook(lambda *_: begin("forward"))
        self.model.register_forward_hook(lambda *_: begin("backward"))
        self._begin = begin

    def batches(self, microbatches: list[Microbatch]) -> list[dict]:
        """In the form that transformers takes, on the device; batches without padding have no mask."""
        batches = peer_batches(tuple(microbatches), self.image_token_id)
        for batch in batches:
            if bool(batch["attention_mask"].all()):
                del batch["attention_mask"]
        return [{name: tensor.to(self.device) for name, tensor in batch.items()} for batch in batches]

    def pass_over(self, batches: list[dict], num_target_tokens: int) -> Tensor:
        """Run the forward and backward passes; returns the loss, on the device."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self.model(**batch, num_items_in_batch=num_target_tokens).loss
            loss.backward()
            total += loss.detach().float()
        return total

    def step(self, batches: list[dict], num_target_tokens: int) -> tuple[float, float]:
        """Run one optimizer step; returns loss and gradient norm."""
        loss = self.pass_over(batches, num_target_tokens)
        self._begin("optimizer")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        return float(loss), float(norm)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by Hugging Face names, in fp32 on the CPU."""
        return {
            hf_name(name): parameter.grad.float().cpu()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


def peer_batches(microbatches: tuple, image_token_id: int) -> list[dict]:
    """Our packed microbatches in transformers' form: a row per sample, padded on the right to the longest."""
    batches = []
    for microbatch in microbatches:
        ids = microbatch.token_ids.split(microbatch.segment_lengths)
        labels = microbatch.labels.split(microbatch.segment_lengths)
        rows, longest = len(ids), max(microbatch.segment_lengths)
        batch = {
            "input_ids": torch.zeros(rows, longest, dtype=torch.int64),
            "attention_mask": torch.zeros(rows, longest, dtype=torch.int64),
            "labels": torch.full((rows, longest), -100),
        }
        for row, (tokens, targets) in enumerate(zip(ids, labels, strict=True)):
            batch["input_ids"][row, : len(tokens)] = tokens
            batch["attention_mask"][row, : len(tokens)] = 1
            batch["labels"][row, 1 : len(tokens)] = targets[:-1]  # transformers shifts labels itself
        batch["mm_token_type_ids"] = (batch["input_ids"] == image_token_id).int()
        if microbatch.image_grids:
            batch["pixel_values"] = normalised(microbatch.pixel_values, microbatch.normalisations[0].constants())
            batch["image_grid_thw"] = torch.tensor(microbatch.image_grids)
        batches.append(batch)
    return batches


def hf_name(name: str) -> str:
    """The published name of a parameter of the peer, whose linear patch embedding has another name."""
    return published_name(name).replace("patch_embed.linear_proj", "patch_embed.proj")


def peer_attention() -> str:
    """The fastest implementation that is installed."""
    return "flash_attention_2" if importlib.util.find_spec("flash_attn") is not None else "sdpa"
