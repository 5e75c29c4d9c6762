"""Adapters that PEFT has trained go on here: the same loss, and the same tensors out again."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from mm.batch import IGNORE_INDEX
from mm.config.data import read_data
from mm.config.model import read_model
from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset
from tests.data.oracle import transformers_inputs
from tests.tiny_inputs import metrics, run, write_inputs

NUM_SAMPLES, NUM_STEPS = 10, 3
TARGETS = ("q_proj", "v_proj", "down_proj", "qkv", "mlp.0")
LOSS_TOLERANCE = 1e-5
"""Relative, fp32 on the CPU; measured 0 (both are 3.758559; the model without adapters has 6.256156)."""


def loss_of(model: PeftModel, samples: list[tuple[dict[str, Tensor], Tensor]]) -> Tensor:
    """Mean over all target tokens; each sample alone."""
    sums = [torch.nn.functional.cross_entropy(model(**inputs).logits[0], labels, ignore_index=IGNORE_INDEX,
                                              reduction="sum") for inputs, labels in samples]
    return torch.stack(sums).sum() / sum(int((labels != IGNORE_INDEX).sum()) for _, labels in samples)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("peft"))


@pytest.fixture(scope="module")
def losses(inputs: Path) -> list[float]:
    """PEFT's losses over all samples, before each step and after the last; the adapters are saved in ``adapters``."""
    data = read_data(inputs / "data.json").value
    encoder, dataset = SampleEncoder.from_config(data, read_model(inputs / "model_1.json").value, 512), Dataset(data)
    assert len(dataset) == NUM_SAMPLES
    encoded = [encoder.encode(dataset[number]) for number in range(NUM_SAMPLES)]
    samples = [(transformers_inputs(encoder, dataset[number], one), one.labels) for number, one in enumerate(encoded)]
    torch.manual_seed(5)
    model = get_peft_model(
        Qwen2_5_VLForConditionalGeneration.from_pretrained(inputs / "hf", dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=list(TARGETS)))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    found = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, samples)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    with torch.no_grad():
        found.append(float(loss_of(model, samples)))
    model.save_pretrained(inputs / "adapters")
    return found


def test_what_peft_has_trained_goes_on_here_on_two_stages(inputs: Path, losses: list[float]) -> None:
    """The first loss is the one after PEFT's last step; without a learning rate the tensors are PEFT's, bit for bit."""
    directory, out = inputs / "adapters", inputs / "went_on"
    said = run(inputs, "went_on", 2, "--load", str(directory), "--load-base-model", str(inputs / "hf"),
               "--lora-target-modules", *TARGETS, "--lora-r", "4", "--lora-alpha", "8", "--lr", "0",
               "--train-iters", "1", "--micro-batch-size", "5", "--global-batch-size", str(NUM_SAMPLES),
               "--export-hf", str(out / "adapters"))
    assert f"loaded a PEFT checkpoint from {directory} beside {inputs / 'hf'}" in said
    (row,) = metrics(inputs, "went_on")
    assert losses[0] - losses[-1] > 0.1, "PEFT's steps have changed the model"
    assert row["loss"] == pytest.approx(losses[-1], rel=LOSS_TOLERANCE), (row["loss"], losses)
    theirs, ours = (load_file(one / "adapter_model.safetensors") for one in (directory, out / "adapters"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(one, ours[name]) for name, one in theirs.items())
    configs = [json.loads((one / "adapter_config.json").read_text()) for one in (directory, out / "adapters")]
    assert all(one["r"] == 4 and one["lora_alpha"] == 8 for one in configs)
