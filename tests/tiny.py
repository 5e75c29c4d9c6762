"""A small random Qwen2.5-VL, as transformers' model and as our config, and random mixed batches for both.

The transformers side is the oracle of the parity tests: it sees each sample alone, unpacked, and computes its own
positions.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mm.batch import Grid, Microbatch
from mm.config.args import LossUnit
from mm.config.model import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from mm.model.qwen2_5_vl.positions import VideoTimes
from mm.placement import PipelineLayout
from mm.weights.fuse import fuse, local_shape
from mm.weights.table import Fusion, Weight, published_name
from tests.microbatches import NUM_TEXT_IDS, RawSample, packed, random_pixels

IMAGE, VIDEO, VISION_START, VISION_END = 250, 251, 252, 253
TOKENS_PER_SECOND = 4  # transformers' default
VOCAB = 256
NUM_VISION_LAYERS, NUM_LANGUAGE_LAYERS = 4, 4


def copied_weights(stage: Any) -> dict[str, Tensor]:
    """Copies of the whole weights that a rank of ``stage`` holds, with padding."""
    return {weight.name: values.clone() for weight, values in stage.whole_weights(stage.weights)}


def our_config(
    vision_layout: PipelineLayout, language_layout: PipelineLayout, tied: bool = False, freeze: tuple[str, ...] = (),
    freeze_layers: tuple[str, str] = ("", ""), freeze_modules: tuple[str, ...] = (),
    trainable_modules: tuple[str, ...] = (), num_key_heads: int = 2,
) -> ModelConfig:  # fmt: skip
    """The small model with the layers of the given layout.

    ``freeze`` names frozen parts, ``freeze_layers`` has layers of the ViT and of the LLM.
    """
    num_vision_layers = sum(map(sum, vision_layout))
    return ModelConfig(
        vision=VisionConfig(
            num_layers=num_vision_layers, pipeline_num_layers=vision_layout, hidden_size=32, ffn_hidden_size=42,
            num_attention_heads=4, window_attn_size=56,
            fullatt_block_indexes=tuple(layer for layer in (1, 3) if layer < num_vision_layers),
            freeze="vision" in freeze, freeze_layers=freeze_layers[0],
        ),
        projector=ProjectorConfig(input_size=32, ffn_hidden_size=128, hidden_size=48, freeze="projector" in freeze),
        language=LanguageConfig(
            num_layers=sum(map(sum, language_layout)), pipeline_num_layers=language_layout, hidden_size=48,
            ffn_hidden_size=72, num_attention_heads=4, num_query_groups=num_key_heads, vocab_size=VOCAB,
            max_position_embeddings=512, mrope_section=(2, 2, 2), kv_channels=12, rope_theta=10000.0,
            untie_embeddings_and_output_weights=not tied, freeze="language" in freeze, freeze_layers=freeze_layers[1],
        ),
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START, freeze_modules=freeze_modules,
        trainable_modules=trainable_modules,
    )  # fmt: skip


def hf_model(tied: bool = False, seed: int = 0, num_key_heads: int = 2) -> Qwen2_5_VLForConditionalGeneration:
    """transformers' model of the same sizes, with random weights that leave nothing at a special value."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": NUM_LANGUAGE_LAYERS,
            "num_attention_heads": 4, "num_key_value_heads": num_key_heads, "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
        },
        vision_config={
            "depth": NUM_VISION_LAYERS, "hidden_size": 32, "intermediate_size": 42, "num_heads": 4,
            "out_hidden_size": 48, "window_size": 56, "fullatt_block_indexes": [1, 3], "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": TOKENS_PER_SECOND,
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name or "ln_q" in name else 0.15 * noise)
    return model


def hf_tensors(model: Qwen2_5_VLForConditionalGeneration, gradients: bool = False) -> dict[str, Tensor]:
    """Weights, or gradients where there are any, under their published names."""
    return {
        published_name(name): (parameter.grad if gradients else parameter.detach())
        for name, parameter in model.named_parameters()
        if not gradients or parameter.grad is not None
    }


def whole(weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
    """The fused tensor of ``weight`` from Hugging Face tensors."""
    return fuse(weight, [tensors[name] for name in weight.hf_names])


def without_padding(weight: Weight, held: Tensor, tp_size: int) -> Tensor:
    """A rank's shard in the form of files, from its form in memory, whose padding must be zero."""
    if weight.tp_dim is None:
        return held
    num_blocks = 2 if weight.fusion is Fusion.GATE_UP else 1
    size = local_shape(weight, tp_size)[weight.tp_dim] // num_blocks
    blocks = held.chunk(num_blocks, weight.tp_dim)
    padding = [block.narrow(weight.tp_dim, size, block.shape[weight.tp_dim] - size) for block in blocks]
    assert not any(one.any() for one in padding), f"the padding of {weight.name} is not zero"
    return torch.cat([block.narrow(weight.tp_dim, 0, size) for block in blocks], dim=weight.tp_dim)


def random_sample(generator: torch.Generator, grids: tuple[Grid, ...], num_text_tokens: int) -> RawSample:
    """Text with the images and videos after its first three tokens; the last two thirds of what follows are targets.

    A first token is never a target, so a sample of one token has none.
    """
    text = torch.randint(0, NUM_TEXT_IDS, (num_text_tokens,), generator=generator)
    parts, targets = [text[:3]], [torch.zeros(len(text[:3]), dtype=torch.bool)]
    for t, h, w in grids:
        span = torch.tensor([VISION_START] + [IMAGE if t == 1 else VIDEO] * (t * h * w // 4) + [VISION_END])
        parts.append(span)
        targets.append(torch.zeros(len(span), dtype=torch.bool))
    rest = text[3:]
    parts.append(rest)
    targets.append(torch.arange(len(rest)) >= len(rest) // 3)
    # a grid with more than one slice in time is a video; each has different, odd seconds
    videos = VideoTimes(VIDEO, TOKENS_PER_SECOND, tuple(0.37 * t + 0.01 * h if t > 1 else None for t, h, _ in grids))
    pixels = random_pixels(grids, 1176, generator)
    return RawSample(torch.cat(parts), torch.cat(targets), grids, pixels, videos)


def microbatch(samples: list[RawSample]) -> Microbatch:
    """Pack ``samples`` in the order given."""
    return packed(samples, our_config(((NUM_VISION_LAYERS,),), ((NUM_LANGUAGE_LAYERS,),)))


def hf_logits(model: Qwen2_5_VLForConditionalGeneration, sample: RawSample) -> Tensor:
    """[num_tokens, vocabulary] of one unpacked sample."""
    extra = {}
    pixels = [] if sample.pixel_values is None else sample.pixel_values.split([t * h * w for t, h, w in sample.grids])
    for is_video, names in ((False, ("pixel_values", "image_grid_thw")),
                            (True, ("pixel_values_videos", "video_grid_thw"))):
        numbers = [number for number, (t, _, _) in enumerate(sample.grids) if (t > 1) == is_video]
        if numbers:
            values = torch.cat([pixels[number] for number in numbers])
            extra |= dict(zip(names, (values, torch.tensor([sample.grids[number] for number in numbers])), strict=True))
    seconds = [one for one in sample.videos.seconds if one is not None] if sample.videos else []
    if seconds:
        extra["second_per_grid_ts"] = torch.tensor(seconds)
    return model(
        input_ids=sample.token_ids[None],
        mm_token_type_ids=((sample.token_ids == IMAGE) + 2 * (sample.token_ids == VIDEO)).int()[None],
        **extra,
    ).logits[0]


def hf_loss(
    model: Qwen2_5_VLForConditionalGeneration, microbatches: list[list[RawSample]], unit: LossUnit = "token"
) -> Tensor:
    """Mean loss over all target tokens, or the mean of the means of each sample or microbatch; 0 without a target."""
    losses: list[list[Tensor]] = []
    for microbatch in microbatches:
        losses.append([])
        for sample in microbatch:
            target = sample.is_target[1:]
            logits = hf_logits(model, sample)[:-1][target]
            ids = sample.token_ids[1:][target]
            losses[-1].append(torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none"))
    match unit:
        case "token":
            return _mean([tokens for samples in losses for tokens in samples])
        case "sample":
            of_samples = [tokens.mean() for samples in losses for tokens in samples if len(tokens)]
            return torch.stack(of_samples).mean() if of_samples else _mean(losses[0])
        case "microbatch":
            return torch.stack([_mean(samples) for samples in losses]).mean()


def _mean(losses: list[Tensor]) -> Tensor:
    """Mean over all tokens; without any, a 0 with a graph."""
    tokens = torch.cat(losses)
    return tokens.mean() if len(tokens) else tokens.sum()
