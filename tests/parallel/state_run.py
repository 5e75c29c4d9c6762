"""The small model in training under one layout, for scenarios that need several layouts in one set of processes."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mm.device.device import Device

DEVICE = Device.pick("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

from mm.batch import BatchTotals, StepPlan, image_passes, passes_of_any  # noqa: E402
from mm.checkpoint.directories import find_checkpoint  # noqa: E402
from mm.checkpoint.source import open_to_train  # noqa: E402
from mm.checkpoint.training_files import ALL_KEPT, Retention  # noqa: E402
from mm.config import args as arguments  # noqa: E402
from mm.config.model import ModelConfig  # noqa: E402
from mm.data.loader.broadcast import deal_images  # noqa: E402
from mm.errors import UserError  # noqa: E402
from mm.model.load import initialize  # noqa: E402
from mm.model.stage import Stage  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.parallel.agreement import on_first, together  # noqa: E402
from mm.run.checkpoint import restore as state  # noqa: E402
from mm.run.checkpoint.disks import Disks  # noqa: E402
from mm.run.checkpoint.save import BegunSave  # noqa: E402
from mm.run.optim.optimizer import OwnedState, owned_states, scaler_state  # noqa: E402
from mm.run.optim.update import gradients_for_norm  # noqa: E402
from mm.run.step import Setup, forward_backward, step  # noqa: E402
from mm.weights.fuse import unshard  # noqa: E402
from mm.weights.shard import joined, memory_shape  # noqa: E402
from mm.weights.table import model_weights  # noqa: E402
from tests.microbatches import own_pixels  # noqa: E402
from tests.parallel.cases import Lists, nested  # noqa: E402
from tests.tiny import copied_weights, microbatch, our_config, random_sample, without_padding  # noqa: E402

LR = 1e-3


@dataclass(frozen=True)
class Layout:
    """How the small model is laid out on the ranks and trained."""

    vision: Lists = (4,)
    language: Lists = (4,)
    tp: int = 1
    cp: int = 1
    tied: bool = False
    freeze: tuple[str, ...] = ()
    freeze_layers: tuple[str, str] = ("", "")
    freeze_modules: tuple[str, ...] = ()
    precision: str = "fp32"
    flags: tuple[str, ...] = ()
    whole_encoder: bool = False

    @property
    def model(self) -> ModelConfig:
        config = our_config(nested(self.vision), nested(self.language), self.tied, self.freeze, self.freeze_layers,
                            self.freeze_modules)
        return replace(config, encoder_placement="tensor_ranks" if self.whole_encoder else "cut")


def mesh_key(layout: Layout) -> tuple:
    """All that a run's mesh depends on.  Consecutive runs with equal keys share one mesh."""
    return layout.vision, layout.language, layout.tp, layout.cp, layout.tied, layout.whole_encoder


@dataclass
class CurrentMesh:
    """The one mesh that exists at a time; kept while it fits, because every group has threads of its own."""

    key: object = None
    mesh: parallel.Mesh | None = None

    def of(self, layout: Layout) -> parallel.Mesh:
        key = mesh_key(layout)
        if key != self.key:
            parallel.stop_mesh()
            gc.collect()
            for group in [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
                dist.destroy_process_group(group)
            self.mesh = parallel.build_mesh(layout.model, layout.tp, parallel.timedelta(minutes=2), layout.cp)
            self.key = key
        return self.mesh


CURRENT = CurrentMesh()


class Run:
    """Training under one layout, from random weights."""

    def __init__(self, layout: Layout, seed: int = 1, model: ModelConfig | None = None) -> None:
        self.layout, self.config = layout, model or layout.model
        self.mesh = CURRENT.of(layout)
        args = arguments.parse(
            ["--lr", str(LR), "--weight-decay", "0.1", "--train-iters", "9", "--micro-batch-size", "1"]
            + ["--seq-length", "64", "--mm-model", "m", "--mm-data", "d", *layout.flags]
            + ([] if layout.precision == "fp32" else [f"--{layout.precision}"])
        )
        self.args = args
        stage = Stage(self.config, self.mesh, layout.precision, DEVICE, sequence_parallel=args.sequence_parallel,
                      shards_weights=args.shards_weights)
        initialize(stage, stage.weights, self.mesh, seed, std=0.15)
        self.setup = Setup.build(stage, self.mesh, args)
        self.stage, self.optimizer = stage, self.setup.optimizer
        self.progress = state.TrainingProgress(0, 0)

    def plan(self) -> StepPlan:
        """This replica's part of the next step; the data depends on how far training has come."""
        generator = torch.Generator().manual_seed(self.progress.iteration)
        grids = ((), ((1, 4, 6),), ((1, 4, 4), (1, 2, 4)), ())
        samples = [random_sample(generator, grid, 9 + 5 * i) for i, grid in enumerate(grids)]
        batch, context = [microbatch(samples[:2]), microbatch(samples[2:])], self.mesh.context
        share = len(batch) // self.mesh.dp_size
        replicas = [batch[first : first + share] for first in range(0, len(batch), share)]
        own, passes = replicas[self.mesh.dp_rank], passes_of_any(image_passes(one, 1) for one in replicas)
        mine = [own_pixels(one, context) for one in deal_images(own, self.config, context.num_encoders)]
        return StepPlan(tuple(mine), BatchTotals.of(batch, self.config.vision), image_passes=passes)

    def train(self, num_steps: int) -> list[float]:
        """Losses of that many steps."""
        losses = []
        for _ in range(num_steps):
            losses.append(step(self.setup, self.plan(), LR).loss)
            self.progress = state.TrainingProgress(self.progress.iteration + 1, self.progress.consumed_samples + 4)
        return losses

    def gradients(self) -> list[Tensor]:
        """Gradients of the next step, reduced, in fp32, as this rank's optimizer gets them."""
        forward_backward(self.setup, self.plan())
        assert not self.optimizer.prepare_grads()
        return [gradient for one in self.optimizer.chained_optimizers for gradient in gradients_for_norm(one)]

    def save(
        self, directory: Path, retention: Retention = ALL_KEPT, disks: Disks | None = None, **options: bool
    ) -> Path:
        begun = BegunSave.begin(directory, self.progress, self.setup, {"seed": 1}, disks=disks, **options)
        return begun.finish(self.setup, retention)

    def load(self, directory: Path, **options: object) -> "Run":
        mesh = self.setup.mesh
        folder, _ = on_first(mesh, lambda: find_checkpoint(directory))
        source = together(mesh, lambda: open_to_train(folder, self.stage.model))
        self.progress = state.load(source, self.setup, **options)
        return self

    def local(self) -> dict[str, Tensor]:
        """Every number on this rank that training goes on from."""
        for model in self.setup.models:
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)
        found = copied_weights(self.stage)
        for owned in owned_states(self.optimizer, self.setup.models):
            found |= {f"{owned.name}:{part}": tensor.clone() for part, tensor in owned.tensors().items()}
            found[f"{owned.name}:step"] = torch.tensor(owned.step)
        found |= {f"scaler:{key}": torch.tensor(value) for key, value in (scaler_state(self.optimizer) or {}).items()}
        return found

    def whole(self) -> dict[str, Tensor]:
        """The same of the whole model, put together from all ranks without any file; padding must be zero."""
        mesh, weights = self.mesh, copied_weights(self.stage)
        # in fp32, because moments may be in bf16 in one of two layouts; arrays are pickled several times faster than
        # tensors
        mine = [((name, "weight"), 0, values.reshape(-1).float().numpy()) for name, values in weights.items()] + [
            ((owned.name, part), owned.start, tensor.float().numpy())
            for owned in owned_states(self.optimizer, self.setup.models)
            for part, tensor in _numbers(owned, weights).items()
        ]
        gathered: list = [None] * mesh.world_size
        dist.all_gather_object(gathered, (mesh.tp_rank, mine))
        shards: dict[tuple[str, str], list[Tensor]] = {}
        by_key: dict[tuple[str, str], list[tuple[int, int, Tensor]]] = {}
        for tp, one in gathered:
            for key, start, values in one:
                by_key.setdefault(key, []).append((tp, start, torch.from_numpy(values)))
        for weight in model_weights(self.config):
            for part in ("weight", "master", "exp_avg", "exp_avg_sq"):
                shape = memory_shape(weight, mesh.tp_size)
                flat = [torch.full(shape, torch.nan).reshape(-1) for _ in range(mesh.tp_size)]
                found = by_key.get((weight.name, part), [])
                for tp, start, tensor in found:
                    flat[tp][start : start + tensor.numel()] = tensor
                if found:
                    held = [one.reshape(shape) for one in flat]
                    shards[weight.name, part] = [without_padding(weight, one, mesh.tp_size) for one in held]
        by_name = {weight.name: weight for weight in model_weights(self.config)}
        return {f"{name}:{part}": unshard(by_name[name], one) for (name, part), one in shards.items()}


def _numbers(owned: OwnedState, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """``owned.tensors``, with an fp32 copy also where the weight and a remainder are kept instead."""
    found = owned.tensors()
    if "remainder" in found:
        weight = weights[owned.name].reshape(-1)[owned.start : owned.stop]
        found["master"] = joined(weight, found.pop("remainder"))
    return found


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what is not equal bit for bit, on any rank."""
    names = [name for name in sorted(one.keys() | other.keys())
             if name not in one or name not in other or not torch.equal(one[name], other[name])]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return sorted(set().union(*gathered))


def problems_of(action: Callable[[], object]) -> list[list[str]]:
    """The problems that ``action`` raises on each rank; it must raise on all."""
    found: list[str] = []
    try:
        action()
    except UserError as error:
        found = list(error.problems)
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return gathered
