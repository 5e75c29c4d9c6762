"""Runs every parity case of this world size in one set of processes and writes the measured errors as JSON.

Launched by tests/test_parity.py: ``parity_worker OUTPUT.json``.  With a directory in
place of the file it runs the cases that appear there, as ``0.json``, ``1.json`` and so on, until one is empty.
"""

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mm.device.device import Device

DEVICE = Device.pick("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from mm.batch import BatchTotals, StepPlan, image_passes, passes_of_any  # noqa: E402
from mm.config import args as arguments  # noqa: E402
from mm.config.model import ModelConfig  # noqa: E402
from mm.data.loader.broadcast import deal_images  # noqa: E402
from mm.errors import AgreedError  # noqa: E402
from mm.model.load import set_weight  # noqa: E402
from mm.model.stage import Stage  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.placement import Placement  # noqa: E402
from mm.run.optim.optimizer import owned_states  # noqa: E402
from mm.run.optim.update import StepResult, update  # noqa: E402
from mm.run.step import Setup, forward_backward  # noqa: E402
from mm.weights.fuse import shard  # noqa: E402
from mm.weights.shard import MemoryLayout  # noqa: E402
from mm.weights.table import Weight, model_weights, published_name, stage_weights  # noqa: E402
from mm.weights.trained import is_frozen  # noqa: E402
from tests.devices import kernels_of  # noqa: E402
from tests.files import write_whole  # noqa: E402
from tests.microbatches import own_pixels  # noqa: E402
from tests.parallel.case_model import config_of  # noqa: E402
from tests.parallel.cases import (  # noqa: E402
    CASES,
    GROUP_FLAGS,
    MATRIX,
    NOT_FINITE,
    PROJECTOR_DECAY,
    PROJECTOR_LR,
    VISION_LR,
    Case,
    batch_of,
)
from tests.tiny import copied_weights, hf_loss, hf_model, hf_tensors, microbatch, whole  # noqa: E402

LR, WEIGHT_DECAY = 1e-3, 0.1


def part_of(name: str) -> str:
    """By transformers' name."""
    return "projector" if "visual.merger" in name else "vision" if "visual" in name else "language"


def adam_group(name: str, parameter: torch.nn.Parameter, case: Case) -> dict:
    """The parameter as a group of torch's AdamW, by transformers' name."""
    lr, decay = LR, 0.0 if parameter.dim() == 1 else WEIGHT_DECAY
    if case.groups:
        lr = {"vision": VISION_LR, "projector": PROJECTOR_LR, "language": LR}[part_of(name)]
        lr *= 0.5 if ".mlp." in name else 1.0
        decay = PROJECTOR_DECAY if part_of(name) == "projector" else 2.0
        decay = 0.0 if parameter.dim() == 1 or "embed_tokens" in name else decay
    return {"params": [parameter], "lr": lr, "weight_decay": decay}


@cache
def reference(case: Case) -> dict:
    """Loss, gradients and gradient norm of transformers' model; and after an update, the loss and the weights after
    another one."""
    microbatches = [microbatch for rank in batch_of(case) for microbatch in rank]
    model = hf_model(case.tied, num_key_heads=case.num_key_heads)
    before = {name: tensor.clone() for name, tensor in hf_tensors(model).items()}
    config = config_of(case)
    frozen = {name for weight in model_weights(config) if is_frozen(weight, config) for name in weight.hf_names}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(published_name(name) not in frozen)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [adam_group(name, p, case) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(groups or [torch.zeros(())], lr=LR, betas=(0.9, 0.999), eps=1e-8)

    def step() -> tuple[float, dict[str, Tensor], float]:
        """Loss, gradients and gradient norm, before an update."""
        loss = hf_loss(model, microbatches, case.loss_unit)
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = {name: tensor.clone() for name, tensor in hf_tensors(model, gradients=True).items()}
        norm = torch.stack([p.grad.norm() for p in trainable]).norm() if trainable else torch.zeros(())
        if case.clip_grad > 0.0:
            torch.nn.utils.clip_grad_norm_(trainable, case.clip_grad)
        optimizer.step()
        return float(loss), gradients, float(norm)

    (loss, gradients, norm), (loss_after, _, _) = step(), step()
    return {"before": before, "loss": loss, "loss_after": loss_after, "gradients": gradients, "norm": norm,
            "after": hf_tensors(model)}


def from_first_rank(compute: Callable[[], dict]) -> dict:
    """What ``compute`` returns on the first rank, on every rank: the others leave it the processor meanwhile."""
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def relative_errors(pairs: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup | None) -> list[float]:
    """The relative error of each pair, (ours, expected), in the L2 norm over its pieces on all ranks of ``group``."""
    sums = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for both, (ours, expected) in zip(sums, pairs, strict=True):
        both[0], both[1] = (ours.double() - expected.double()).square().sum(), expected.double().square().sum()
    if group is not None:
        dist.all_reduce(sums, group=group)
    return [0.0 if error == 0 else float((error / size.clamp_min(1e-30)).sqrt().nan_to_num(torch.inf))
            for error, size in sums]


@dataclass
class Engine:
    """Our side of one case, on this rank."""

    case: Case
    config: ModelConfig
    placement: Placement
    setup: Setup
    weights: dict[str, Weight]
    plan: StepPlan

    def cut(self, tensors: dict[str, Tensor], name: str) -> Tensor:
        """This rank's part of weight ``name`` made from Hugging Face tensors, padded with zeros as in memory."""
        weight, mesh = self.weights[name], self.setup.mesh
        part = shard(weight, whole(weight, tensors), mesh.tp_size, mesh.tp_rank)
        return MemoryLayout.of(weight, mesh.tp_size).pad_whole(part)

    def update(self, loss: Tensor) -> StepResult:
        return update(self.setup.optimizer, loss, LR, self.setup.mesh, self.setup.stage.device)

    def loss(self) -> float:
        """The loss of the global batch, from a forward and backward pass; the shares of a head's ranks count once."""
        loss = forward_backward(self.setup, self.plan)
        dist.all_reduce(loss, group=self.setup.mesh.groups.dp_cp)
        dist.all_reduce(loss, group=self.setup.mesh.groups.pp)
        return float(loss)


def mesh_of(case: Case, config: ModelConfig | None = None) -> parallel.Mesh:
    return parallel.build_mesh(config or config_of(case), case.tp, parallel.timedelta(minutes=2), case.cp, case.ring)


def build(
    case: Case, before: dict[str, Tensor], config: ModelConfig | None = None, mesh: parallel.Mesh | None = None
) -> Engine:
    """Stage with the weights ``before``, DDP, optimizer and this replica's part of the batch; and a mesh if none is
    given.

    ``config``: a model beyond what the case says, with adapters.
    """
    config = config_of(case) if config is None else config
    placement = config.placement()
    args = arguments.parse(
        ["--lr", str(LR), "--weight-decay", str(WEIGHT_DECAY), "--clip-grad", str(case.clip_grad), "--train-iters", "1"]
        + ["--micro-batch-size", "2", "--seq-length", "512", "--mm-model", "m.json", "--mm-data", "d.json"]
        + list(GROUP_FLAGS) * case.groups
        + ["--data-parallel-sharding-strategy", case.sharding]
        + ["--overlap-grad-reduce"] * case.overlap
        + ["--no-overlap-p2p-communication"] * case.waits
        + ["--overlap-param-gather"] * (case.overlap and case.sharding != "no_shard")
    )
    mesh = mesh_of(case, config) if mesh is None else mesh
    device = _fused(DEVICE) if case.fused else DEVICE
    stage = Stage(config, mesh, "fp32", device, case.loss_unit, case.sequence_parallel, args.shards_weights)
    for chunk in stage.chunks:
        if case.logit_rows is not None and chunk.spec.has_head:
            chunk.text_decoder.output_layer.max_rows = case.logit_rows
    weights = {weight.name: weight for weight in stage.weights}
    for weight in stage.weights:
        set_weight(stage, weight, shard(weight, whole(weight, before), case.tp, mesh.tp_rank), mesh)
    batches, numbers = [], itertools.count()
    for rank in batch_of(case):
        batches.append([replace(microbatch(pair), samples=tuple(itertools.islice(numbers, len(pair))))
                        for pair in rank])
    totals = BatchTotals.of([one for rank in batches for one in rank], config.vision)
    mine = deal_images(batches[mesh.dp_rank], config, mesh.context.num_encoders)
    passes = passes_of_any(image_passes(one, config.encoder_batch_size) for one in batches)
    plan = StepPlan(tuple(own_pixels(one, mesh.context) for one in mine), totals, image_passes=passes)
    return Engine(case, config, placement, Setup.build(stage, mesh, args), weights, plan)


def _fused(device: Device) -> Device:
    """With the kernel functions that CUDA compiles, not compiled; the rest of CUDA's kernels runs nowhere else."""
    ours = kernels_of("cuda", lambda function: function)
    kernels = replace(device.kernels, add_norm=ours.add_norm, logits=ours.logits, swiglu=ours.swiglu, rope=ours.rope)
    return replace(device, kernels=kernels)


def reduced_gradient(setup: Setup, weight: Any, start: int, stop: int) -> Tensor:
    """The reduced gradient of these elements of a flat weight, which this rank's optimizer updates."""
    if setup.passes is None:
        return weight.main_grad.flatten()[start:stop]
    assert not hasattr(weight, "main_grad"), "no gradient but the shard is kept"
    models: Any = setup.models  # whose weights are cut, in units
    shards = {one: shard for model in models for bucket in model.gradient_buckets for one, shard in bucket.shards()}
    return shards.get(weight, torch.zeros(0))[: stop - start]


def gradient_errors(engine: Engine, expected: dict[str, Tensor]) -> tuple[dict[str, float], list[str]]:
    """Relative error of each reduced gradient, over all replicas; and parameters whose cuts do not cover them."""
    ranges = {one.name: (one.start, one.stop) for one in owned_states(engine.setup.optimizer, engine.setup.models)}
    copies = engine.case.dp * engine.case.cp if engine.case.sharding == "no_shard" else 1
    trained = {name: one for name, one in engine.setup.stage.named_parameters() if one.requires_grad}
    if not trained:
        return {}, []
    spans = [ranges.get(name, (0, 0)) for name in trained]
    pairs = [(reduced_gradient(engine.setup, one, start, end), engine.cut(expected, name).flatten()[start:end])
             for (name, one), (start, end) in zip(trained.items(), spans, strict=True)]
    covered = torch.tensor([end - start for start, end in spans])
    group = engine.setup.mesh.groups.dp_cp  # of one stage, so its ranks have the same parameters
    dist.all_reduce(covered, group=group)
    uncovered = [name for count, (name, one) in zip(covered.tolist(), trained.items(), strict=True)
                 if count != one.numel() * copies]
    return dict(zip(trained, relative_errors(pairs, group), strict=True)), uncovered


def weight_errors(engine: Engine, expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each weight on this rank."""
    stage = engine.setup.stage
    return {weight.name: relative_errors([(values, engine.cut(expected, weight.name))], None)[0]
            for weight, values in stage.whole_weights(stage.weights)}


def refuses_a_gradient_that_is_not_finite(case: Case, mesh: parallel.Mesh) -> bool:
    """Whether one NaN on the last rank makes every rank refuse the update, with all weights as they were."""
    engine = build(case, hf_tensors(hf_model(case.tied, num_key_heads=case.num_key_heads)), mesh=mesh)
    loss = forward_backward(engine.setup, engine.plan)
    before = copied_weights(engine.setup.stage)
    ranges = {one.name: (one.start, one.stop) for one in owned_states(engine.setup.optimizer, engine.setup.models)}
    name, (start, _) = next(item for item in ranges.items() if ".linear_" in item[0] and item[0].endswith("weight"))
    if engine.setup.mesh.rank == engine.setup.mesh.world_size - 1:
        parameter = engine.setup.stage.get_parameter(name)
        reduced_gradient(engine.setup, parameter, start, start + 1)[0] = float("nan")
    try:
        engine.update(loss)
        refused = False
    except AgreedError:
        refused = all(torch.equal(before[name], one) for name, one in copied_weights(engine.setup.stage).items())
    gathered: list = [None] * engine.setup.mesh.world_size
    dist.all_gather_object(gathered, refused)
    return all(gathered)


def run_case(case: Case, mesh: parallel.Mesh) -> dict:
    expected = from_first_rank(lambda: reference(case.without_layout))
    engine = build(case, expected["before"], mesh=mesh)
    if case.overlap:  # the first pass only learns which gradients to wait for
        forward_backward(engine.setup, engine.plan)
    loss = forward_backward(engine.setup, engine.plan)
    by_gradient, uncovered = gradient_errors(engine, expected["gradients"])
    result = engine.update(loss)
    after = engine.update(forward_backward(engine.setup, engine.plan))
    engine.setup.finish_gathering()
    by_weight = weight_errors(engine, expected["after"])
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (by_gradient, by_weight, uncovered))
    worst = [max(((e, n) for g in gathered for n, e in g[i].items()), default=(0.0, "")) for i in (0, 1)]

    def error(ours: float, theirs: float) -> float:
        return abs(ours - theirs) / max(abs(theirs), 1e-30)

    return {
        "loss": result.loss,
        "loss_error": error(result.loss, expected["loss"]),
        "loss_after_error": error(after.loss, expected["loss_after"]),
        "gradient_error": worst[0][0],
        "gradient_worst": worst[0][1],
        "num_gradients": sum(len(g[0]) for g in gathered),
        "expected_gradients": case.tp * case.cp * case.dp * sum(
            not is_frozen(weight, engine.config)
            for spec in engine.placement.slots
            for weight in stage_weights(engine.config, spec)
        ),
        "uncovered": sorted({name for g in gathered for name in g[2]}),
        "weight_error": worst[1][0],
        "weight_worst": worst[1][1],
        "grad_norm_error": error(result.grad_norm, expected["norm"]),
        "grad_norm": result.grad_norm,
    }


@contextmanager
def joined(case: Case, store: dist.Store, rank: int) -> Iterator[None]:
    """A process group for each mesh: the threads of all their groups together would slow every case down."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size,
                            timeout=parallel.timedelta(minutes=2))
    yield
    dist.destroy_process_group()
    gc.collect()  # cycles keep groups, and their threads: 500 after 150 cases


def groups_of(case: Case) -> tuple:
    """All that a case's mesh depends on: to build one takes longer than a step."""
    config = config_of(case)
    place = config.placement()
    stages = (place.patch_embedding_stage, place.projector_stage, place.embedding_slot.stage, place.head_slot.stage)
    return (case.tp, case.cp, case.dp, case.pp, *stages, case.ring, case.tied, case.whole_encoder)


def with_meshes(
    cases: Sequence[Any], store: dist.Store, rank: int, layout_of: Callable[[Any], Case] = lambda case: case
) -> Iterator[tuple[Any, parallel.Mesh]]:
    """Each case with its mesh; those with equal meshes come one after another and have the same."""
    def key(case: Any) -> tuple:
        return groups_of(layout_of(case))

    for _, equal in itertools.groupby(sorted(cases, key=key), key):
        first, *others = equal
        layout = layout_of(first)
        with joined(layout, dist.PrefixStore(layout.name, store), rank):
            mesh = mesh_of(layout)
            for case in (first, *others):
                yield case, mesh
            parallel.stop_mesh()


def run_all(output: Path, only: list[str], store: dist.Store, rank: int, world_size: int) -> None:
    results = {}
    wanted = [case for case in (*CASES, *MATRIX) if case.name in only] if only else CASES
    mine = [case for case in wanted if case.world_size == world_size]
    for case, mesh in with_meshes(mine, store, rank):
        found = results[case.name] = run_case(case, mesh)
        if case.name in NOT_FINITE:
            found["refused"] = refuses_a_gradient_that_is_not_finite(case, mesh)
        if rank == 0:
            print(case.name, json.dumps(found), flush=True)
    if rank == 0:
        output.write_text(json.dumps(results), encoding="utf-8")


def serve(directory: Path, store: dist.Store, rank: int) -> None:
    """Run the cases that appear in ``directory``, each on as many of these ranks as it wants."""
    for number in itertools.count():
        if rank == 0:
            asked = directory / f"{number}.json"
            while not asked.exists():
                time.sleep(0.05)
            store.set(f"asked {number}", asked.read_text(encoding="utf-8") or "{}")
        fields = json.loads(store.get(f"asked {number}"))
        if not fields:
            return
        case = Case.from_json(fields)
        if rank < case.world_size:
            with joined(case, dist.PrefixStore(str(number), store), rank):
                result = run_case(case, mesh_of(case))
                parallel.stop_mesh()
            if rank == 0:
                write_whole(directory / f"{number}.found.json", json.dumps(result))


def main(output: Path, only: list[str]) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          timeout=parallel.timedelta(days=1))
    if output.is_dir():
        serve(output, store, rank)
    else:
        run_all(output, only, store, rank, world_size)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
