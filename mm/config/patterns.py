"""How long patterns of weight names may be."""

from collections.abc import Iterator

from mm.config.model import ModelConfig

_LONGEST_PATTERN = 500


def long_patterns(model: ModelConfig, where: str) -> Iterator[str]:
    """Problems with patterns that are too long to be matched with every name quickly; ``where`` they are stated."""
    lora = model.lora
    found = {"freeze_modules": model.freeze_modules, "trainable_modules": model.trainable_modules,
             "lora_target_modules": lora.target_modules, "lora_rank_pattern": [name for name, _ in lora.rank_pattern],
             "lora_alpha_pattern": [name for name, _ in lora.alpha_pattern]}
    for key, patterns in found.items():
        for pattern in patterns:
            if len(pattern) > _LONGEST_PATTERN:
                yield (f"{where}: {key} has a pattern of {len(pattern):,} characters, {pattern[:40]!r}...; expected "
                       f"at most {_LONGEST_PATTERN}, because names have fewer")
