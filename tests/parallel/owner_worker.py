"""Shares the steps of small random batches in every layout and writes what each of four ranks received.

Launched by tests/data/loader/test_broadcast.py: ``owner_worker DIRECTORY``.  Each rank writes
DIRECTORY/RANK.json as it goes; nothing is judged here.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from mm.batch import Microbatch
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.errors import UserError
from tests.tiny import microbatch, our_config, random_sample

if TYPE_CHECKING:
    import torch

    from mm.data.loader.loader import ReadStep


@dataclass(frozen=True)
class Layout:
    """Four ranks; ``vision`` and ``language`` are the pipeline lists."""

    name: str
    vision: tuple[int, ...]
    language: tuple[int, ...]
    tp: int
    dp: int
    cp: int = 1
    whole_encoder: bool = False
    encoder_batch: int = 1

    @property
    def config(self) -> ModelConfig:
        placement = "tensor_ranks" if self.whole_encoder else "cut"
        return replace(our_config((self.vision,), (self.language,)), encoder_placement=placement,
                       encoder_batch_microbatches=self.encoder_batch)

    @property
    def num_encoders(self) -> int:
        return self.cp * (self.tp if self.whole_encoder else 1)


LAYOUTS = (
    Layout("tp2-pp2", (3, 1), (0, 4), tp=2, dp=1),
    Layout("tp2-pp2-patches-on-second", (0, 4), (0, 4), tp=2, dp=1),
    Layout("dp2-pp2", (3, 1), (0, 4), tp=1, dp=2),
    Layout("dp2-pp2-patches-on-second", (0, 4), (0, 4), tp=1, dp=2),
    Layout("pp4-patches-on-second", (0, 2, 2, 0), (0, 0, 1, 3), tp=1, dp=1),
    Layout("tp2-dp2", (4,), (4,), tp=2, dp=2),
    Layout("cp2-dp2", (4,), (4,), tp=1, dp=2, cp=2),
    Layout("cp2-pp2-patches-on-second", (0, 4), (0, 4), tp=1, dp=1, cp=2),
    Layout("tp2-cp2", (4,), (4,), tp=2, dp=1, cp=2),
    Layout("cp4", (4,), (4,), tp=1, dp=1, cp=4),
    Layout("whole-tp2-cp2", (4,), (4,), tp=2, dp=1, cp=2, whole_encoder=True),
    Layout("whole-tp2-pp2-patches-on-second", (0, 4), (0, 4), tp=2, dp=1, whole_encoder=True),
    Layout("whole-tp2-pp2", (3, 1), (0, 4), tp=2, dp=1, whole_encoder=True),
    Layout("whole-tp2-dp2", (4,), (4,), tp=2, dp=2, whole_encoder=True),
    Layout("whole-tp2-cp2-together", (4,), (4,), tp=2, dp=1, cp=2, whole_encoder=True, encoder_batch=2),
)

ONE, TWO = ((1, 4, 6),), ((1, 2, 4), (2, 4, 4))
STEPS = (
    (((ONE, ()), ((), TWO)), (((), ()), (TWO, ONE))),
    ((((),), ((), ())), (((),), ((),))),  # text only
    (((ONE, TWO), ((),)), (((),), ((),))),  # images on the first replica only
    ((((),), ((),)), (((), ONE), (TWO,))),  # images on the second replica only
    ((((),), (TWO,)), ((ONE,), ((),))),
)
"""Image grids as ``[step][dp rank][microbatch][sample]``; one replica alone reads the first part."""
FAILING_STEP = 2
WITH_KEYS, WITH_FEATURES = 3, 4
"""Steps whose images have keys, and whose images have what was kept of the ViT's work in place of pixels."""


@cache
def batches(dp_rank: int) -> list[list[Microbatch]]:
    """The microbatches of every step of one replica; no two samples are alike."""
    steps = []
    for number, replicas in enumerate(STEPS):
        generator = torch_generator(100 * number + dp_rank)
        steps.append([
            replace(
                microbatch([random_sample(generator, grids, 8 + 3 * at + number) for at, grids in enumerate(samples)]),
                samples=tuple(100 * number + 10 * which + at for at in range(len(samples))))
            for which, samples in enumerate(replicas[dp_rank])
        ])  # fmt: skip
    steps[WITH_KEYS] = [replace(one, feature_keys=tuple(
        "" if image == 1 else sha256(bytes([dp_rank, number, image])).hexdigest()[:32]
        for image in range(len(one.image_grids)))) for number, one in enumerate(steps[WITH_KEYS])]
    steps[WITH_FEATURES] = [with_features(one) for one in steps[WITH_FEATURES]]
    return steps


def with_features(one: Microbatch) -> Microbatch:
    """Bytes of its pixels as what was kept."""
    if one.pixel_values is None:
        return one
    return replace(one, pixel_values=None, features=one.pixel_values[:, :24].clone(), feature_bytes=24)


def torch_generator(seed: int) -> "torch.Generator":
    import torch

    return torch.Generator().manual_seed(seed)


def fingerprint(one: Microbatch) -> dict:
    """Everything about a microbatch: dtypes, shapes and contents, light part and pixels apart."""

    import torch

    def of(tensor) -> list:
        contents = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return [str(tensor.dtype), list(tensor.shape), sha256(contents).hexdigest()]

    return {
        "token_ids": of(one.token_ids),
        "labels": of(one.labels),
        "positions": of(one.positions),
        "segment_lengths": list(one.segment_lengths),
        "image_grids": [list(grid) for grid in one.image_grids],
        "samples": list(one.samples),
        "normalisations": [[rule.divisor, *rule.mean, *rule.std] for rule in one.normalisations],
        "pixels": None if one.pixel_values is None else of(one.pixel_values),
        "features": None if one.features is None else of(one.features),
        "feature_bytes": one.feature_bytes,
        "feature_keys": list(one.feature_keys),
    }


class Loader:
    """The owner's iterator: counts how often it is asked, and may raise ``failure`` on the way."""

    def __init__(self, steps: list[list[Microbatch]], failure: Exception | None) -> None:
        self.steps, self.failure, self.num_asked = steps, failure, 0

    def __iter__(self) -> Iterator[list[Microbatch]]:
        return self

    def __next__(self) -> "ReadStep":
        from mm.data.loader.loader import ReadStep

        self.num_asked += 1
        if self.failure is not None and self.num_asked > FAILING_STEP:
            raise self.failure
        return ReadStep(self.steps[self.num_asked - 1])


def receive(layout: Layout, failure: Exception | None = None) -> dict:
    """What this rank was given in every step, and what it asked of the loader; the last replica's may raise.

    After a failure that only that rank knows, its process must end, so that the others notice.
    """
    from mm.data.loader.broadcast import StepBroadcast
    from mm.parallel import mesh as parallel

    config = layout.config
    placement = config.placement()
    mesh = parallel.build_mesh(config, layout.tp, parallel.timedelta(seconds=60), layout.cp, keeps_features=True)
    fails = failure if mesh.dp_rank == mesh.dp_size - 1 else None
    loader = Loader(batches(mesh.dp_rank), fails) if mesh.owns_data else None
    device = Device.pick("cpu")
    spec = placement[mesh.pp_rank]
    owner = StepBroadcast(loader, mesh, len(STEPS), spec.has_patch_embedding, config, device,
                      holds_projector=spec.has_projector)
    steps, error = [], None
    try:
        for plan in owner:
            steps.append({"microbatches": [fingerprint(m) for m in plan.microbatches], "totals": asdict(plan.totals)})
    except Exception as raised:
        if failure is None:
            raise
        error = f"{type(raised).__name__}: {raised}"
    if failure is None:
        owner.close()
    if failure is None or isinstance(failure, (UserError, OSError)):  # known to all ranks
        parallel.stop_mesh()
    return {
        "place": {"tp": mesh.tp_rank, "cp": mesh.cp_rank, "pp": mesh.pp_rank, "dp": mesh.dp_rank},
        "owns_data": mesh.owns_data,
        "num_asked": None if loader is None else loader.num_asked,
        "steps": steps,
        "error": error,
    }


def main(directory: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    path = Path(directory) / f"{dist.get_rank()}.json"
    received = {layout.name: receive(layout) for layout in LAYOUTS}
    received["user's mistake"] = receive(LAYOUTS[2], failure=UserError("data.json: sample 17 has no answer"))
    received["broken picture"] = receive(LAYOUTS[2], failure=OSError("picture 17 cannot be read"))
    received["bug"] = receive(LAYOUTS[2], failure=IndexError("list index out of range"))
    path.write_text(json.dumps(received), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    Device.pick("cpu")
    main(sys.argv[1])
