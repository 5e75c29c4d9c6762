"""Runs every case of ``tests.parallel.lora_cases`` of this world size and writes the measured errors as JSON.

The oracle is PEFT on transformers' model.  Launched by tests/test_lora_parity.py:
``lora_worker OUTPUT.json [NAME...]``.
"""

import json
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from mm.checkpoint.adapters import export_peft, merge, model_crc32, open_adapters, open_base, open_saved
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.config.model import ModelConfig
from mm.model.load import fill
from mm.parallel import mesh as parallel
from mm.run.checkpoint import restore as state
from mm.run.checkpoint.save import BegunSave
from mm.run.optim.optimizer import MOMENTS, owned_states
from mm.run.step import forward_backward
from mm.weights.table import model_weights, stage_weights
from mm.weights.trained import is_frozen, model_adapters, saved_among, saved_weights
from tests.parallel.case_model import config_of
from tests.parallel.cases import Case, batch_of
from tests.parallel.lora_cases import CASES, DROPOUT_CASES, MATRIX, MIXED, LoraCase
from tests.parallel.parity_worker import (  # picks the device before all others
    LR,
    WEIGHT_DECAY,
    Engine,
    build,
    from_first_rank,
    gradient_errors,
    joined,
    relative_errors,
    weight_errors,
    with_meshes,
)
from tests.peft_oracle import peft_model, peft_tensors, table_name
from tests.tiny import TOKENS_PER_SECOND, hf_loss, hf_model, hf_tensors

NUM_STEPS = 2
DROPOUT_SEED = 17


def model_of(case: LoraCase) -> ModelConfig:
    config = config_of(case.layout)
    return replace(config, lora=case.lora, vision=replace(config.vision, tokens_per_second=TOKENS_PER_SECOND))


def untrained(case: LoraCase) -> PeftModel:
    return peft_model(hf_model(case.layout.tied), model_of(case))


def weights_before(case: LoraCase) -> dict[str, Tensor]:
    """Under our names of Hugging Face tensors."""
    return peft_tensors(untrained(case.without_layout))


@cache
def reference(case: LoraCase) -> dict:
    """Loss, gradients, and weights before and after ``NUM_STEPS``, under our names of Hugging Face tensors."""
    config = model_of(case)
    model = untrained(case)
    trained = {name for weight in model_weights(config) if not is_frozen(weight, config) for name in weight.hf_names}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(table_name(name) in trained)
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [{"params": [one], "weight_decay": 0.0 if one.dim() == 1 else WEIGHT_DECAY} for one in parameters]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    microbatches = [microbatch for rank in batch_of(case.layout) for microbatch in rank]
    found: dict = {"before": {name: one.clone() for name, one in peft_tensors(model).items()}, "losses": []}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = hf_loss(model.base_model.model, microbatches, case.layout.loss_unit)
        loss.backward()
        for one in parameters:
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        if step == 0:
            found["gradients"] = {name: one.clone() for name, one in peft_tensors(model, gradients=True).items()}
        found["losses"].append(float(loss))
        optimizer.step()
    return {**found, "after": peft_tensors(model)}


def start(case: LoraCase, before: dict[str, Tensor], mesh: parallel.Mesh | None = None) -> Engine:
    return build(case.layout, before, model_of(case), mesh)


def run_case(case: LoraCase, mesh: parallel.Mesh) -> dict:
    expected = from_first_rank(lambda: reference(case.without_layout))
    engine = start(case, expected["before"], mesh)
    if case.layout.overlap:  # the first pass only learns which gradients to wait for
        forward_backward(engine.setup, engine.plan)
    losses = []
    for step in range(NUM_STEPS):
        loss = forward_backward(engine.setup, engine.plan)
        if step == 0:
            by_gradient, uncovered = gradient_errors(engine, expected["gradients"])
        losses.append(engine.update(loss).loss)
    if case.layout.overlap:  # the updated weights arrive in the next pass
        engine.loss()
    by_weight = weight_errors(engine, expected["after"])
    models: Any = engine.setup.models  # megatron's, with buffers of its own
    buffers = sum(one.numel() for model in models for buffer in model.buffers for one in buffer.params)
    trained = sum(one.numel() for _, one in engine.setup.stage.named_parameters() if one.requires_grad)
    owned = owned_states(engine.setup.optimizer, engine.setup.models)
    moments = sum(one.tensors()[moment].numel() for one in owned for moment in MOMENTS)
    weights = sum(one.numel() for _, one in engine.setup.stage.named_parameters())
    counts = (buffers, trained, moments, sum(one.is_copy for one in owned), weights)
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (by_gradient, by_weight, uncovered, counts))
    worst = [max(((e, n) for g in gathered for n, e in g[i].items()), default=(0.0, "")) for i in (0, 1)]
    layout = case.layout
    return {
        "losses": losses, "expected_losses": expected["losses"],
        "loss_error": max(abs(one - other) / other for one, other in zip(losses, expected["losses"], strict=True)),
        "gradient_error": worst[0][0], "gradient_worst": worst[0][1],
        "weight_error": worst[1][0], "weight_worst": worst[1][1],
        "uncovered": sorted({name for g in gathered for name in g[2]}),
        **{name: [g[3][at] for g in gathered]
           for at, name in enumerate(("buffers", "trained", "moments", "copies", "weights"))},
        "num_adapters": len(model_adapters(model_of(case))),
        "num_gradients": sum(len(g[0]) for g in gathered),
        "expected_gradients": layout.tp * layout.cp * layout.dp * sum(
            not is_frozen(weight, engine.config)
            for spec in engine.placement.slots for weight in stage_weights(engine.config, spec)),
    }


def run_dropped(case: LoraCase, mesh: parallel.Mesh) -> dict:
    """Loss and norm of a step with dropout, and of another step."""
    engine = start(case, weights_before(case), mesh)
    others = []
    for seed in (DROPOUT_SEED + 1, None):
        engine.plan = replace(engine.plan, dropout_seed=seed)
        others.append(engine.loss())
    engine.plan = replace(engine.plan, dropout_seed=DROPOUT_SEED)
    result = engine.update(forward_backward(engine.setup, engine.plan))
    return {"losses": [result.loss, *others], "grad_norm": result.grad_norm}


FILE_LAYOUTS = {"tp2": Case("tp2", tp=2), "pp2": Case("pp2", (3, 1), (0, 4))}


def run_files(name: str, directory: Path) -> dict:
    """Save after a step, go on, and go on again from the checkpoint under both layouts; export, and ask PEFT."""
    case = LoraCase(FILE_LAYOUTS[name], MIXED)
    (other,) = (one for key, one in FILE_LAYOUTS.items() if key != name)
    before = weights_before(case)
    hf = directory / "base"
    if dist.get_rank() == 0:
        hf_model().save_pretrained(hf)
    dist.barrier()
    base = {"path": str(hf), "crc32": model_crc32(open_base(hf, model_of(case)))}

    def steps(engine: Engine, num_steps: int) -> list[float]:
        return [engine.update(forward_backward(engine.setup, engine.plan)).loss for _ in range(num_steps)]

    def weights(engine: Engine) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in engine.setup.stage.named_parameters()}

    engine = start(case, before)
    steps(engine, 1)
    begun = BegunSave.begin(directory / "save", state.TrainingProgress(1, 12, base=base), engine.setup, {})
    folder = begun.finish(engine.setup)
    our_loss, straight, after = engine.loss(), steps(engine, 2), weights(engine)
    parallel.stop_mesh()
    zeros = {name: one if ".lora_" not in name and "merger" not in name else torch.zeros_like(one)
             for name, one in before.items()}
    engine = start(case, zeros)
    state.load(open_adapters(directory / "save", engine.setup.stage.model), engine.setup)
    resumed = steps(engine, 2)
    different = [name for name, one in weights(engine).items() if not torch.equal(one, after[name])]
    parallel.stop_mesh()
    engine = start(LoraCase(other, MIXED), zeros)
    state.load(open_adapters(directory / "save", engine.setup.stage.model), engine.setup)
    other_layout = steps(engine, 2)
    parallel.stop_mesh()
    found = _exported(case, folder, hf, directory) if dist.get_rank() == 0 else {}
    dist.barrier()
    engine = start(case, zeros)
    adapters = open_adapters(directory / "peft", model_of(case))
    fill(engine.setup.stage, saved_among(engine.setup.stage.weights, model_of(case)), adapters, engine.setup.mesh)
    loaded = engine.loss()
    parallel.stop_mesh()
    return {"straight": straight, "resumed": resumed, "other_layout": other_layout, "different_weights": different,
            "our_loss": our_loss, "loaded_from_peft": loaded, **found}


def _exported(case: LoraCase, folder: Path, hf: Path, directory: Path) -> dict:
    """What PEFT and transformers make of the exports of a checkpoint."""
    adapters, base = open_saved(folder), open_base(hf, model_of(case))
    export_peft(adapters, directory / "peft", str(hf)).run(num_workers=1)
    merge(adapters, base, hf, directory / "merged").run(num_workers=1)
    microbatches = [microbatch for rank in batch_of(case.layout) for microbatch in rank]
    peft = PeftModel.from_pretrained(hf_model(), directory / "peft")
    ours = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory / "merged", dtype=torch.float32)
    with torch.no_grad():
        peft_loss = float(hf_loss(peft.base_model.model, microbatches))
        merged_loss = float(hf_loss(ours, microbatches))
    theirs, mine = hf_tensors(peft.merge_and_unload()), hf_tensors(ours)
    names = {piece.name for piece in TrainingDirectory.open(folder).manifest.pieces if piece.kind == "weight"}
    return {
        "peft_loss": peft_loss, "merged_loss": merged_loss,
        "merge_error": max(relative_errors([(mine[name], theirs[name]) for name in mine], None)),
        "saved_names": sorted(names), "trained_names": sorted(one.name for one in saved_weights(model_of(case))),
    }


def main(output: Path, only: list[str]) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          timeout=parallel.timedelta(days=1))
    if only[:1] == ["--files"]:
        with joined(FILE_LAYOUTS[only[1]], dist.PrefixStore("files", store), rank):
            result = run_files(only[1], Path(only[2]))
        if rank == 0:
            output.write_text(json.dumps(result), encoding="utf-8")
        return
    results = {}
    every = (*CASES, *DROPOUT_CASES)
    wanted = [case for case in (*every, *MATRIX) if case.name in only] if only else every
    mine = [case for case in wanted if case.layout.world_size == world_size]
    for case, mesh in with_meshes(mine, store, rank, lambda case: case.layout):
        results[case.name] = (run_dropped if case in DROPOUT_CASES else run_case)(case, mesh)
        if rank == 0:
            print(case.name, json.dumps(results[case.name]), flush=True)
    if rank == 0:
        output.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
