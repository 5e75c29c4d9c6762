"""The record of a family: the names and constants that configuration, weights, file formats and data ask.

Plain values and functions of plain values, so that every floor may ask: no torch, no settings of ours.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Section = Mapping[str, Any]
"""A part of a parsed ``config.json``."""


@dataclass(frozen=True)
class MindSpeedNames:
    """What MindSpeed-MM calls the family in its JSON files and in its converter."""

    model_ids: tuple[str, ...]
    """Names of the whole model, as are ``pipelines``."""
    pipelines: tuple[str, ...]
    vision_ids: tuple[str, ...]
    projector_ids: tuple[str, ...]
    language_ids: tuple[str, ...]
    templates: tuple[str, ...]
    """Chat templates."""
    collators: tuple[str, ...]
    converter: str


@dataclass(frozen=True)
class ChatTokens:
    """Control tokens of a conversation, as text, with the ids that a model JSON leaves out."""

    image: str
    """Stands where the visual tokens of a picture go; ``video`` for those of a video."""
    video: str
    vision_start: str
    """Right before a picture's or video's tokens, with ``vision_end`` right after them."""
    vision_end: str
    turn_start: str
    """Before the role, which a newline ends; then the text, and ``turn_end``."""
    turn_end: str
    box_start: str
    """Before the numbers of a place in a picture, with ``box_end`` after them; both may stand in a text."""
    box_end: str
    others: tuple[str, ...]
    """The rest of those that frame turns and media."""
    image_id: int
    video_id: int
    vision_start_id: int

    @property
    def needed(self) -> tuple[str, ...]:
        """Those that a tokenizer must have."""
        return self.image, self.video, self.vision_start, self.vision_end, self.turn_start, self.turn_end


@dataclass(frozen=True)
class LayerNames:
    """Hugging Face's names of the modules of a tower's layers, within a layer."""

    layers: str
    """Before the number of a layer."""
    first_norm: str
    qkv: tuple[str, ...]
    """One module that holds [Q; K; V], or those of q, k and v."""
    projection: str
    second_norm: str
    gate: str
    up: str
    down: str
    has_bias: bool
    """Whether every linear layer has a bias; qkv always has one."""


@dataclass(frozen=True)
class WeightNames:
    """Hugging Face's names of modules, as published: a tensor's name is its module's and ``weight`` or ``bias``."""

    patch_embedding: str
    vision_layer: LayerNames
    projector_norm: str
    projector_linears: tuple[str, str]
    embedding: str
    language_layer: LayerNames
    final_norm: str
    output_layer: str
    live_starts: Mapping[str, str]
    """How names begin in transformers' live module, and in files saved from its state dict -> as published: on the hub,
    and by ``save_pretrained``."""

    @property
    def embedding_weight(self) -> str:
        return f"{self.embedding}.weight"

    @property
    def output_layer_weight(self) -> str:
        return f"{self.output_layer}.weight"


@dataclass(frozen=True)
class ConfigJson:
    """What stands in ``config.json``."""

    model_type: str
    keys: Mapping[str, tuple[str, str, Any]]
    """Field of ours ("language.num_layers", or "image_token_id" at the top) -> section that holds it: "top", "text",
    "vision" or "rope" (rotary embedding), its names there, of which the first that is there counts, and the default of
    transformers; None for what a config must state."""
    fixed_problems: Callable[[Section, object], Iterator[str]]
    """What in a config, read from the file that the second argument names, asks for a model not computed here."""
    published: Mapping[str, Section]
    """Published sizes by name, each as its ``config.json`` has it, as far as it concerns the weights."""


@dataclass(frozen=True)
class Family:
    """One family of models: a ViT, a projector and an LLM."""

    title: str
    """For messages."""
    mindspeed: MindSpeedNames
    tokens: ChatTokens
    weights: WeightNames
    config_json: ConfigJson
    vision_epsilon: float
    """With which transformers computes the norms of ViT and projector, whatever ``config.json`` says."""
