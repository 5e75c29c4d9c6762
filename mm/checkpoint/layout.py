"""The layout of a weight directory: pipeline lists, tensor-parallel size, and whether the encoder is cut.

The rules are in ``mm.placement`` and ``mm.config.model``; this module adds the names of the flags.
"""

import dataclasses
from dataclasses import dataclass

from mm.config.model import EncoderPlacement, ModelConfig
from mm.errors import refuse
from mm.placement import PipelineLayout, layout_problems


@dataclass(frozen=True)
class Layout:
    """Placement of a checkpoint's layers: ``[chunk][stage]`` lists, and how tensor-parallel ranks divide them."""

    vision: PipelineLayout
    language: PipelineLayout
    tp_size: int
    encoder: EncoderPlacement = "cut"

    @classmethod
    def of(cls, model: ModelConfig, tp_size: int) -> "Layout":
        """The layout on which ``model`` is placed."""
        return cls(model.vision.pipeline_num_layers, model.language.pipeline_num_layers, tp_size,
                   model.encoder_placement)

    def place(self, model: ModelConfig) -> ModelConfig:
        """``model`` on this layout."""
        return dataclasses.replace(
            model,
            vision=dataclasses.replace(model.vision, pipeline_num_layers=self.vision),
            language=dataclasses.replace(model.language, pipeline_num_layers=self.language),
            encoder_placement=self.encoder,
        )

    def __str__(self) -> str:
        vision, language = ([list(chunk) for chunk in layout] for layout in (self.vision, self.language))
        whole = f", encoder_placement {self.encoder}" if self.encoder != "cut" else ""
        return f"vit_pp_layers {vision}, llm_pp_layers {language}, tp_size {self.tp_size}{whole}"


def check_layout(layout: Layout, model: ModelConfig, flag: str) -> None:
    """Raise UserError if ``model`` cannot be placed or cut on ``layout``, which ``flag`` gave."""
    problems = layout_problems(
        layout.vision, layout.language, model.vision.num_layers, model.language.num_layers,
        f"{flag}.vit_pp_layers", f"{flag}.llm_pp_layers",
    )  # fmt: skip
    placed = dataclasses.replace(model, encoder_placement=layout.encoder)
    if layout.tp_size not in placed.tp_sizes:
        vision = "" if placed.encodes_whole else f", {model.vision.num_attention_heads} ViT heads"
        problems.append(
            f"{flag}.tp_size is {layout.tp_size}; it must divide the model's {model.language.num_query_groups} "
            f"key/value heads, {model.language.num_attention_heads} attention heads{vision} and "
            f"{model.language.vocab_size} vocabulary rows; legal sizes are {', '.join(map(str, placed.tp_sizes))}."
        )
    refuse(problems)
