"""Open the model of ``mm.generate`` and ``mm.evaluate``: weights -> placement on stages -> device -> mesh -> stage.

Weights, model, tokenizer directory and settings are found before any device or process group is used: all ranks read
only headers and JSON files, with the same result.  The placement affects memory, not answers.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm.checkpoint import source as weights
from mm.checkpoint.adapters import base_notes, check_base, holds_adapters, open_beside
from mm.checkpoint.hf_config import hf_problems, model_from_hf
from mm.checkpoint.peft import CONFIG_FILE, AdapterDirectory, is_peft_directory
from mm.checkpoint.source import Kind, QkvOrder, Source
from mm.config.generate import Asking, Decoding, GenerationSettings, read_generation
from mm.config.model import ModelConfig
from mm.config.parse import read_json
from mm.console import loading, ongoing
from mm.device.device import Device
from mm.environment import named_in_script, software
from mm.errors import UserError, naming, reading, refuse, sorted_notes
from mm.parallel.health.rendezvous import Rendezvous
from mm.parallel.health.watchdog import Phase, Watchdog
from mm.placement import PipelineLayout
from mm.process import is_first_rank, print_notes
from mm.weights.trained import saved_among

if TYPE_CHECKING:
    from mm.generation.session import Session
    from mm.parallel.mesh import Mesh


def placed(
    model: ModelConfig, tp_size: int, num_stages: int | None, world_size: int
) -> tuple[ModelConfig, tuple[str, ...]]:
    """``model`` on the requested number of stages, with notes for the user.

    Its own lists are used if they have that many stages; otherwise the weights are spread evenly.  Without
    ``num_stages`` the lists are used if the number of ranks allows it; otherwise there is one stage.  Tensor-parallel
    ranks cut the ViT, because all of them answer the same prompts.
    """
    model, own = replace(model, encoder_placement="cut"), model.num_stages
    if num_stages is None:
        num_stages = own if world_size % (tp_size * own) == 0 else 1
    refuse(_problems(model, tp_size, num_stages, world_size))
    if num_stages == own and (own > 1 or model.num_chunks == 1):
        return model, ()
    vision, language = even_lists(model, num_stages)
    notes = (f"the pipeline_num_layers lists are for {own} stages; with {num_stages}, the layers are {list(vision[0])} "
             f"of the ViT and {list(language[0])} of the LLM",)
    return replace(model, vision=replace(model.vision, pipeline_num_layers=vision),
                   language=replace(model.language, pipeline_num_layers=language)), notes if own > 1 else ()


def _problems(model: ModelConfig, tp_size: int, num_stages: int, world_size: int) -> Iterator[str]:
    if tp_size not in model.tp_sizes:
        yield (f"--tensor-model-parallel-size is {tp_size}, which does not divide the heads and the vocabulary of this "
               f"model; it allows {', '.join(map(str, model.tp_sizes))}")
    if world_size % (tp_size * num_stages):
        yield (f"The number of ranks is {world_size}, not a multiple of tensor x pipeline parallel size = {tp_size} x "
               f"{num_stages} = {tp_size * num_stages}; start that many with torchrun --nproc_per_node "
               f"{tp_size * num_stages}, or change --tensor-model-parallel-size or --pipeline-model-parallel-size")


def even_lists(model: ModelConfig, num_stages: int) -> tuple[PipelineLayout, PipelineLayout]:
    """Numbers of ViT and LLM layers per stage, for about equal weights per stage; one chunk."""
    vision, language = model.vision, model.language
    sizes = [4 * vision.hidden_size**2 + 3 * vision.hidden_size * vision.ffn_hidden_size] * vision.num_layers
    attention = 2 * (language.num_attention_heads + language.num_query_groups) * language.head_dim
    layer = language.hidden_size * (attention + 3 * language.ffn_hidden_size)
    layers = [layer] * language.num_layers
    vocabulary = language.vocab_size * language.hidden_size
    layers[0] += vocabulary
    layers[-1] += vocabulary
    sizes += layers
    counts = [[0] * num_stages, [0] * num_stages]
    before, total = 0, sum(sizes)
    for number, size in enumerate(sizes):  # to the stage whose share contains the layer's middle
        stage = int((before + size / 2) * num_stages / total)
        counts[number >= vision.num_layers][stage] += 1
        before += size
    return (tuple(counts[0]),), (tuple(counts[1]),)


@dataclass(frozen=True)
class ModelFiles:
    """The weights, and everything that goes with them."""

    source: Source
    """A whole model."""
    adapters: Source | None
    """The trained adapters, if ``--load`` holds adapters."""
    model: ModelConfig
    """Placed on the stages of this call, with its adapters."""
    directory: str
    """Hugging Face directory with tokenizer, chat template and processor."""
    decoding: Decoding
    """Its ``stop_token_ids`` come from the model's files, not yet from ``--stop-tokens``."""
    notes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all weights."""
        return self.source.fingerprint + (self.adapters.fingerprint if self.adapters is not None else "")


@reading()
def find(asking: Asking) -> ModelFiles:
    """Open the weights, and place the model on its stages."""
    args, stated = asking.args, asking.inference.model if asking.inference else None
    base, named_by = asking.directory()
    named = named_in_script("--load", args.load, os.environ)
    if is_without_base := base is None and is_peft_directory(args.load):
        base, named_by = _stated_base(args.load, named)
    if base is not None and not os.path.isdir(base):
        raise UserError(f"{named_by} is {base!r}, which is not a directory; give --model-name-or-path, the Hugging "
                        f"Face directory with the tokenizer and processor of the model.")
    order = QkvOrder(args.vit_qkv_order, base, "--vit-qkv-order")
    adapters = None
    if holds_adapters(args.load, named):
        source, adapters = _beside_its_model(args.load, base, named_by, order)
        stated = adapters.model
    else:
        source = weights.open_source(args.load, named, model=stated or _model_of(base, named_by), qkv=order)
    if source.is_vit_only:
        raise UserError(f"--load {args.load} has no LLM (it was made with save_vit_only); give a whole model.")
    if stated is not None:
        with naming("--load" if adapters is None else named_by):
            source.check_model(stated.base)
    if base is None and source.kind is not Kind.HUGGING_FACE:
        raise UserError(f"--load {args.load} is a {source.kind.value}, which has no tokenizer; give "
                        f"--model-name-or-path, the Hugging Face directory of the original model.")
    directory = str(source.path) if base is None else base
    model, notes = placed(stated or source.model, args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
                          asking.world_size)
    with naming("--load" if base is None else named_by):
        refuse(hf_problems(model.base, directory, args.mm_model or args.load))
    decoding = asking.decoding(settings_in(source.path, Path(directory)))
    beside = (*adapters.notes, *base_notes(adapters, source)) if adapters is not None else ()
    if is_without_base:
        beside = (*beside, f"{named_by} is {base}: the adapters are used with that model")
    return ModelFiles(source, adapters, model, directory, decoding, (*source.notes, *beside, *notes))


def _stated_base(path: str, flag: str) -> tuple[str, str]:
    """The base model that the PEFT directory ``path``, which ``flag`` gave, names, and the place that names it.

    It must be a directory here: nothing is downloaded.
    """
    file, base = Path(path) / CONFIG_FILE, AdapterDirectory.open(path).base_name
    if base is None or not os.path.isdir(base):
        stated = "names no base model" if base is None else f"names {base!r} as their model, which is no directory here"
        raise UserError(f"{flag} {path} has adapters (LoRA), not a whole model, and {file} {stated}; give "
                        f"--model-name-or-path, the Hugging Face directory of the model that they were trained for.")
    return base, f"{file}: base_model_name_or_path"


def _beside_its_model(path: str, base: str | None, named_by: str, order: QkvOrder) -> tuple[Source, Source]:
    """The model in ``base``, which ``named_by`` gives, and the adapters in ``path``, which must belong to it."""
    if base is None:
        raise UserError(f"--load {path} has adapters (LoRA), not a whole model; give --model-name-or-path, the "
                        f"Hugging Face directory of the model that they were trained for.")
    model = weights.open_source(base, named_by, qkv=order)
    adapters = open_beside(path, model.model)
    check_base(adapters, model, "--model-name-or-path")
    return model, adapters


def _model_of(directory: str | None, named_by: str) -> ModelConfig | None:
    """The model that a Hugging Face directory describes, for weights that do not say what they are."""
    path = None if directory is None else Path(directory) / "config.json"
    if path is None or not os.path.isfile(path):
        return None
    with naming(named_by):
        return model_from_hf(read_json(path).root, file=path)


def settings_in(*folders: Path) -> GenerationSettings:
    """The settings of ``generation_config.json`` in the first of ``folders`` that has one."""
    for folder in folders:
        if (folder / "generation_config.json").is_file():
            return read_generation(folder / "generation_config.json")
    return GenerationSettings()


def session_of(asking: Asking, found: ModelFiles, device: Device, mesh: "Mesh") -> "Session":
    """Build this rank's part and read its weights."""
    from mm.generation.session import Session, read_encoder, with_stop_tokens
    from mm.model import load
    from mm.model.stage import Stage

    args, model, media = asking.args, found.model, asking.media_config(found.directory)
    encoder = read_encoder(media, model, mesh)
    decoding = with_stop_tokens(found.decoding, args.stop_tokens, encoder, model.language, mesh)
    stage = Stage(model, mesh, args.precision, device)
    load.fill(stage, [one for one in stage.weights if not one.is_adapter], found.source, mesh)
    if found.adapters is not None:
        load.fill(stage, saved_among(stage.weights, model), found.adapters, mesh)
    return Session(stage, mesh, encoder, media, decoding, found.fingerprint, args.precision)


@contextmanager
def opened(asking: Asking[Any], read: Callable[[], Sequence[str]] = tuple) -> Iterator[tuple["Session", Phase]]:
    """The model on this process's device, as one rank of the launcher's world, and the phases of its watchdog.

    ``read`` reads what is asked, on rank 0 before anything is loaded, and returns notes.  Raises UserError.
    """
    args, is_first = asking.args, is_first_rank()
    with Watchdog(Rendezvous.of_launcher(args.distributed_timeout_minutes), None, facts=software()) as watchdog:
        with watchdog.phase("check"):
            notes = read() if is_first else ()
            found = find(asking) if is_first else None  # one rank reports what all of them would
        with ongoing("waiting for the other ranks", is_first):
            store = watchdog.meet()
        found = found or find(asking)
        if is_first:
            print_notes(sorted_notes((*asking.notes, *notes, *found.notes)), sys.stderr)
        with loading(is_first, "starting the device"):
            device = Device.pick(args.device)
            if is_first:
                print_notes(device.notes, sys.stderr)
            # megatron looks at the device while it is imported, so everything built on it comes after this
            from mm.parallel import mesh as parallel

        with ongoing("connecting the ranks", is_first):
            mesh = parallel.start(
                device, found.model, args.tensor_model_parallel_size, args.distributed_timeout_minutes, store=store)
        watchdog.place(mesh)
        with watchdog.phase("load"):
            session = session_of(asking, found, device, mesh)
        yield session, watchdog.phase
    parallel.stop()
