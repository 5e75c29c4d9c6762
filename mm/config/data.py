"""The data JSON as frozen dataclasses, with every rule between its fields.

Keys of the file without a field are in ``mm.config.mindspeed``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import BeforeValidator, Field, Strict, StringConstraints
from pydantic.dataclasses import dataclass

from mm.config.mindspeed import DATA_KEYS
from mm.config.schema import (
    LOCAL,
    STRICT,
    Count,
    Fraction,
    Key,
    NaturalNumber,
    OrDefault,
    PathOrNone,
    PathText,
    Positive,
    ReadSettings,
    read_settings,
)

_PREPROCESS, _BASIC = "dataset_param.preprocess_parameters.", "dataset_param.basic_parameters."


def _paths(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


Paths = Annotated[
    tuple[Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)], ...],
    Strict(False), BeforeValidator(_paths), MinLen(1), Field(title="paths separated by commas, or a list of paths"),
]
_PATHS_OR_NULL = Field(title="paths separated by commas, a list of paths, or null")
ResizeRule = Literal["transformers", "llamafactory"]
Formatting = Literal["sharegpt", "alpaca"]
ImageBackend = Literal["pillow", "torch"]
VideoBackend = Literal["pyav", "decord", "torchcodec"]
SamplerType = Literal["BaseRandomBatchSampler", "stateful_distributed_sampler", "SequentialSampler",
                      "BucketBatchSampler", "BalancedBatchSampler"]
Truncation = Literal["turns", "tokens"]
PriorityMode = Literal["data_bucketing_img", "data_reordering_img"]


@dataclass(frozen=True, config=STRICT)
class Attributes:
    """Names of the columns and roles in the dataset, with LLaMA-Factory's keys and defaults.

    ``mm.data.records.formats`` also knows the usual names, and looks for them if a record has none of these.
    """

    formatting: Formatting = "sharegpt"
    """Lists of messages, or a column for the question and one for the answer."""
    messages: str = "conversations"
    images: str | None = None
    videos: str | None = None
    system: str | None = None
    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    system_tag: str | None = "system"
    prompt: Annotated[str, OrDefault] = "instruction"
    query: Annotated[str, OrDefault] = "input"
    """Text that follows the prompt on a separate line; a record may lack it."""
    response: Annotated[str, OrDefault] = "output"
    history: str | None = None
    """Earlier pairs of question and answer."""
    packing: Annotated[bool, OrDefault] = False
    """Means the same as ``packing`` and ``neat_packing`` of ``DataConfig``; MindSpeed-MM has all three."""


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The settings of ``--mm-data`` that have an effect."""

    model_name_or_path: Annotated[PathText, Key(_PREPROCESS + "model_name_or_path")]
    """Hugging Face directory that holds tokenizer, chat template and preprocessor config."""
    dataset: Annotated[Paths, LOCAL, Key(_BASIC + "dataset")]
    """JSON, JSONL or Parquet files, or names of ``dataset_info``, read in this order; ``%50`` after one takes half."""
    dataset_dir: Annotated[PathText, Key(_BASIC + "dataset_dir")] = "data"
    """Media must be below it, and their relative paths start here."""
    media_roots: Annotated[Paths | None, LOCAL, _PATHS_OR_NULL, Key(_BASIC + "media_roots")] = None
    """More folders below which media may be."""
    dataset_info: Annotated[PathOrNone, Key(_BASIC + "dataset_info")] = None
    """LLaMA-Factory's file of datasets by name; None: ``dataset_info.json`` in ``dataset_dir``, if there is one."""
    cache_dir: Annotated[PathOrNone, Key(_BASIC + "cache_dir")] = None
    """Folder of the index of the samples; None: ``.mm-index`` in ``dataset_dir``."""
    overwrite_cache: Annotated[bool, LOCAL, Key(_BASIC + "overwrite_cache")] = False
    """Rebuild the index at each start."""
    preprocessing_num_workers: Annotated[Count | None, LOCAL, Key(_BASIC + "preprocessing_num_workers")] = None
    """Processes that build the index; None: one for each processor."""
    val_dataset: Annotated[Paths | None, LOCAL, _PATHS_OR_NULL, Key(_BASIC + "val_dataset")] = None
    """Like ``dataset``, for validation."""
    val_rate: Annotated[Fraction | None, Key(_BASIC + "val_rate")] = None
    """Share of the samples that is drawn for validation, by ``--seed``; ``val_dataset`` takes precedence."""
    val_max_samples: Annotated[Count | None, Key(_BASIC + "val_max_samples")] = None
    attr: Annotated[Attributes, Key("dataset_param.attr.")] = Attributes()
    image_max_pixels: Annotated[
        Count, Key(_PREPROCESS + "image_max_pixels", old=_PREPROCESS + "image_resolution")] = 768 * 768
    image_min_pixels: Annotated[NaturalNumber, Key(_PREPROCESS + "image_min_pixels")] = 32 * 32
    image_resize: Annotated[ResizeRule | None, Key(_PREPROCESS + "image_resize")] = None
    """Rule for the size of an image; None: that of transformers, with a note where LLaMA-Factory's differs."""
    image_exif: Annotated[bool | None, Key(_PREPROCESS + "image_exif")] = None
    """Whether EXIF data turn a photograph upright; None: yes, except with LLaMA-Factory's rule, which never does."""
    image_backend: Annotated[ImageBackend, Key(_PREPROCESS + "image_backend")] = "pillow"
    """Resizes images: Pillow, bitwise as in transformers, or torch, which is faster and differs by at most 2 of 255."""
    video_max_pixels: Annotated[Count, Key(_PREPROCESS + "video_max_pixels")] = 256 * 256
    """Maximum pixels of a frame; ``video_min_pixels`` likewise."""
    video_min_pixels: Annotated[NaturalNumber, Key(_PREPROCESS + "video_min_pixels")] = 16 * 16
    video_total_pixels: Annotated[Count, Key(_PREPROCESS + "video_total_pixels")] = 128_000 * 28 * 28 * 9 // 10
    """Maximum for all frames of a video, two counting as one, as in qwen-vl-utils; not in LLaMA-Factory's rule."""
    video_fps: Annotated[Positive, Key(_PREPROCESS + "video_fps")] = 2.0
    """Frames sampled per second."""
    video_maxlen: Annotated[Count, Key(_PREPROCESS + "video_maxlen")] = 128
    """Maximum frames of a video."""
    video_min_frames: Annotated[Count, Key(_PREPROCESS + "video_min_frames")] = 4
    """Minimum frames of a video that has as many, up to ``video_maxlen``; not in LLaMA-Factory's rule."""
    video_backend: Annotated[VideoBackend | None, Key(_PREPROCESS + "video_backend")] = None
    """Library that decodes the frames; None: PyAV.  All give the same frames."""
    video_timeout: Annotated[Positive, Key(_PREPROCESS + "video_timeout")] = 300.0
    """Seconds for reading a video's header, and again for reading all its sampled frames.  The default is half the
    limit of a collective: one slow video must not make the waiting ranks time out."""
    train_on_prompt: Annotated[bool, Key(_BASIC + "train_on_prompt")] = False
    mask_history: Annotated[bool, Key(_BASIC + "mask_history")] = False
    truncation: Annotated[Truncation | None, Key(_BASIC + "truncation")] = None
    """What a sample longer than ``--seq-length`` loses: whole turns, or tokens by LLaMA-Factory's rule; None: turns
    with packing, else tokens.  Code reads ``drops_turns`` instead."""
    max_samples: Annotated[Count | None, Key(_BASIC + "max_samples")] = None
    packing: Annotated[bool, OrDefault, Key(_BASIC + "packing")] = False
    """Code reads ``packs`` instead."""
    neat_packing: Annotated[bool, OrDefault, Key(_BASIC + "neat_packing")] = False
    packing_max_patches: Annotated[Count | None, Key(_BASIC + "packing_max_patches")] = None
    """Maximum patches of a pack, besides its maximum of tokens; None: no maximum."""
    shuffle: Annotated[bool, Key("dataloader_param.shuffle")] = True
    """Has no effect with the SequentialSampler; code reads ``is_shuffled`` instead."""
    priority_mode: Annotated[PriorityMode, OrDefault, Key("dataloader_param.priority_mode")] = "data_bucketing_img"
    """Setting of the BucketBatchSampler."""
    prefetch_factor: Annotated[Count, OrDefault, LOCAL, Key("dataloader_param.prefetch_factor")] = 2
    sampler_type: Annotated[SamplerType, Key("dataloader_param.sampler_type")] = "stateful_distributed_sampler"

    @property
    def is_shuffled(self) -> bool:
        """Whether the order of the samples differs from that in the files."""
        return self.shuffle and self.sampler_type != "SequentialSampler"

    @property
    def packs(self) -> bool:
        """Whether a microbatch holds as many samples as fit, instead of a fixed number."""
        return self.packing or self.neat_packing or self.attr.packing

    @property
    def has_validation(self) -> bool:
        """Whether any samples are for validation."""
        return bool(self.val_dataset or self.val_rate)

    @property
    def drops_turns(self) -> bool:
        """Whether samples that are too long are shortened by whole turns."""
        return self.packs if self.truncation is None else self.truncation == "turns"

    @property
    def is_balanced(self) -> bool:
        """Whether samples are distributed over microbatches and replicas by their cost."""
        return self.sampler_type == "BalancedBatchSampler"


def read_data(path: str | Path) -> ReadSettings[DataConfig]:
    """Read ``--mm-data``; raises UserError with every problem in the file."""
    return read_settings(path, DataConfig, DATA_KEYS, _problems)


def _problems(data: DataConfig) -> Iterator[str]:
    """Rules between the fields of one data JSON."""
    for low, high in (("image_min_pixels", "image_max_pixels"), ("video_min_pixels", "video_max_pixels")):
        if getattr(data, low) > getattr(data, high):
            yield f"{low} is {getattr(data, low)}, above {high} = {getattr(data, high)}"
    if data.image_backend == "torch" and data.image_resize == "llamafactory":
        yield ("image_backend is 'torch' and image_resize 'llamafactory': that rule resizes by Pillow, so set "
               "image_backend to 'pillow'")
    if data.train_on_prompt and data.mask_history:
        yield "train_on_prompt and mask_history are both true; they exclude each other, so set one to false"
    if data.packs and data.sampler_type == "BucketBatchSampler":
        yield ("packing and sampler_type = \"BucketBatchSampler\" exclude each other, because packs mix long and short "
               "samples; set sampler_type to \"BalancedBatchSampler\", which makes packs of even cost")
    if data.packing_max_patches is not None and not data.packs:
        yield f"packing_max_patches is {data.packing_max_patches}, but packing is not true; set it to true"
