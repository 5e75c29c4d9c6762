"""PEFT's model of the same adapters as ours, on transformers' model."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from mm.config.model import ModelConfig
from mm.weights.table import live_name, published_name
from mm.weights.trained import model_adapters


def peft_config(model: ModelConfig) -> LoraConfig:
    """The same adapters in PEFT's settings: each layer by its full name, with its rank and alpha."""
    lora = model.lora
    live = {live_name(one.layer): one for one in model_adapters(model)}
    alphas = {name: one.alpha for name, one in live.items()}
    return LoraConfig(
        target_modules=list(live), r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, use_rslora=lora.use_rslora,
        rank_pattern={name: one.rank for name, one in live.items()}, alpha_pattern=alphas)


def peft_model(hf: PreTrainedModel, model: ModelConfig, seed: int = 1) -> PeftModel:
    """PEFT's model with random A and B.  PEFT starts with B at zero, where the gradient of A is zero."""
    peft = get_peft_model(hf, peft_config(model))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return peft


def table_name(name: str) -> str:
    """The name in our table of weights of a parameter of PEFT's model."""
    return published_name(name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", ""))


def peft_tensors(peft: PeftModel, gradients: bool = False) -> dict[str, Tensor]:
    """Weights, or gradients where there are any, under the names of our table."""
    values = {table_name(name): one.grad if gradients else one.detach() for name, one in peft.named_parameters()}
    return {name: value for name, value in values.items() if value is not None}
