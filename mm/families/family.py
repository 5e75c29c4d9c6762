"""The record of a family: the plain names and constants that configuration, weights, file formats and data look up."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Section = Mapping[str, Any]
"""A part of a parsed ``config.json``."""
ROPE_KEYS = ("rope_parameters", "rope_scaling")
"""Keys of a tower's section of ``config.json`` that describe its rotary embedding: transformers 5's, then 4's."""


@dataclass(frozen=True)
class MindSpeedNames:
    """What MindSpeed-MM calls the family in its JSON files and in its converter."""

    model_ids: tuple[str, ...]
    """Values of ``model_id`` for the whole model; the three below are those for its parts."""
    vision_ids: tuple[str, ...]
    projector_ids: tuple[str, ...]
    language_ids: tuple[str, ...]
    pipelines: tuple[str, ...]
    """Values of ``pipeline_class``, which an inference JSON may have as ``model_id`` too."""
    templates: tuple[str, ...]
    """Chat templates."""
    collators: tuple[str, ...]
    converter: str


@dataclass(frozen=True)
class ChatTokens:
    """Control tokens of a conversation, as text, and default ids for the three that a model JSON may omit."""

    image: str
    """Placeholder for the visual tokens of an image; ``video`` is the one for a video."""
    video: str
    vision_start: str
    """Directly before the tokens of an image or video; ``vision_end`` is directly after them."""
    vision_end: str
    turn_start: str
    """Starts a turn: the role, a newline and the text follow, then ``turn_end``."""
    turn_end: str
    box_start: str
    """Before the coordinates of a box in an image; ``box_end`` follows them.  Both may occur in a text."""
    box_end: str
    others: tuple[str, ...]
    """Further control tokens of turns and media, which a tokenizer may lack."""
    image_id: int
    video_id: int
    vision_start_id: int

    @property
    def needed(self) -> tuple[str, ...]:
        """The tokens that a tokenizer must have."""
        return self.image, self.video, self.vision_start, self.vision_end, self.turn_start, self.turn_end


@dataclass(frozen=True)
class LayerNames:
    """Hugging Face's names of the modules in a tower's layers."""

    layers: str
    """What precedes a layer's number; the other names follow it."""
    first_norm: str
    qkv: tuple[str, ...]
    """One module that holds [Q; K; V], or one each for q, k and v."""
    projection: str
    second_norm: str
    gate: str
    up: str
    down: str
    has_bias: bool
    """Whether the linear layers besides qkv have a bias; qkv always has one."""


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
    """Prefix of a name in transformers' live module, and in its state dict -> prefix of the published name, which the
    hub and ``save_pretrained`` use."""

    @property
    def embedding_weight(self) -> str:
        return f"{self.embedding}.weight"

    @property
    def output_layer_weight(self) -> str:
        return f"{self.output_layer}.weight"


class ConfigKey(NamedTuple):
    """Where ``config.json`` states one of our fields."""

    section: str
    """"top", "text", "vision" or "rope" (rotary embedding)."""
    names: tuple[str, ...]
    """Spellings of the key; the first one present is used."""
    default: Any = None
    """The default of transformers; None if a config must state the value."""


@dataclass(frozen=True)
class ConfigJson:
    """The family's ``config.json``."""

    model_type: str
    keys: Mapping[str, ConfigKey]
    """By the name of our field: "language.num_layers", or "image_token_id" at the top."""
    fixed_problems: Callable[[Section, object], Iterator[str]]
    """Settings in a parsed config that ask for a model not computed here; the second argument is the file's name."""
    published: Mapping[str, Section]
    """Name of each published size -> the part of its ``config.json`` that determines the weights."""


@dataclass(frozen=True)
class Family:
    """One family of models: a ViT, a projector and an LLM."""

    title: str
    """Its name, as messages show it."""
    mindspeed: MindSpeedNames
    tokens: ChatTokens
    weights: WeightNames
    config_json: ConfigJson
    vision_epsilon: float
    """Epsilon of the norms in ViT and projector; transformers uses it regardless of ``config.json``."""
