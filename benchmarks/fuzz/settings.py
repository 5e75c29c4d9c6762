"""Command lines, model JSON and data JSON: read as the commands read them before anything else."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.fuzz.kind import Kind, Reading
from benchmarks.fuzz.mutate import json_form, words
from checkpoint.cli import main as convert
from mm.config.evaluate import load_evaluating
from mm.config.generate import load_asking
from mm.config.run import Run, load_run, resolved
from mm.data.index.dataset import datasets
from mm.data_tool.cli import main as data_tool
from mm.errors import UserError, refuse
from mm.plan.stages import stage_report
from mm.weights.groups import group_problems
from mm.weights.lora import adapter_problems
from mm.weights.trained import freeze_notes, freeze_problems
from tests.files import EXAMPLES
from tests.tiny_inputs import write_inputs

BESIDE = Path("../beside")


def _train_words(model: Path | str, data: Path | str) -> list[str]:
    return ["--dry-run", "--world-size", "2", "--mm-model", str(model), "--mm-data", str(data), "--micro-batch-size",
            "1", "--global-batch-size", "4", "--seq-length", "512", "--train-iters", "6", "--lr", "1e-3", "--save",
            "save", "--log-dir", "logs", "--load", str(BESIDE / "hf")]  # fmt: skip


def inputs(beside: Path) -> dict[str, Any]:
    """The tiny inputs, and the data JSON with paths relative to the target; returns its content."""
    shared = beside.parent.parent / "inputs"  # the same for every kind
    if not shared.exists():
        shared.mkdir()
        write_inputs(shared)
    shutil.copytree(shared, beside, dirs_exist_ok=True)
    data = json.loads((beside / "data.json").read_text())
    data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(BESIDE / "hf")
    data["dataset_param"]["basic_parameters"] |= {"dataset": str(BESIDE / "samples.json"), "dataset_dir": str(BESIDE)}
    (beside / "data.json").write_text(json.dumps(data))
    return data


def _dry_run(run: Run) -> None:
    """What a dry run computes from the settings alone."""
    refuse([*freeze_problems(run.model), *adapter_problems(run.model), *group_problems(run.args, run.model)])
    resolved(run)
    list(freeze_notes(run.model))
    stage_report(run)


def write_model(original: Path, beside: Path) -> Reading:
    inputs(beside)
    model = json.loads((beside / "model_2.json").read_text())
    model |= {"freeze_modules": ["encoder.blocks.layers.7", "final_layernorm"], "trainable_modules": [],
              "lora_r": 4, "lora_alpha": 8.0, "lora_target_modules": ["q_proj", "layers.0-2.mlp.*_proj"],
              "lora_rank_pattern": {"q_proj": 2}}
    model["image_encoder"]["vision_encoder"] |= {"freeze_layers": "0-1"}
    (original / "model.json").write_text(json.dumps(model))
    return lambda: _dry_run(load_run(_train_words("model.json", BESIDE / "data.json")))


def write_data(original: Path, beside: Path) -> Reading:
    data = inputs(beside)
    basic = data["dataset_param"]["basic_parameters"]
    data["dataset_param"]["basic_parameters"] = {**basic, "val_rate": 0.4, "max_samples": 8, "media_roots": ["."]}
    (original / "data.json").write_text(json.dumps(data, indent=1))
    registry = {"one": {"file_name": str(BESIDE / "samples.json"), "formatting": "sharegpt", "columns": {
        "messages": "messages", "images": "images"}, "tags": {
        "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}}}
    (original / "dataset_info.json").write_text(json.dumps(registry))
    other = json.loads(json.dumps(data))
    other["dataset_param"]["basic_parameters"] |= {"dataset": "one%50", "dataset_dir": "."}
    (original / "data_named.json").write_text(json.dumps(other))

    def read() -> None:
        problems: list[str] = []
        for name in ("data.json", "data_named.json"):
            try:
                datasets(load_run(_train_words(BESIDE / "model_2.json", name)).data, problems, skips_bad=True)
            except UserError as error:
                problems += error.problems
        refuse(problems)

    return read


def write_flags(original: Path, beside: Path) -> Reading:
    inputs(beside)
    train = [*_train_words(BESIDE / "model_2.json", BESIDE / "data.json"), "--freeze-modules",
             "encoder.blocks", "final_layernorm", "--lora-target-modules", "q_proj", "layers.0-1.*",
             "--lora-rank-pattern", "q_proj=4",
             "--phase-timeouts", "save=600", "--tensor-model-parallel-size", "1"]
    inference = str(EXAMPLES / "inference_qwen2_5_vl_tiny.json")
    return _read_lines(original, {
        "train": train,
        "generate": ["--check", "--load", str(BESIDE / "hf"), "--prompt", "hello", "--max-new-tokens", "5",
                     "--mm-model", inference, "--stop-tokens", "7", "--temperature", "0.5"],
        "evaluate": ["--check", "--load", str(BESIDE / "hf"), "--questions", str(BESIDE / "samples.json"),
                     "--rule", "exact",                     "--output", "out", "--max-questions", "3"],
    })


def write_other_flags(original: Path, beside: Path) -> Reading:
    """Flags of the commands whose parsers take seconds."""
    inputs(beside)
    return _read_lines(original, {
        "data": ["check", "--mm-data", str(BESIDE / "data.json"), "--limit", "3"],
        "convert": ["Qwen2_5_VLConverter", "hf_to_mm", "--cfg.mm_dir", "mm", "--cfg.hf_config.hf_dir", "absent",
                    "--cfg.parallel_config.llm_pp_layers", "[[2,2]]", "--cfg.parallel_config.vit_pp_layers",
                    "[[8,0]]", "--cfg.dry_run", "true"],
    })


def _read_lines(original: Path, lines: Mapping[str, Sequence[str]]) -> Reading:
    """Write command lines, one word a line; returns the reader of the one that is damaged, else of all."""
    for name, line in lines.items():
        (original / f"{name}.words").write_text("\n".join(line))

    def read() -> None:
        found = {path.stem: path.read_bytes().decode(errors="surrogateescape").split("\n")
                 for path in Path().glob("*.words")}
        damaged = [name for name, line in found.items() if line != lines[name]]
        for name in damaged or found.keys() & {"train", "generate", "evaluate"}:  # others would do more than read flags
            _read_words(name, found[name])

    return read


def _read_words(name: str, line: list[str]) -> None:
    match name:
        case "train":
            _dry_run(load_run(line, environment={}))
        case "generate":
            load_asking(line, {})
        case "evaluate":
            load_evaluating(line, {})
        case "data":
            raise SystemExit(data_tool(line))
        case _:
            raise SystemExit(convert(line))


def _word_lines(content: bytes, rng: Random) -> bytes:
    line = content.decode().split("\n")
    return "\n".join(word.replace("\n", " ") for word in words(line, rng)).encode(errors="surrogatepass")


SETTINGS_KINDS = (
    Kind("model JSON", write_model, {"model.json": json_form}, 1.3, has_pipes=False, words=(
         "--mm-model", "--lora", "--freeze-modules", "--trainable-modules", "--world-size", "The world size",
         "--pipeline", "--virtual", "--lr", "--tensor")),
    Kind("data JSON", write_data, {"*.json": json_form}, has_pipes=False,
         words=("--mm-data", "samples.json", "hf", "dataset")),
    Kind("flags", write_flags, {"*.words": _word_lines}, 1.2, damages_folder=False),
    Kind("flags of mm-data and mm-convert", write_other_flags, {"*.words": _word_lines}, 0.06,
         damages_folder=False),
)
