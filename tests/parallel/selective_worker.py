"""Compares a microbatch with and without each selective recompute on these ranks; writes what it finds as JSON.

Launched by tests/model/test_layers.py: ``selective_worker OUTPUT.json``.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.parallel import parity_worker
from tests.parallel.cases import Case
from tests.parallel.parity_worker import DEVICE, build, parallel
from tests.tiny import hf_model, hf_tensors


class Spy:
    """An operator that remembers what it returned, without keeping it alive."""

    def __init__(self, operator: Callable[..., Tensor]) -> None:
        self.operator, self.outputs = operator, []

    def __call__(self, *args) -> Tensor:
        out = self.operator(*args)
        self.outputs.append(StorageWeakRef(out.untyped_storage()))
        return out

    @property
    def num_alive(self) -> int:
        return sum(not output.expired() for output in self.outputs)


def measure(tp: int, recompute: str | None) -> tuple[dict, dict[str, Tensor]]:
    """How many outputs of the spied operators live between forward and backward; the loss and every gradient."""
    kernels = DEVICE.kernels
    spies = {"rms_norm": Spy(kernels.rms_norm), "swiglu": Spy(kernels.swiglu)}
    parity_worker.DEVICE = dataclasses.replace(DEVICE, kernels=dataclasses.replace(kernels, **spies))
    engine = build(Case("any", tp=tp, recompute=recompute), hf_tensors(hf_model(False)))
    (stage,), plan = engine.setup.stage.chunks, engine.plan
    microbatch = next(one for one in plan.microbatches if one.image_grids)
    loss = stage(stage.prepare(microbatch, plan.totals), None)
    kept = {name: (spy.num_alive, len(spy.outputs)) for name, spy in spies.items()}
    loss.backward()
    after = {name: len(spy.outputs) for name, spy in spies.items()}
    tensors = {name: parameter.main_grad.clone() for name, parameter in stage.named_parameters()}
    parallel.stop_mesh()
    return {"kept": kept, "calls": after}, {**tensors, "loss": loss.detach()}


def main(output: str) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=parallel.timedelta(minutes=2))
    plain, expected = measure(world_size, None)
    assert all(tensor.any() for tensor in expected.values())
    results = {"plain": plain, "num_tensors": len(expected), "different": []}
    for recompute in ("selective", "selective layernorm", "selective mlp_act", "selective mlp"):
        results[recompute], found = measure(world_size, recompute)
        results["different"] += [name for name in expected if not torch.equal(found[name], expected[name])]
    gathered: list = [None] * world_size
    dist.all_gather_object(gathered, results)
    if rank == 0:
        with open(output, "w", encoding="utf-8") as file:
            json.dump(gathered, file)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
