"""The data JSON as frozen dataclasses, with every rule between its fields, and the dataset files that it names.

Keys of the JSON without a field are in ``mm.config.mindspeed``.  The content of the dataset files is not read here.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from annotated_types import MinLen
from pydantic import BeforeValidator, Field, Strict, StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mm.config.mindspeed import DATA_KEYS
from mm.config.parse import (
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
    expected,
    fields_of,
    read_json,
    read_settings,
    shown,
)
from mm.errors import UserError, collected, nearest, refuse

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
    """Names of columns and roles in the dataset; ``mm.data.records.formats`` looks for usual ones if there are none."""

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
    """Seconds for reading a video's header, and again for all its sampled frames.  The default is half the limit of a
    collective: one slow video must not make the waiting ranks time out."""
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


# The files of datasets.  An entry of ``dataset`` is a file, or a name in a registry: LLaMA-Factory's
# ``dataset_info.json``, whose entries may also have Qwen's keys (``annotation_path``, ``data_path``).  ``%50`` after an
# entry takes half of its samples; ``%250`` takes all of them twice, and half of them once more.

REGISTRY_FILE = "dataset_info.json"
_RATE = re.compile(r"(?P<name>.+)%(?P<rate>[0-9]+(?:\.[0-9]+)?)")
_KEYS = ("file_name", "annotation_path", "media_dir", "data_path", "formatting", "columns", "tags", "num_samples")
_UNUSED = {"ranking": False, "split": "train", **dict.fromkeys(
    ("subset", "folder", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"))}
"""Keys of LLaMA-Factory that have no effect with these values, and are refused with others."""
_COLUMNS = ("messages", "images", "videos", "system", "prompt", "query", "response", "history")
_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag")
_TOOL_TAGS = ("observation_tag", "function_tag")
"""Tags of tool turns, which have no effect: a sample with a tool turn is refused."""


@plain_dataclass(frozen=True)
class DatasetFile:
    """One file of samples, and how it is read."""

    entry: str
    """The entry in the data JSON, without the rate."""
    path: str
    attr: Attributes
    media_root: str
    """Relative paths of media start here."""
    rate_percent: float = 100.0
    """Percentage of its samples to use; above 100 they repeat."""
    num_samples: int | None = None
    """Use this many samples instead of all, before the rate applies."""

    @property
    def is_whole(self) -> bool:
        """Whether every sample is used once."""
        return self.rate_percent == 100 and self.num_samples is None


def dataset_files(data: DataConfig, key: Literal["dataset", "val_dataset"]) -> list[DatasetFile]:
    """The files of an entry list; raises UserError for an entry that is neither a file nor a registered name."""
    entries: Sequence[str] = getattr(data, key) or ()
    problems: list[str] = []
    found: list[DatasetFile] = []
    registry: dict[str, Any] | None = None
    for entry in entries:
        match = None if os.path.isfile(entry) else _RATE.fullmatch(entry)
        name, rate = (match["name"], float(match["rate"])) if match else (entry, 100.0)
        with collected(problems):
            if os.path.isfile(name):
                found.append(DatasetFile(name, name, data.attr, data.dataset_dir, rate))
                continue
            registry = _registry(data) if registry is None else registry
            if name not in registry and os.path.isdir(name):
                raise UserError(f"{key} is {name!r}, which is a directory; name the JSON, JSON Lines or Parquet file "
                                f"in it that lists the samples, or several, separated by commas")
            if name not in registry:
                where = (f"and no name in {_registry_path(data)}{nearest(name, registry)}" if registry
                         else f"and there is no {_registry_path(data)} with dataset names")
                inside = os.path.join(data.dataset_dir, name)
                hint = f" (did you mean {inside!r}?)" if os.path.isfile(inside) else ""
                raise UserError(f"{key} is {name!r}, which is not a file{hint}, {where}{_elsewhere(name)}")
            found.append(_registered(data, name, registry[name], rate))
    refuse(problems)
    return found


def _elsewhere(name: str) -> str:
    """A hint for a dataset that is not on this machine."""
    if "://" in name:
        return "; download it, and give the path of the file"
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not name.endswith((".json", ".jsonl", ".parquet")):
        return (f"; fetch a dataset of the hub with 'hf download --repo-type dataset {name} --local-dir DIR', and name "
                f"its JSON or Parquet file")
    return ""


def _registry_path(data: DataConfig) -> Path:
    return Path(data.dataset_info) if data.dataset_info else Path(data.dataset_dir) / REGISTRY_FILE


def _registry(data: DataConfig) -> dict[str, Any]:
    """The registry's entries by name; none if no registry is given and ``dataset_dir`` has none."""
    path = _registry_path(data)
    if data.dataset_info is None and not os.path.isfile(path):
        return {}
    root = read_json(path).root
    if not isinstance(root, dict):
        raise UserError(f"{path}: is not an object; expected names of datasets, each with an object like "
                        '{"file_name": "train.json"}')
    return cast(dict[str, Any], root)


def _registered(data: DataConfig, name: str, value: Any, rate: float) -> DatasetFile:
    """One entry of the registry.  Its paths are relative to the registry's folder, and null counts as absent."""
    path = _registry_path(data)
    where, folder = f"{path}: {name}", path.parent
    if not isinstance(value, dict):
        raise UserError(f'{where} is {shown(value)}; expected an object like {{"file_name": "train.json"}}')
    entry: dict[str, Any] = {key: one for key, one in cast(dict[str, Any], value).items() if one is not None}
    problems = [f"{where}.{key} is not a known key{nearest(key, _KEYS)}" for key in entry
                if key not in _KEYS and key not in _UNUSED]
    problems += [f"{where}.{key} is {shown(entry[key])}, which is not supported; remove it, and name a local file as "
                 f"file_name" for key, legal in _UNUSED.items() if entry.get(key, legal) != legal]
    file = entry.get("file_name", entry.get("annotation_path"))
    media = entry.get("media_dir", entry.get("data_path"))
    if file is None:
        problems.append(f"{where} has no file_name; give a path relative to {folder}")
    elif not os.path.isfile(folder / str(file)):
        problems.append(f"{where} has the file {str(folder / str(file))!r}, which does not exist")
    if media is not None and not os.path.isdir(folder / str(media)):
        problems.append(f"{where} has the media folder {str(folder / str(media))!r}, which is not a directory")
    attr, num_samples = _attributes(entry, where, problems), entry.get("num_samples")
    if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
        problems.append(f"{where}.num_samples is {shown(num_samples)}; expected an integer of at least 1 or null")
    refuse(problems)
    root = data.dataset_dir if media is None else str(folder / str(media))
    return DatasetFile(name, str(folder / str(file)), attr, root, rate, num_samples)


def _attributes(entry: dict[str, Any], where: str, problems: list[str]) -> Attributes:
    """Columns and tags of the entry, with LLaMA-Factory's defaults; ``attr`` of the data JSON has no effect on them."""
    values: dict[str, Any] = {"formatting": entry["formatting"]} if "formatting" in entry else {}
    for group, known, ignored in (("columns", _COLUMNS, ()), ("tags", _TAGS, _TOOL_TAGS)):
        given: Any = entry.get(group, {})
        if not isinstance(given, dict):
            problems.append(f"{where}.{group} is {shown(given)}; expected an object")
            continue
        for key, value in cast(dict[str, Any], given).items():
            if key not in known:
                problems += [f"{where}.{group}.{key} is not read here{nearest(key, known)}"] * (
                    value is not None and key not in ignored)
            elif value is not None or key == "system_tag" or fields_of(Attributes)[key].default is None:
                values[key] = value
    try:
        return TypeAdapter(Attributes).validate_python(values)
    except ValidationError as error:
        wrong = dict.fromkeys(str(one["loc"][0]) for one in error.errors())
        problems += [f"{where}: {key} is {shown(values[key])}; expected {expected(fields_of(Attributes)[key])}"
                     for key in wrong]
        return Attributes()
