"""Trains the small model on real videos, on two pipeline stages or on one rank, from files to updates.

Launched by test_video_run.py: ``video_run CHECKPOINT CLIPS OUTPUT.json``.  The last rank writes the loss of each step.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from mm.device.device import Device

DEVICE = Device.pick("cpu")

import torch.distributed as dist  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from mm.config import flags  # noqa: E402
from mm.data.encode import SampleEncoder  # noqa: E402
from mm.data.loader import StepLoader  # noqa: E402
from mm.data.order import Order  # noqa: E402
from mm.data.owner import DataOwner  # noqa: E402
from mm.data.sample import Image, Sample, Turn, Video  # noqa: E402
from mm.model import load  # noqa: E402
from mm.model.stage import Stage  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.training.step import Parts, step  # noqa: E402
from tests.data.oracle import data_config  # noqa: E402
from tests.tiny import our_config  # noqa: E402

NUM_STEPS = 5


def samples(folder: Path) -> list[Sample]:
    """A video; text; a video between pictures; a video that is turned."""
    video, turned, picture = Video(str(folder / "plain.mp4")), Video(str(folder / "turned.mp4")), folder / "wide.png"
    questions = ((video, "What moves?"), ("Hello.",),
                 (Image(str(picture)), Video(video.path, fps=6.0, max_frames=12), Image(str(picture)), "?"), (turned,))
    return [Sample((Turn("user", parts), Turn("assistant", (f"A bar, number {number}.",))), f"by hand:{number}")
            for number, parts in enumerate(questions)]


def main(checkpoint: str, clips: str, output: str) -> None:
    dist.init_process_group("gloo")
    pp = dist.get_world_size()
    layers = (((4,),), ((4,),)) if pp == 1 else (((3, 1),), ((0, 4),))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in (
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"))}
    config = our_config(*layers)
    config = replace(config, **ids, language=replace(config.language, vocab_size=len(tokenizer)))
    mesh = parallel.build_mesh(config, 1, parallel.timedelta(minutes=2))
    args = flags.parse(["--lr", "1e-2", "--train-iters", "5", "--micro-batch-size", "2", "--seq-length", "512",
                        "--mm-model", "m.json", "--mm-data", "d.json"])  # fmt: skip
    stage = Stage(config, mesh, "fp32", DEVICE, "token", False)
    load.initialize(stage, mesh, 1, 0.1)
    parts = Parts.build(stage, mesh, args)
    loader = None
    if mesh.owns_data:
        data = data_config(Path(checkpoint), Path(clips), Path("unused"), video_max_pixels=96 * 96)
        order = Order(4, 1, True, global_batch_size=4, micro_batch_size=2, dp_rank=0, dp_size=1)
        loader = StepLoader(samples(Path(clips)), SampleEncoder.from_config(data, config, 512), order, num_workers=1)
    owner = DataOwner(loader, mesh, NUM_STEPS, stage.has_patch_embedding, config, stage.config.params_dtype, DEVICE)
    found = []
    for plan in owner:
        result = step(parts, plan, 1e-2)
        grids = [grid for one in plan.microbatches for grid in one.image_grids]
        found.append({"loss": result.loss, "grad_norm": result.grad_norm, "grids": sorted(grids)})
    owner.close()
    if loader is not None:
        loader.close()
    if mesh.rank == mesh.world_size - 1:
        Path(output).write_text(json.dumps(found), encoding="utf-8")
    parallel.stop()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
