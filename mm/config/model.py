"""The model and data JSON as frozen dataclasses, and every rule between their fields.

Knows nothing of devices, torch or megatron: it must run before any of them is touched.  The keys of the files stand in
``mm.config.keys``; this module says what the fields mean.  Rules that involve flags are in ``mm.config.rules``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm.config import keys
from mm.config.json_file import read_json
from mm.config.json_schema import PATHS, TEXT, Rule, SchemaReader, shown
from mm.errors import UserError, nearest
from mm.placement import PipelineLayout, Placement


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation recompute of one tower: ``granularity`` None (off), "full" or "selective" (core attention)."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None


@dataclass(frozen=True)
class VisionConfig:
    """The ViT.  JSON: ``image_encoder.vision_encoder``."""

    num_layers: int
    pipeline_num_layers: PipelineLayout
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    window_attn_size: int
    """Side of an attention window in pixels (112 in all published sizes)."""
    fullatt_block_indexes: tuple[int, ...]
    """Global numbers of the layers that attend over the whole image."""
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    layernorm_epsilon: float = 1e-6
    tokens_per_second: int = 2
    freeze: bool = True
    recompute: RecomputeConfig = RecomputeConfig()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_elements(self) -> int:
        """Numbers in one flattened patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class ProjectorConfig:
    """RMSNorm, merge of 2x2 patches, two linear layers.  JSON: ``image_encoder.vision_projector``."""

    input_size: int
    ffn_hidden_size: int
    hidden_size: int
    layernorm_epsilon: float = 1e-6
    freeze: bool = False


@dataclass(frozen=True)
class LanguageConfig:
    """The LLM.  JSON: ``text_decoder``."""

    num_layers: int
    pipeline_num_layers: PipelineLayout
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads."""
    vocab_size: int
    max_position_embeddings: int
    mrope_section: tuple[int, int, int]
    kv_channels: int
    """Width of one head."""
    rope_theta: float = 1_000_000.0
    untie_embeddings_and_output_weights: bool = True
    layernorm_epsilon: float = 1e-6
    init_method_std: float = 0.02
    freeze: bool = False
    recompute: RecomputeConfig = RecomputeConfig()

    @property
    def tied(self) -> bool:
        """Whether the output layer is the word embedding itself."""
        return not self.untie_embeddings_and_output_weights


@dataclass(frozen=True)
class ModelConfig:
    """The whole of ``--mm-model``."""

    vision: VisionConfig
    projector: ProjectorConfig
    language: LanguageConfig
    image_token_id: int = 151655
    """JSON: ``img_context_token_id``."""
    video_token_id: int = 151656
    vision_start_token_id: int = 151652

    @property
    def num_stages(self) -> int:
        """Pipeline stages: the length of the pipeline lists."""
        return len(self.language.pipeline_num_layers[0])

    @property
    def num_chunks(self) -> int:
        """Virtual chunks per stage; 1 without virtual pipeline stages."""
        return len(self.language.pipeline_num_layers)

    def is_frozen(self, part: str) -> bool:
        """Whether a part ("vision", "projector" or "language") is not trained."""
        return getattr(self, part).freeze

    def placement(self) -> Placement:
        """Which stage holds what; the pipeline lists must be legal, as those of every model that was read are."""
        return Placement.of(
            self.vision.pipeline_num_layers,
            self.language.pipeline_num_layers,
            vision_frozen=self.vision.freeze,
            projector_frozen=self.projector.freeze,
            language_frozen=self.language.freeze,
        )


@dataclass(frozen=True)
class Attributes:
    """Names of the columns and roles in the dataset.  JSON: ``dataset_param.attr``."""

    messages: str = "conversations"
    images: str | None = None
    system: str | None = None
    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    system_tag: str | None = "system"


@dataclass(frozen=True)
class DataConfig:
    """The whole of ``--mm-data``, as far as it has an effect."""

    model_name_or_path: str
    """Hugging Face directory that holds tokenizer, chat template and preprocessor config."""
    dataset: tuple[str, ...]
    """JSON or JSONL files, read in this order."""
    dataset_dir: str = "data"
    """Prefix of relative media paths."""
    attr: Attributes = Attributes()
    image_max_pixels: int = 768 * 768
    image_min_pixels: int = 32 * 32
    train_on_prompt: bool = False
    mask_history: bool = False
    max_samples: int | None = None
    shuffle: bool = True
    """False for the SequentialSampler or ``shuffle: false``."""
    prefetch_factor: int = 2


@dataclass(frozen=True)
class PrecisionClaim:
    """What one key of the model JSON says about the precision, to be compared with the flags."""

    where: str
    """``file:line: key.path``"""
    value: str
    """As the file has it."""
    precision: str
    is_on: bool
    """False for ``"bf16": false``, which excludes that precision."""


@dataclass(frozen=True)
class ModelFile:
    """A model JSON as it was read."""

    config: ModelConfig
    claims: tuple[PrecisionClaim, ...]
    notes: tuple[str, ...]
    """Which keys have no effect, and why."""


@dataclass(frozen=True)
class DataFile:
    """A data JSON as it was read."""

    config: DataConfig
    notes: tuple[str, ...]


def load_model(path: str | Path) -> ModelConfig:
    """Read ``--mm-model``; raises UserError with every problem in the file."""
    return read_model(path).config


def load_data(path: str | Path) -> DataConfig:
    """Read ``--mm-data``; raises UserError with every problem in the file."""
    return read_data(path).config


def read_model(path: str | Path) -> ModelFile:
    """Read a model JSON with its notes and precision claims; raises UserError with every problem in the file.

    Rules between the pipeline lists are not checked here but by ``mm.placement.layout_problems``.
    """
    reader = SchemaReader(read_json(path))
    claims: list[PrecisionClaim] = []
    top = reader.values("", keys.MODEL_KEYS) or {}
    reader.values("image_encoder", keys.IMAGE_ENCODER_KEYS)
    if top.get("patch") is not None:
        reader.values("patch", keys.PATCH_KEYS)

    def tower(cls: type, key_path: str, table: Mapping[str, Rule]) -> Any:
        values = reader.values(key_path, table)
        if values is None:
            return None
        claims.extend(_take_claims(reader, key_path, values))
        if cls is not ProjectorConfig:
            values["recompute"] = _take_recompute(reader, key_path, values)
        if cls is LanguageConfig and values.get("kv_channels") is None:
            if "hidden_size" in values and "num_attention_heads" in values:
                values["kv_channels"] = values["hidden_size"] // values["num_attention_heads"]
            else:
                values["kv_channels"] = 0  # not used: of the two, what is wrong is told
        return reader.build(cls, key_path, values, table)

    vision = tower(VisionConfig, "image_encoder.vision_encoder", keys.VISION_KEYS)
    projector = tower(ProjectorConfig, "image_encoder.vision_projector", keys.PROJECTOR_KEYS)
    language = tower(LanguageConfig, "text_decoder", keys.LANGUAGE_KEYS)
    tokens = {name: value for name, value in top.items() if name.endswith("_token_id")}
    model = ModelConfig(vision, projector, language, **tokens)
    if not reader.problems:
        reader.problems += [f"{path}: {problem}" for problem in _model_problems(model)]
    if reader.problems:
        raise UserError(reader.problems)
    return ModelFile(model, tuple(claims), tuple(reader.notes()))


def _take_claims(reader: SchemaReader, key_path: str, values: dict[str, Any]) -> list[PrecisionClaim]:
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    claims = []
    for key in keys.PRECISION_KEYS:
        if key not in values:
            continue
        value = values.pop(key)
        where = reader.document.at(f"{key_path}.{key}")
        if key != "params_dtype":
            claims.append(PrecisionClaim(where, shown(value), key, is_on=value))
        elif names.get(value, value) in names.values():
            claims.append(PrecisionClaim(where, shown(value), names.get(value, value), is_on=True))
        else:
            reader.problems.append(f"{where} is {shown(value)}; supported: \"bf16\", \"fp16\" or \"fp32\"")
    return claims


def _take_recompute(reader: SchemaReader, key_path: str, values: dict[str, Any]) -> RecomputeConfig:
    given = {key.removeprefix("recompute_"): values.pop(key) for key in keys.RECOMPUTE_KEYS if key in values}
    recompute = RecomputeConfig(**given)
    reader.problems += [f"{reader.document.path}: {problem}"
                        for problem in recompute_problems(recompute, f"{key_path}.recompute_")]
    return recompute


def recompute_problems(recompute: RecomputeConfig, prefix: str) -> list[str]:
    """Megatron's rules for the three recompute settings; ``prefix`` is how their names start in messages."""
    problems, count = [], prefix + ("num-layers" if prefix.startswith("--") else "num_layers")
    if recompute.granularity not in (None, "full", "selective"):
        problems.append(f"{prefix}granularity is {recompute.granularity!r}; supported: 'full' or 'selective'"
                        f"{nearest(recompute.granularity, ('full', 'selective'))}")
    if recompute.method not in (None, "uniform", "block"):
        problems.append(f"{prefix}method is {recompute.method!r}; supported: 'uniform' or 'block'")
    if recompute.granularity == "full" and (recompute.method is None or recompute.num_layers is None):
        problems.append(f"{prefix}granularity is 'full', which also needs {prefix}method ('uniform' or 'block') and "
                        f"{count}, for example 'uniform' and 1")
    elif recompute.granularity != "full" and (recompute.method or recompute.num_layers):
        problems.append(f"{prefix}method and {count} only go with {prefix}granularity 'full'; "
                        f"it is {recompute.granularity!r}")
    return problems


def _model_problems(model: ModelConfig) -> list[str]:
    """Rules between the fields of one model JSON."""
    vision, projector, language = model.vision, model.projector, model.language
    merged_size, window_unit = vision.spatial_merge_size**2, vision.patch_size * vision.spatial_merge_size
    outside = [index for index in vision.fullatt_block_indexes if not 0 <= index < vision.num_layers]
    rules = (
        (vision.hidden_size % (4 * vision.num_attention_heads) == 0,
         f"image_encoder.vision_encoder.hidden_size is {vision.hidden_size}; expected a multiple of 4 x "
         f"num_attention_heads = {4 * vision.num_attention_heads} (rotary embedding halves a head twice)"),
        (not outside,
         f"image_encoder.vision_encoder.fullatt_block_indexes has {outside}; expected layers 0 to "
         f"{vision.num_layers - 1}"),
        (len(set(vision.fullatt_block_indexes)) == len(vision.fullatt_block_indexes),
         f"image_encoder.vision_encoder.fullatt_block_indexes is {list(vision.fullatt_block_indexes)}, which names a "
         f"layer twice"),
        (vision.window_attn_size % window_unit == 0,
         f"image_encoder.vision_encoder.window_attn_size is {vision.window_attn_size} pixels; expected a multiple of "
         f"patch_size x spatial_merge_size = {window_unit}"),
        (projector.input_size == vision.hidden_size,
         f"image_encoder.vision_projector.input_size is {projector.input_size}; expected the ViT's hidden_size = "
         f"{vision.hidden_size}"),
        (projector.ffn_hidden_size == projector.input_size * merged_size,
         f"image_encoder.vision_projector.ffn_hidden_size is {projector.ffn_hidden_size}; expected input_size x "
         f"spatial_merge_size^2 = {projector.input_size * merged_size}"),
        (projector.hidden_size == language.hidden_size,
         f"image_encoder.vision_projector.hidden_size is {projector.hidden_size}; expected text_decoder.hidden_size = "
         f"{language.hidden_size}"),
        (language.kv_channels * language.num_attention_heads == language.hidden_size,
         f"text_decoder.hidden_size is {language.hidden_size}; expected num_attention_heads x kv_channels = "
         f"{language.num_attention_heads} x {language.kv_channels}"),
        (language.num_attention_heads % language.num_query_groups == 0,
         f"text_decoder.num_query_groups is {language.num_query_groups}; expected a divisor of num_attention_heads = "
         f"{language.num_attention_heads}"),
        (len(language.mrope_section) == 3 and 2 * sum(language.mrope_section) == language.kv_channels,
         f"text_decoder.mrope_section is {list(language.mrope_section)}; expected three numbers (time, height, width) "
         f"whose sum is half of kv_channels = {language.kv_channels // 2}"),
        (not (vision.freeze and projector.freeze and language.freeze),
         "image_encoder.vision_encoder.freeze, image_encoder.vision_projector.freeze and text_decoder.freeze are all "
         "true, so nothing would be trained; set one of them to false"),
        (model.image_token_id != model.video_token_id,
         f"img_context_token_id is {model.image_token_id}, the video token; this version trains on images, whose "
         f"token is 151655"),
    )
    return [problem for is_kept, problem in rules if not is_kept]


def read_data(path: str | Path) -> DataFile:
    """Read a data JSON with its notes; raises UserError with every problem in the file."""
    reader = SchemaReader(read_json(path))
    reader.values("", keys.DATA_KEYS)
    reader.values("dataset_param", keys.DATASET_KEYS)
    preprocess = reader.values("dataset_param.preprocess_parameters", keys.PREPROCESS_KEYS)
    basic = reader.values("dataset_param.basic_parameters", keys.BASIC_KEYS)
    attr = reader.build(Attributes, "dataset_param.attr",
                        reader.values("dataset_param.attr", keys.ATTRIBUTE_KEYS), keys.ATTRIBUTE_KEYS)
    loader = reader.values("dataloader_param", keys.DATALOADER_KEYS)
    if loader and loader.pop("collate_param", None) is not None:
        reader.values("dataloader_param.collate_param", keys.COLLATE_KEYS)
    sampler = (loader or {}).pop("sampler_type", "stateful_distributed_sampler")
    if sampler not in keys.SHUFFLING_SAMPLERS:
        where = reader.document.at("dataloader_param.sampler_type")
        reader.problems.append(f"{where} is {shown(sampler)}; supported: {', '.join(keys.SHUFFLING_SAMPLERS)}"
                               f"{nearest(sampler, keys.SHUFFLING_SAMPLERS)}")
    reader.problems += [f"{reader.document.path}: {problem}" for problem in _attribute_problems(attr)]
    reader.require("dataset_param.preprocess_parameters.model_name_or_path", TEXT)
    reader.require("dataset_param.basic_parameters.dataset", PATHS)
    if reader.problems:
        raise UserError(reader.problems)
    values = {**preprocess, **basic, **loader, "attr": attr}
    values["shuffle"] = keys.SHUFFLING_SAMPLERS[sampler] and values.get("shuffle", True)
    data = DataConfig(**{name: value for name, value in values.items() if value is not None or name == "max_samples"})
    return DataFile(data, tuple(reader.notes()))


def _attribute_problems(attr: Attributes | None) -> list[str]:
    """Names that must differ, because one would hide the other; None has problems of its own."""
    if attr is None:
        return []
    columns, keys_of_turn, roles = (
        ("messages", "images", "system"), ("role_tag", "content_tag"), ("user_tag", "assistant_tag", "system_tag"))
    problems = []
    for tags in (columns, keys_of_turn, roles):
        names = [getattr(attr, tag) for tag in tags if getattr(attr, tag) is not None]
        if len(set(names)) < len(names):
            values = ", ".join(f"{tag} = {getattr(attr, tag)!r}" for tag in tags)
            problems.append(f"dataset_param.attr has {values}; expected names that differ")
    return problems
