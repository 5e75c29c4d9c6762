"""The short form of ``mm-train``: ``--model DIR --data FILE --output DIR``, or a YAML file whose keys are the flags.

A recipe is translated into MindSpeed-MM's form: a model JSON and a data JSON, which are written under ``--output``, and
the flags of ``mm.config.args``.  So both forms train the same settings, and ``--write-mindspeed`` writes them down.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass as plain_dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from mm.checkpoint.hf_config import model_from_hf
from mm.config.args import TRAIN, DeviceName
from mm.config.command_line import CommandLine, rule_problems
from mm.config.lora import PARTS
from mm.config.model import ModelConfig
from mm.config.parse import (
    FIRST,
    STRICT,
    Count,
    Excludes,
    Fraction,
    Group,
    NaturalNumber,
    Needs,
    NotNegative,
    Numbers,
    PathOrNone,
    PathText,
    Patterns,
    Positive,
    Seed,
    read_json,
    settings_of,
)
from mm.config.run import load_run, resolved
from mm.console import loading, whole_number
from mm.environment import Launched
from mm.errors import UserError, nearest, printable, refuse, writing
from mm.families import TITLES
from mm.files import write_whole

_PARTS = PARTS["all"]
CONFIG_DIR = "config"
"""Folder of ``--output`` with the translated settings."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """The flags of the short form.

    Rates, schedule, frozen parts and image size are those of LLaMA-Factory's examples for this model
    (examples/train_full/qwen2_5vl_full_sft.yaml, and train_lora for adapters), as in MindSpeed-MM's script.
    """

    model: Annotated[PathText, FIRST, Group("Files")] = Field(
        description="Hugging Face directory of the model, or its name on the hub if a local cache has it")
    data: Annotated[Patterns, FIRST] = Field(description="JSON, JSONL or Parquet files of records")
    output: Annotated[PathText, FIRST] = Field(
        description="directory for checkpoints, logs, the page of the run and the tuned model")
    media_dir: PathOrNone = Field(None, description="folder of the images and videos; absent = that of the first file")
    val_data: Patterns = Field((), description="files of records for validation")
    val_rate: Annotated[Fraction | None, Excludes("val_data")] = Field(
        None, description="share of the records that is set aside for validation")
    download: bool = Field(False, description="fetch a model that no local cache has from the hub")

    nproc: Annotated[str, FIRST, Group("Machines and layout")] = Field(
        "auto", description="ranks on this machine; auto = one for each of its devices")
    device: DeviceName = Field("auto", description="what to run on")
    nnodes: Count = Field(1, description="machines; the same command runs on each")
    node_rank: Annotated[NaturalNumber, Needs("nnodes")] = Field(0, description="number of this machine, from 0")
    master_addr: Annotated[str, Needs("nnodes")] = Field("localhost", description="address of machine 0")
    master_port: Count = Field(6000, description="a free port of machine 0")
    tensor_parallel: Count | None = Field(None, description="tensor-parallel ranks; absent = 1")
    vision_layers: Annotated[Numbers, Needs("language_layers")] = Field(
        (), description="ViT layers of each pipeline stage; absent = one stage (mm-plan finds lists)")
    language_layers: Annotated[Numbers, Needs("vision_layers")] = Field(
        (), description="LLM layers of each pipeline stage")

    epochs: Annotated[Positive, Group("Training")] = Field(3.0, description="passes over the records")
    steps: Annotated[Count | None, Excludes("epochs")] = Field(None, description="optimizer steps, instead of epochs")
    global_batch_size: Count = Field(64, description="records per step over all ranks")
    micro_batch_tokens: Count = Field(8192, description="tokens of one pass, packed from whole records")
    max_length: Count | None = Field(None, description="longest record in tokens; absent = --micro-batch-tokens")
    lr: NotNegative | None = Field(None, description="highest learning rate; absent = 1e-5, or 1e-4 for adapters")
    warmup: Fraction = Field(0.1, description="share of the steps in which the learning rate rises")
    freeze: Patterns = Field((), title=", ".join((*_PARTS, "none")), description=(
        "parts that are not trained: vision, projector, language, or none; absent = vision projector"))
    lora: Annotated[Count | None, FIRST] = Field(None, description="train adapters of this rank in all linear layers")
    image_max_pixels: Count = Field(262144, description="images with more pixels are made smaller")
    precision: Literal["bf16", "fp16", "fp32"] = Field("bf16", description="dtype of the computation")
    seed: Seed = Field(42, description="seed of the order of the records")
    save_steps: Count = Field(500, description="steps between checkpoints")
    num_workers: NaturalNumber = Field(4, description="processes that read data, for each replica")

    write_mindspeed: Annotated[PathOrNone, Group("Settings")] = Field(
        None, description="write model.json, data.json and train.sh here, as MindSpeed-MM has them, and exit")
    print_config: bool = Field(False, description="print all settings of the run as JSON, and exit")


RECIPE = CommandLine(
    "mm-train", f"Fine-tune {TITLES} in one command.  Flags of the long form (mm-train --help) may be added.",
    Recipe, "--model DIR --data FILE --output DIR [flags], or mm-train RUN.yaml [flags]")


@plain_dataclass(frozen=True)
class Translation:
    """A recipe in MindSpeed-MM's form."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    flags: Sequence[str]


def is_recipe(words: Sequence[str]) -> bool:
    """Whether a command line has the short form."""
    names = {word.partition("=")[0] for word in words}
    return _is_file(words) or ("--model" in names and "--mm-model" not in names)


def _is_file(words: Sequence[str]) -> bool:
    return bool(words) and words[0].endswith((".yaml", ".yml"))


def read_recipe(words: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe of a command line, and the flags of the long form in it; raises UserError.

    Flags win over the file."""
    if _is_file(words):
        words = [*flags_of_file(Path(words[0])), *words[1:]]
    own, long_flags = RECIPE.own_of(words)
    recipe = RECIPE.read(RECIPE.split(own))
    refuse([*rule_problems(recipe), *_part_problems(recipe)])
    return recipe, long_flags


def flags_of_file(path: Path) -> list[str]:
    """The keys of a YAML file as flags: ``lora: 16`` is ``--lora 16``.  Raises UserError for another content."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no recipe; expected lines like 'model: DIR', 'data: train.json', 'output: out'")
    words: list[str] = []
    for key, value in content.items():
        flag = f"--{str(key).replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def _part_problems(recipe: Recipe) -> Iterator[str]:
    for part in recipe.freeze:
        if part not in (*_PARTS, "none"):
            yield f"--freeze has {part!r}; expected {', '.join(_PARTS)} or none{nearest(part, _PARTS)}"
    if "none" in recipe.freeze and len(recipe.freeze) > 1:
        yield "--freeze has none and another part; give one of the two"
    if recipe.nproc != "auto" and not whole_number(recipe.nproc):
        yield f"--nproc is {recipe.nproc!r}; expected auto or a number of at least 1"


def translated(recipe: Recipe, directory: str, model: ModelConfig, long_flags: Sequence[str]) -> Translation:
    """The recipe for the model in ``directory``, which ``model`` describes, on the layout that the recipe states.

    A flag of the long form takes the place of the recipe's.
    """
    length = recipe.max_length or recipe.micro_batch_tokens
    lr = recipe.lr if recipe.lr is not None else 1e-5 if recipe.lora is None else 1e-4
    output = Path(recipe.output)
    flags: dict[str, object] = {
        "--tensor-model-parallel-size": recipe.tensor_parallel,
        "--micro-batch-size": max(1, recipe.micro_batch_tokens // length),
        "--global-batch-size": recipe.global_batch_size, "--seq-length": length,
        "--train-iters": recipe.steps, "--num-train-epochs": None if recipe.steps else recipe.epochs,
        "--lr": lr, "--lr-decay-style": "cosine", "--lr-warmup-fraction": recipe.warmup, "--weight-decay": 0,
        "--adam-beta2": 0.999, "--seed": recipe.seed, "--use-distributed-optimizer": "",
        "--device": recipe.device, "--num-workers": recipe.num_workers,
        "--bf16": "" if recipe.precision == "bf16" else None, "--fp16": "" if recipe.precision == "fp16" else None,
        "--lora-target-modules": recipe.lora and "all-linear", "--lora-r": recipe.lora,
        "--lora-alpha": recipe.lora and 2 * recipe.lora,
        "--load": output / "checkpoints", "--save": output / "checkpoints", "--pretrained-checkpoint": directory,
        "--save-interval": recipe.save_steps, "--keep-last-checkpoints": 2, "--log-dir": output / "logs",
        "--log-interval": 1, "--log-style": "short", "--page": "",
        "--export-hf": output / ("model" if recipe.lora is None else "adapters"),
        "--export-merged-hf": None if recipe.lora is None else output / "model", "--calculate-per-token-loss": "",
    }  # fmt: skip
    given = {word.partition("=")[0] for word in long_flags}
    replaced = given | {other for pair in TRAIN.one_of for other in pair if given & set(pair)}
    words = [word for flag, value in flags.items() if value is not None and flag not in replaced
             for word in (flag, *([str(value)] if value != "" else []))]
    return Translation(_model_json(recipe, model), _data_json(recipe, directory), [*words, *long_flags])


def _model_json(recipe: Recipe, model: ModelConfig) -> dict[str, Any]:
    """The model JSON; keys whose values are the defaults are left out."""
    frozen = recipe.freeze or (() if recipe.lora else ("vision", "projector"))
    lists = {"vision": recipe.vision_layers, "language": recipe.language_layers}
    found: dict[str, Any] = {"model_id": model.family.mindspeed.model_ids[0]}
    for name, key_paths, field in settings_of(ModelConfig):
        part, _, own = name.rpartition(".")
        value: Any = attrgetter(name)(model)
        if own == "freeze":
            value = part in frozen
        elif own == "pipeline_num_layers":
            value = lists[part] or [attrgetter(part)(model).num_layers]
        elif not field.is_required() and value == field.default:
            continue
        inner, (*outer, key) = found, key_paths[0].split(".")
        for one in outer:
            inner = inner.setdefault(one, {})
        inner[key] = to_jsonable_python(value)
    return found


def _data_json(recipe: Recipe, directory: str) -> dict[str, Any]:
    basic = {"dataset": list(recipe.data), "dataset_dir": recipe.media_dir or os.path.dirname(recipe.data[0]) or ".",
             "val_dataset": list(recipe.val_data) or None, "val_rate": recipe.val_rate, "packing": True,
             "truncation": "turns"}  # fmt: skip
    return {
        "dataset_param": {
            "preprocess_parameters": {"model_name_or_path": directory, "image_max_pixels": recipe.image_max_pixels},
            "basic_parameters": {key: value for key, value in basic.items() if value is not None},
            "attr": {},
        },
        "dataloader_param": {"sampler_type": "BalancedBatchSampler"},
    }


def model_directory(name: str, download: bool) -> str:
    """The directory of ``name``: itself, or that of a model of the hub in a local cache of Hugging Face or ModelScope.

    With ``download``, Hugging Face's library fetches a model that neither has.  Raises UserError with the commands that
    would.
    """
    if os.path.isdir(name) or name.count("/") != 1 or name.startswith((".", "/")):
        return name  # what is wrong with it is reported where its config.json is read
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        return snapshot_download(name, local_files_only=True)
    with suppress(ModuleNotFoundError, ValueError):
        return import_module("modelscope.hub.snapshot_download").snapshot_download(name, local_files_only=True)
    if download:
        return snapshot_download(name)
    raise UserError(f"--model is {name!r}: neither a directory nor in the local cache of Hugging Face or ModelScope; "
                    f"fetch it with: hf download {name} (or: modelscope download --model {name}), or add --download")


def run_recipe(words: Sequence[str]) -> list[str] | None:
    """Translate a command line of the short form, and replace this process by the launcher of its ranks.

    For one rank, a rehearsal, and a rank that a launcher has started, returns the flags of the long form; None after
    ``--print-config`` or ``--write-mindspeed``.  Raises UserError with all mistakes, before a rank is started.
    """
    recipe, long_flags = read_recipe(words)
    directory = model_directory(recipe.model, recipe.download)
    path = Path(directory, "config.json")
    if not path.is_file():
        raise UserError(f"--model is {recipe.model!r}, which has no config.json; expected a Hugging Face directory of "
                        f"{TITLES}, or its name on the hub, OWNER/NAME")
    found = translated(recipe, directory, model_from_hf(read_json(path).root, file=path), long_flags)
    launched = Launched.here().num_ranks
    num_ranks = launched or _num_ranks(recipe)
    world_size = launched or num_ranks * recipe.nnodes
    flags = _write(found, recipe, num_ranks)
    is_rehearsal = bool({"--dry-run", "--check"} & set(long_flags))
    run = load_run([*flags, *["--dry-run"] * recipe.print_config], world_size)
    if recipe.print_config:
        print(json.dumps(resolved(run), indent=2, ensure_ascii=False))
        return None
    if recipe.write_mindspeed is not None:
        print(f"written: {printable(recipe.write_mindspeed)}: model.json, data.json and train.sh, which trains them")
        return None
    if is_rehearsal or launched or world_size == 1:
        return [*flags, *["--world-size", str(world_size)] * (is_rehearsal and not launched)]
    sys.stdout.flush()
    start = [sys.executable, "-m", "mm.launch", *_launch_words(recipe, num_ranks), "-m", "mm.train"]
    return os.execv(sys.executable, [*start, *flags])


def _num_ranks(recipe: Recipe) -> int:
    if recipe.nproc != "auto":
        return int(recipe.nproc)
    with loading():
        from mm.device.device import usable_platform
    return usable_platform(recipe.device).num_devices() or 1


def _launch_words(recipe: Recipe, num_ranks: int) -> list[str]:
    nodes = ["--standalone"] if recipe.nnodes == 1 else [
        "--nnodes", str(recipe.nnodes), "--node_rank", str(recipe.node_rank), "--master_addr", recipe.master_addr,
        "--master_port", str(recipe.master_port)]  # fmt: skip
    return [*nodes, "--nproc_per_node", str(num_ranks)]


def _write(found: Translation, recipe: Recipe, num_ranks: int) -> list[str]:
    """Write the two JSON files, and with ``--write-mindspeed`` the script; returns all flags."""
    folder = Path(recipe.write_mindspeed or Path(recipe.output, CONFIG_DIR))
    flags = ["--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json"), *found.flags]
    files = {"model.json": json.dumps(found.model, indent=4), "data.json": json.dumps(found.data, indent=4)}
    if recipe.write_mindspeed is not None:
        words = ["torchrun", *_launch_words(recipe, num_ranks), "-m", "mm.train"]
        files["train.sh"] = f"{shlex.join(words)} \\\n    {shlex.join(flags)} \"$@\""
    with writing(folder, "--write-mindspeed" if recipe.write_mindspeed else "--output"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(folder / name, f"{text}\n".encode())
    return flags
