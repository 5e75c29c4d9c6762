"""What the ranks of ``mm-doctor`` compute: products, messages and one training step, whose results are known.

The heads of the tiny model are as wide as those of the real ones.  Its weights and samples are the same on every
machine, so a device whose kernels compute something else shows.  Importing this file imports megatron, which looks at
the device: choose that before.
"""

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np
import torch
import torch.distributed as dist

from mm.batch import BatchTotals, StepPlan
from mm.config.args import parse
from mm.config.model import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from mm.device.device import Device
from mm.doctor.machine import Diagnosis, fault, ok, warning
from mm.model.stage import Stage
from mm.parallel.agreement import by_rank
from mm.parallel.mesh import Mesh
from mm.plan.measure import random_microbatch
from mm.run.step import Setup, step

NUM_ELEMENTS = 1 << 22
"""In fp32: 16 MiB."""
_NUM_REPEATS = 5
_SIDE = 2048
_LATE = 2.0
"""A rank is slow if it takes more than this many times the median of all ranks."""
_CURE = ("check the links (nvidia-smi topo -m, npu-smi info -t topo), update the driver, or turn direct links off "
         "(NCCL_P2P_DISABLE=1, HCCL_INTRA_PCIE_ENABLE=1) to see which one is at fault")


def link_findings(
    device: Device, mesh: Mesh, names: Sequence[str], begin: Callable[[str], None]
) -> Iterator[Diagnosis]:
    """Speed of the devices and of the links between the ranks.  Collective over all ranks.  ``names``: each rank with
    its device; ``begin`` notes what this rank begins."""
    yield _speeds(device, mesh, names, begin)
    size, here = mesh.world_size, device.torch_device
    if size == 1:
        yield warning("links", "one rank, so no link was tried", "mm-doctor --num-processes 2, or more")
        return
    begin(f"all-reduce over {size} ranks")
    own = torch.empty(NUM_ELEMENTS, device=here)

    def all_reduce() -> bool:
        own.fill_(mesh.rank + 1.0)
        dist.all_reduce(own)
        return bool((own == size * (size + 1) / 2).all())

    seconds, is_right = _timed(all_reduce)
    wrong = [name for name, right in zip(names, by_rank(mesh, is_right), strict=True) if not right]
    speed = 2 * (size - 1) / size * own.nbytes / max(by_rank(mesh, seconds)) / 1e9
    yield fault("links", f"all-reduce over {size} ranks: wrong numbers on {', '.join(wrong)}", _CURE) if wrong else (
        ok("links", f"all-reduce over {size} ranks: {speed:.1f} GB/s in each direction (16 MiB of fp32)"))
    begin("messages to the next rank")
    arriving, sent = torch.empty(NUM_ELEMENTS, device=here), torch.full((NUM_ELEMENTS,), float(mesh.rank), device=here)

    def exchange() -> bool:
        both = [dist.P2POp(dist.isend, sent, (mesh.rank + 1) % size),
                dist.P2POp(dist.irecv, arriving, (mesh.rank - 1) % size)]
        for waiting in dist.batch_isend_irecv(both):
            waiting.wait()
        return bool((arriving == (mesh.rank - 1) % size).all())

    seconds, is_right = _timed(exchange)
    wrong = [f"from {names[rank - 1]} to {names[rank]}" for rank, right in enumerate(by_rank(mesh, is_right))
             if not right]
    speed = arriving.nbytes / max(by_rank(mesh, seconds)) / 1e9
    yield fault("links", f"messages arrive wrong {', '.join(wrong)}", _CURE) if wrong else (
        ok("links", f"messages to the next rank: {speed:.1f} GB/s (16 MiB)"))


def _timed(run: Callable[[], bool]) -> tuple[float, bool]:
    """The shortest time of ``run``, and whether its result was always right."""
    seconds, right = list[float](), list[bool]()
    for _ in range(_NUM_REPEATS):
        began = time.perf_counter()
        right.append(run())  # waits for the device
        seconds.append(time.perf_counter() - began)
    return min(seconds), all(right)


def _speeds(device: Device, mesh: Mesh, names: Sequence[str], begin: Callable[[str], None]) -> Diagnosis:
    """Whether some rank computes the same products more slowly than the others."""
    begin("matrix products")
    one = torch.full((_SIDE, _SIDE), 1.0, device=device.torch_device)
    seconds, _ = _timed(lambda: bool(((one @ one)[0, 0] == _SIDE).item()))
    of_ranks = by_rank(mesh, seconds)
    usual, slowest = median_low(of_ranks), max(of_ranks)
    name = names[of_ranks.index(slowest)]
    text = f"{_SIDE}^3 in fp32 takes {1000 * usual:.2f} ms"
    if slowest > _LATE * usual and device.platform.num_devices() is not None:  # ranks on the CPU share it
        return warning("matrix products", f"{text}, but {name} takes {slowest / usual:.1f} times as long",
                       "look at its clock, its temperature and other processes on it (nvidia-smi -q -d "
                       "CLOCK,PERFORMANCE, npu-smi info, top)")
    return ok("matrix products", f"{text}, and on the slowest, {name}, {1000 * slowest:.2f}")


GOLDEN = {"loss": 6.934884, "grad_norm": 12.055017}
"""Loss and gradient norm on the CPU in fp32."""
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Relative to ``GOLDEN``.  Measured on the CPU, torch 2.7.1 and 2.13: 1.5e-7 in fp32; 3.2e-4 (loss) and 9.9e-4 (norm)
in bf16.  No accelerator has run it yet.  A norm that is 1% off changes both by 1.8e-3 and 1.4e-2."""
_SAMPLES = ([(1, 12, 20)], 40), ([], 24), ([(1, 8, 8)], 9)
"""Patch grids of each sample's images, and the number of text tokens after them."""
_FLAGS = ("--mm-model", "-", "--mm-data", "-", "--micro-batch-size", "1", "--seq-length", "1024", "--train-iters", "1",
          "--lr", "1e-3", "--clip-grad", "0")
_DEVIATION = 0.08


def model() -> ModelConfig:
    """Two layers of each tower, one with window and one with full attention, with heads of 80 and of 128."""
    return ModelConfig(
        vision=VisionConfig(
            num_layers=2, pipeline_num_layers=((2,),), hidden_size=160, ffn_hidden_size=200, num_attention_heads=2,
            window_attn_size=112, fullatt_block_indexes=(1,), freeze=False),
        projector=ProjectorConfig(input_size=160, ffn_hidden_size=640, hidden_size=256),
        language=LanguageConfig(
            num_layers=2, pipeline_num_layers=((2,),), hidden_size=256, ffn_hidden_size=320, num_attention_heads=2,
            num_query_groups=1, vocab_size=512, max_position_embeddings=1024, mrope_section=(16, 24, 24)),
        image_token_id=501, video_token_id=502, vision_start_token_id=503)  # fmt: skip


def step_findings(device: Device, mesh: Mesh, begin: Callable[[str], None]) -> Iterator[Diagnosis]:
    """Whether a training step has the loss and gradient norm that it must have, in each precision."""
    for precision, tolerance in TOLERANCE.items():
        begin(f"training step in {precision}")
        found = trained_step(device, mesh, precision)
        text = ", ".join(f"{name} {found[name]:.6f} (expected {GOLDEN[name]:.6f})" for name in GOLDEN)
        if all(abs(found[name] / GOLDEN[name] - 1) <= tolerance for name in GOLDEN):
            yield ok(f"training step in {precision}", text)
        else:
            yield fault(f"training step in {precision}", text,
                        "a device computes something else: try each alone (--num-processes 1), update the driver and "
                        "the device's libraries to a pair of versions that was tested, and report it (--report)")


def trained_step(device: Device, mesh: Mesh, precision: str) -> dict[str, float]:
    """Train one step, the same on every data-parallel rank, and return its loss and gradient norm."""
    args = replace(parse(_FLAGS), bf16=precision == "bf16", global_batch_size=mesh.dp_size)
    stage = Stage(model(), mesh, precision, device)
    _fill(stage)
    setup = Setup.build(stage, mesh, args)
    microbatch = random_microbatch(model(), _SAMPLES)
    totals = BatchTotals.of([microbatch] * mesh.dp_size, model().vision)
    result = step(setup, StepPlan((microbatch,), totals), args.lr)
    return {"loss": result.loss, "grad_norm": result.grad_norm}


def _fill(stage: Stage) -> None:
    """Draw each weight with a seed that follows from its name; numpy promises that this old generator gives the same
    numbers in all versions."""
    with torch.no_grad():
        for weight, values in stage.whole_weights(stage.weights):
            drawn = np.random.RandomState(zlib.crc32(weight.name.encode())).standard_normal(tuple(values.shape))
            is_norm = len(values.shape) == 1 and not weight.name.endswith("bias")
            values.copy_(torch.from_numpy(drawn * _DEVIATION + is_norm))
