"""The data JSON as frozen dataclasses, with every rule between its fields.

Keys of the file without a field are in ``mm.config.foreign``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import BeforeValidator, Field, Strict, StringConstraints
from pydantic.dataclasses import dataclass

from mm.config.foreign import DATA_KEYS
from mm.config.schema import (
    STRICT,
    Count,
    Fraction,
    Key,
    NaturalNumber,
    OrDefault,
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
    """Names of the columns and roles in the dataset, by LLaMA-Factory's words and with its defaults.

    ``mm.data.read.formats`` also knows the usual names, and looks for them where a record has none of these.
    """

    formatting: Formatting = "sharegpt"
    """Lists of messages, or one column each for question and answer."""
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
    """What follows the prompt on a line of its own; a record may lack it."""
    response: Annotated[str, OrDefault] = "output"
    history: str | None = None
    """Pairs of question and answer that came before."""
    packing: Annotated[bool, OrDefault] = False
    """The same as the two of ``DataConfig``: a user of MindSpeed-MM finds each of the three words somewhere."""


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The settings of ``--mm-data`` that have an effect."""

    model_name_or_path: Annotated[str, Key(_PREPROCESS + "model_name_or_path")]
    """Hugging Face directory that holds tokenizer, chat template and preprocessor config."""
    dataset: Annotated[Paths, Key(_BASIC + "dataset")]
    """JSON, JSONL or Parquet files, or names of ``dataset_info``, read in this order; ``%50`` after one takes half."""
    dataset_dir: Annotated[str, Key(_BASIC + "dataset_dir")] = "data"
    """Media lie below it, and relative paths of them begin here."""
    media_roots: Annotated[Paths | None, _PATHS_OR_NULL, Key(_BASIC + "media_roots")] = None
    """More folders below which media may lie."""
    dataset_info: Annotated[str | None, Key(_BASIC + "dataset_info")] = None
    """LLaMA-Factory's file of datasets by name; None: ``dataset_info.json`` in ``dataset_dir``, if there is one."""
    cache_dir: Annotated[str | None, Key(_BASIC + "cache_dir")] = None
    """Where the index of the samples is kept; None: ``.mm-index`` in ``dataset_dir``."""
    overwrite_cache: Annotated[bool, Key(_BASIC + "overwrite_cache")] = False
    """Rebuild the index at each start."""
    preprocessing_num_workers: Annotated[Count | None, Key(_BASIC + "preprocessing_num_workers")] = None
    """Processes that make the index; None: one for each processor."""
    val_dataset: Annotated[Paths | None, _PATHS_OR_NULL, Key(_BASIC + "val_dataset")] = None
    """Like ``dataset``, for validation."""
    val_rate: Annotated[Fraction | None, Key(_BASIC + "val_rate")] = None
    """The share of the samples that is kept for validation, drawn by ``--seed``; ``val_dataset`` wins over it."""
    val_max_samples: Annotated[Count | None, Key(_BASIC + "val_max_samples")] = None
    attr: Annotated[Attributes, Key("dataset_param.attr.")] = Attributes()
    image_max_pixels: Annotated[
        Count, Key(_PREPROCESS + "image_max_pixels", old=_PREPROCESS + "image_resolution")] = 768 * 768
    image_min_pixels: Annotated[NaturalNumber, Key(_PREPROCESS + "image_min_pixels")] = 32 * 32
    image_resize: Annotated[ResizeRule | None, Key(_PREPROCESS + "image_resize")] = None
    """Whose rule decides the size of an image; None: transformers', with a note where LLaMA-Factory's differs."""
    image_exif: Annotated[bool | None, Key(_PREPROCESS + "image_exif")] = None
    """Whether a photograph is turned upright, as its EXIF data say; None: yes, but LLaMA-Factory's rule never does."""
    image_backend: Annotated[ImageBackend, Key(_PREPROCESS + "image_backend")] = "pillow"
    """What resizes pictures: Pillow, to the bit, or torch, which is faster and differs by at most 2 of 255."""
    video_max_pixels: Annotated[Count, Key(_PREPROCESS + "video_max_pixels")] = 256 * 256
    """Most pixels of a frame, like ``video_min_pixels``."""
    video_min_pixels: Annotated[NaturalNumber, Key(_PREPROCESS + "video_min_pixels")] = 16 * 16
    video_total_pixels: Annotated[Count, Key(_PREPROCESS + "video_total_pixels")] = 128_000 * 28 * 28 * 9 // 10
    """Bound on all frames of a video, two counting as one: qwen-vl-utils'; LLaMA-Factory's rule has none."""
    video_fps: Annotated[Positive, Key(_PREPROCESS + "video_fps")] = 2.0
    """Frames that are taken of a second."""
    video_maxlen: Annotated[Count, Key(_PREPROCESS + "video_maxlen")] = 128
    """The most frames of a video."""
    video_min_frames: Annotated[Count, Key(_PREPROCESS + "video_min_frames")] = 4
    """The least frames of a video that has so many, up to ``video_maxlen``; LLaMA-Factory's rule has no such bound."""
    video_backend: Annotated[VideoBackend | None, Key(_PREPROCESS + "video_backend")] = None
    """What decodes the frames; None: PyAV.  All give the same frames."""
    video_timeout: Annotated[Positive, Key(_PREPROCESS + "video_timeout")] = 300.0
    """Seconds in which a video must give its header, and again all frames that are taken of it.  Half the limit of a
    collective: one slow video must not end the others' wait."""
    train_on_prompt: Annotated[bool, Key(_BASIC + "train_on_prompt")] = False
    mask_history: Annotated[bool, Key(_BASIC + "mask_history")] = False
    truncation: Annotated[Truncation | None, Key(_BASIC + "truncation")] = None
    """What a sample longer than ``--seq-length`` loses: whole turns, or tokens by LLaMA-Factory's rule; None: turns
    with packing, else tokens.  Ask ``drops_turns``."""
    max_samples: Annotated[Count | None, Key(_BASIC + "max_samples")] = None
    packing: Annotated[bool, OrDefault, Key(_BASIC + "packing")] = False
    """Ask ``packs``."""
    neat_packing: Annotated[bool, OrDefault, Key(_BASIC + "neat_packing")] = False
    packing_max_patches: Annotated[Count | None, Key(_BASIC + "packing_max_patches")] = None
    """Most patches of a pack, besides the bound on tokens; None: no bound."""
    shuffle: Annotated[bool, Key("dataloader_param.shuffle")] = True
    """Has no effect with the SequentialSampler; ask ``is_shuffled``."""
    priority_mode: Annotated[PriorityMode, OrDefault, Key("dataloader_param.priority_mode")] = "data_bucketing_img"
    """Setting of the BucketBatchSampler."""
    prefetch_factor: Annotated[Count, OrDefault, Key("dataloader_param.prefetch_factor")] = 2
    sampler_type: Annotated[SamplerType, Key("dataloader_param.sampler_type")] = "stateful_distributed_sampler"

    @property
    def is_shuffled(self) -> bool:
        """Whether the samples come in another order than they stand in the files."""
        return self.shuffle and self.sampler_type != "SequentialSampler"

    @property
    def packs(self) -> bool:
        """Whether a microbatch holds as many samples as fit, and not a fixed number."""
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
        """Whether samples are dealt to microbatches and replicas by what they cost."""
        return self.sampler_type == "BalancedBatchSampler"


def read_data(path: str | Path) -> ReadSettings[DataConfig]:
    """Read ``--mm-data``; raises UserError with every problem in the file."""
    return read_settings(path, DataConfig, DATA_KEYS, _problems)


def _problems(data: DataConfig) -> Iterator[str]:
    """Rules between the fields of one data JSON."""
    texts = ("prompt", "query", "response", "history") if data.attr.formatting == "alpaca" else ("messages",)
    names_that_differ = (
        (*texts, "images", "videos", "system"), ("role_tag", "content_tag"),
        ("user_tag", "assistant_tag", "system_tag"))
    for tags in names_that_differ:  # one would hide the other
        names = [name for name in (getattr(data.attr, tag) for tag in tags) if name is not None]
        if len(set(names)) < len(names):
            values = ", ".join(f"{tag} = {getattr(data.attr, tag)!r}" for tag in tags)
            yield f"dataset_param.attr has {values}; expected names that differ"
    if data.image_min_pixels > data.image_max_pixels:
        yield f"image_min_pixels is {data.image_min_pixels}, above image_max_pixels = {data.image_max_pixels}"
    if data.image_backend == "torch" and data.image_resize == "llamafactory":
        yield ("image_backend is 'torch' and image_resize 'llamafactory': that rule resizes by Pillow, so set "
               "image_backend to 'pillow'")
    if data.video_min_pixels > data.video_max_pixels:
        yield f"video_min_pixels is {data.video_min_pixels}, above video_max_pixels = {data.video_max_pixels}"
    if data.train_on_prompt and data.mask_history:
        yield "train_on_prompt and mask_history are both true; they exclude each other, so set one to false"
    if data.packs and data.sampler_type == "BucketBatchSampler":
        yield ("packing and sampler_type = \"BucketBatchSampler\" exclude each other, because packs mix long and short "
               "samples; set sampler_type to \"BalancedBatchSampler\", which makes packs of even cost")
    if data.packing_max_patches is not None and not data.packs:
        yield f"packing_max_patches is {data.packing_max_patches}, but packing is not true; set it to true"
