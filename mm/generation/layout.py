"""Placement of a model on pipeline stages for generation.  It affects memory, not answers."""

from collections.abc import Iterator
from dataclasses import replace

from mm.config.model import ModelConfig
from mm.errors import refuse
from mm.placement import PipelineLayout


def placed(
    model: ModelConfig, tp_size: int, num_stages: int | None, world_size: int
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Place ``model`` on the requested number of stages; returns it with notes for the user.

    The model's pipeline_num_layers lists are used if they have that many stages; otherwise the weights are spread
    evenly.  Without ``num_stages`` the lists are used if the number of ranks allows it; otherwise there is one stage.
    Tensor-parallel ranks cut the ViT, because all of them answer the same prompts.  Raises UserError if ranks, heads or
    the vocabulary do not divide evenly.
    """
    model, own = replace(model, encoder_placement="cut"), model.num_stages
    if num_stages is None:
        num_stages = own if world_size % (tp_size * own) == 0 else 1
    refuse(_problems(model, tp_size, num_stages, world_size))
    if num_stages == own and (own > 1 or model.num_chunks == 1):
        return model, ()
    vision, language = even_lists(model, num_stages)
    notes = (f"the pipeline_num_layers lists are for {own} stages; with {num_stages}, the layers are {list(vision[0])} "
             f"of the ViT and {list(language[0])} of the LLM",)
    return replace(model, vision=replace(model.vision, pipeline_num_layers=vision),
                   language=replace(model.language, pipeline_num_layers=language)), notes if own > 1 else ()


def _problems(model: ModelConfig, tp_size: int, num_stages: int, world_size: int) -> Iterator[str]:
    if tp_size not in model.tp_sizes:
        yield (f"--tensor-model-parallel-size is {tp_size}, which does not divide the heads and the vocabulary of this "
               f"model; it allows {', '.join(map(str, model.tp_sizes))}")
    if world_size % (tp_size * num_stages):
        yield (f"The number of ranks is {world_size}, not a multiple of tensor x pipeline parallel size = {tp_size} x "
               f"{num_stages} = {tp_size * num_stages}; start that many with torchrun --nproc_per_node "
               f"{tp_size * num_stages}, or change --tensor-model-parallel-size or --pipeline-model-parallel-size")


def even_lists(model: ModelConfig, num_stages: int) -> tuple[PipelineLayout, PipelineLayout]:
    """Numbers of ViT and LLM layers per stage, for about equal weights per stage; one chunk."""
    vision, language = model.vision, model.language
    sizes = [4 * vision.hidden_size**2 + 3 * vision.hidden_size * vision.ffn_hidden_size] * vision.num_layers
    attention = 2 * (language.num_attention_heads + language.num_query_groups) * language.head_dim
    layer = language.hidden_size * (attention + 3 * language.ffn_hidden_size)
    layers = [layer] * language.num_layers
    vocabulary = language.vocab_size * language.hidden_size
    layers[0] += vocabulary
    layers[-1] += vocabulary
    sizes += layers
    counts = [[0] * num_stages, [0] * num_stages]
    before, total = 0, sum(sizes)
    for number, size in enumerate(sizes):  # to the stage whose share contains the layer's middle
        stage = int((before + size / 2) * num_stages / total)
        counts[number >= vision.num_layers][stage] += 1
        before += size
    return (tuple(counts[0]),), (tuple(counts[1]),)
