"""The model JSON of a parity case."""

from dataclasses import replace

from mm.config.layers import OffloadConfig, RecomputeConfig
from mm.config.model import ModelConfig, Rates
from tests.parallel.cases import PROJECTOR_DECAY, PROJECTOR_LR, VISION_LR, Case
from tests.tiny import our_config


def config_of(case: Case) -> ModelConfig:
    config = our_config(case.vision_chunks, case.language_chunks, case.tied, case.freeze, case.freeze_layers,
                        case.freeze_modules, case.trainable_modules, case.num_key_heads)
    config = replace(config, encoder_batch_microbatches=case.encoder_batch,
                     encoder_placement="tensor_ranks" if case.whole_encoder else "cut")
    if case.groups:
        config = replace(config, vision=replace(config.vision, rates=Rates(VISION_LR)),
                         projector=replace(config.projector, rates=Rates(PROJECTOR_LR, PROJECTOR_DECAY)))
    if case.offload:
        vision, language = (replace(tower, offload=OffloadConfig(num_layers=case.offload))
                            for tower in (config.vision, config.language))
        config = replace(config, vision=vision, language=language)
    if case.recompute is None:
        return config
    how, *rest = case.recompute.split()
    recompute = RecomputeConfig("selective", modules=tuple(rest)) if how == "selective" else (
        RecomputeConfig("full", how, *map(int, rest or ["1"])))
    vision, language = (replace(tower, recompute=recompute) for tower in (config.vision, config.language))
    return replace(config, vision=vision, language=language)
