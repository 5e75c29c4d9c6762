"""Directories of weights, adapters and checkpoints: opened, and some of their tensors read."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.fuzz.kind import Kind, Reading
from benchmarks.fuzz.mutate import json_form, json_lines, manifest, safetensors, text
from benchmarks.fuzz.zips import torch_zip
from checkpoint.lora import merge_lora
from checkpoint.verify import show_directory, verify_directory
from mm.config.lora import LoraConfig
from mm.conversion.adapters import base_notes, check_base, export_peft, holds_adapters, open_beside
from mm.conversion.convert import Options, fingerprint_of, hf_to_mm, mm_to_hf
from mm.data.index.contents import Contents, TrainedOn
from mm.files import whole_lines
from mm.formats import checkpoints, training
from mm.formats import training_writer as writer
from mm.formats.adapter import AdapterDirectory
from mm.formats.blocks import Values
from mm.formats.hf import HFDirectory
from mm.formats.layout import Layout
from mm.formats.source import Source, find_kind, holds_nothing, open_hf, open_to_train
from mm.formats.source import open as open_source
from mm.formats.storage import Format, Storage
from mm.formats.training_reader import TrainingDirectory
from mm.training.checkpoint import stated_progress
from mm.training.progress import BestSoFar, RecentSteps
from mm.training.schedule import LearningRate, Schedule, changed
from mm.weights.table import model_weights
from mm.weights.trained import saved_weights
from tests.checkpoint.models import SmallModel
from tests.killed import run_killed

MODEL = SmallModel(2, vision_ffn=6, num_shards=2)
LAYOUT = Layout(((2, 0),), ((1, 2),), 2)
DATA = TrainedOn((Contents("a", "b", 3, "c"),))
_RATES = {"lr": None, "weight_decay": 0.1}
SCHEDULE = Schedule(
    LearningRate(1e-3, 0.0, 0.0, 8.0, 80.0, "cosine"), 0.1, dict.fromkeys(("vision", "projector", "language"), _RATES),
    {"lr_scale_modules": (), "lr_mult": 1.0, "weight_decay_exclude_modules": ("norm",)}, 4)
ONE = Layout(((2,),), ((3,),), 1)


def _read_some(source: Source) -> None:
    """Open everything, and read the first and the last weight."""
    source.check()
    fingerprint_of([source], [])
    weights = model_weights(source.model) if not source.model.lora.is_on else saved_weights(source.model)
    for weight in (weights[0], weights[-1]):
        source.read(weight, 1, 0, torch.float32)
        source.read_hf(weight, 0)


def write_hf(original: Path, beside: Path) -> Reading:
    MODEL.save(original / "hf")
    model = MODEL.model

    def read() -> None:
        holds_nothing("hf")
        holds_adapters("hf")
        find_kind("hf")
        directory = HFDirectory.open("hf")
        directory.check(model)
        directory.describe()
        _read_some(open_hf(directory))
        open_to_train("hf", model)

    return read


def write_template(original: Path, beside: Path) -> Reading:
    """The directory that an export is modelled on."""
    MODEL.save(original / "hf")
    (original / "hf" / "generation_config.json").write_text('{"eos_token_id": [1, 2], "do_sample": false}')
    hf_to_mm(original / "hf", beside / "mm", ONE).run(Options(num_workers=1))
    return lambda: mm_to_hf("../beside/mm", "hf", "out").run(Options(num_workers=1))


def write_torch(original: Path, beside: Path) -> Reading:
    MODEL.save(beside / "hf")
    hf_to_mm(beside / "hf", original / "mm", LAYOUT, Storage(Format.TORCH)).run(Options(num_workers=1))
    (original / "mm" / "manifest.json").unlink()  # as MindSpeed-MM writes it
    return _reader_of("mm")


def _reader_of(name: str) -> Reading:
    model = MODEL.model

    def read() -> None:
        holds_nothing(name)
        holds_adapters(name)
        source = open_source(name, model=model)
        assert not isinstance(source.directory, AdapterDirectory), "open_source refuses adapters alone"
        source.directory.describe()
        _read_some(source)
        source.check_model(model)

    return read


def write_converted(original: Path, beside: Path) -> Reading:
    MODEL.save(beside / "hf")
    hf_to_mm(beside / "hf", original / "mm", LAYOUT).run(Options(num_workers=1))
    return _reader_of("mm")


def write_checkpoint(original: Path, beside: Path) -> Reading:
    """Two checkpoints of one run, with a moment of the optimizer, and facts of the data."""
    model, generator = MODEL.model, torch.Generator().manual_seed(0)
    for iteration in (1, 2):
        folder = writer.begin(original / "save", iteration, 0)
        pieces = []
        for one in saved_weights(model):
            values = torch.rand(one.shape, generator=generator)
            pieces += [(training.CheckpointTensor.of(values.dtype, tuple(one.shape), "0.safetensors", one.name,
                                                     "weight"), Values(values)),
                       (training.CheckpointTensor.of(values.dtype, (values.numel(),), "0.safetensors", one.name,
                                                     "exp_avg"), Values(values.reshape(-1)))]
        random = torch.zeros(8, dtype=torch.uint8)
        pieces.append((training.CheckpointTensor.of(random.dtype, (8,), "0.safetensors", "cpu", "random"),
                       Values(random)))
        written = writer.write_pieces(folder, "0.safetensors", pieces)
        writer.commit(folder, training.CheckpointManifest(
            iteration, 4 * iteration, 1, 1, 1, model,
            {"step": iteration, "grad_scaler": {"scale": 1.0, "growth_tracker": 0.0, "hysteresis_tracker": 2.0}},
            {"mm": "x"}, tuple(written), run_id="a", base={"path": "hf", "crc32": 7},
            disks=[{"host": "a", "ranks": [0], "files": ["0.safetensors"]}], best=asdict(BestSoFar(2.0, 1)),
            data=DATA.to_json(), schedule=SCHEDULE.to_json(), recent=asdict(RecentSteps((1.0,), (2.0,), 0)),
            given_start={"load": None}))
    return _read_checkpoint


def _read_checkpoint() -> None:
    _reader_of("save")()
    for folder in sorted(Path("save").glob("iter_*")):
        checkpoints.run_id_of(folder)
    checkpoints.run_ids(Path("save"))
    stored = TrainingDirectory.open("save")
    manifest = stored.manifest
    for weight in saved_weights(manifest.model)[:3]:
        if stored.has(weight, "exp_avg"):
            stored.read_state(weight, "exp_avg", 1, 0, 0, 4)
    stored.read_random("cpu")
    if manifest.optimizer is not None:
        assert manifest.optimizer["step"] >= 0
        assert manifest.optimizer["grad_scaler"] is None or len(manifest.optimizer["grad_scaler"]) == 3
    show_directory(Path("save"))
    verify_directory(Path("save"), None, None, 1)
    stated_progress(manifest, stored.path)
    if manifest.schedule is not None:
        list(changed(Schedule.from_json(manifest.schedule, stored.path), SCHEDULE))
    writer.tidy(Path("save"))


def write_adapter(original: Path, beside: Path) -> Reading:
    """Adapters in PEFT's form and in MindSpeed-MM's layout."""
    MODEL.save(beside / "hf")
    lora = LoraConfig(("q_proj", "up_proj"), r=2, rank_pattern=(("q_proj", 1),), alpha_pattern=(("up_proj", 3.0),))
    model = replace(MODEL.model, lora=lora)
    folder = writer.begin(beside / "save", 1, 0)
    pieces = [(training.CheckpointTensor.of(torch.float32, one.shape, "0.safetensors", one.name, "weight"),
               Values(torch.ones(one.shape))) for one in saved_weights(model)]
    written = writer.write_pieces(folder, "0.safetensors", pieces)
    writer.commit(folder, training.CheckpointManifest(1, 4, 1, 1, 1, model, None, {}, tuple(written)))
    saved = open_beside(beside / "save", model)
    export_peft(saved, original / "peft", "../beside/hf").run(Options(num_workers=1))
    config = json.loads((original / "peft" / "adapter_config.json").read_text())
    config["alpha_pattern"] |= {"layers.0.*up_proj": 4, "(q|k)_proj": 2.5}
    (original / "peft" / "adapter_config.json").write_text(json.dumps(config))

    def read() -> None:
        holds_adapters("peft")
        directory = AdapterDirectory.open("peft")
        whole = open_source("../beside/hf")
        adapters = open_beside("peft", whole.model)
        check_base(adapters, whole, "--load")
        base_notes(adapters, whole)
        _read_some(adapters)
        directory.problems(model)
        merge_lora("peft", "../beside/hf", "out").run(Options(num_workers=1, overwrite=True))

    return read


def write_journal(original: Path, beside: Path) -> Reading:
    """A conversion that was killed after some files."""
    MODEL.save(beside / "hf")
    conversion, point = hf_to_mm(beside / "hf", original / "out", LAYOUT), 0
    journal = original / ".out.mm-convert.journal"
    while not journal.exists() or len(whole_lines(journal.read_bytes())) < 3:  # its head, and two finished files
        point += 5
        assert run_killed(lambda: conversion.run(Options(num_workers=1)), point), "it is not complete before that"
    return lambda: hf_to_mm("../beside/hf", "out", LAYOUT).run(Options(num_workers=1))


WEIGHTS_KINDS = (
    Kind("safetensors header", write_hf, {"hf/*.safetensors": safetensors}, words=("hf",)),
    Kind("safetensors index", write_hf, {"hf/*.index.json": json_form}, words=("hf",)),
    Kind("config.json", write_template, {"hf/*.json": json_form}, words=("hf",)),
    Kind("torch zip", write_torch, {"mm/release/*/*.pt": torch_zip}, words=("mm",)),
    Kind("converted manifest", write_converted, {"mm/manifest.json": manifest("tensors"), "mm/latest*": text},
         words=("mm",)),
    Kind("checkpoint manifest", write_checkpoint, {"save/iter_*/manifest.json": manifest("pieces"),
         "save/latest*": text, "save/iter_0000002/*.safetensors": safetensors}, words=("save", "manifest")),
    Kind("journal", write_journal, {".out.mm-convert.journal": json_lines, ".out.mm-convert/*/*/*": safetensors}, 0.5,
         damages_folder=False, words=("out", "hf")),
    Kind("PEFT directory", write_adapter, {"peft/adapter_config.json": json_form, "peft/*.safetensors": safetensors},
         words=("peft",)),
)
