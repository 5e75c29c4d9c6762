"""Damages one weight on one rank at a time, and writes what the check of the weights finds, as JSON.

Launched by tests/run/checkpoint/test_weight_check.py on four ranks: ``weight_check_worker OUTPUT.json``.
"""

import json
import sys
from pathlib import Path

from tests.parallel.state_run import Layout, Run

import torch  # isort: skip  (after the device has been picked)
import torch.distributed as dist  # isort: skip

from mm.errors import AgreedError
from mm.model.stage import Stage
from mm.parallel import mesh as parallel
from mm.run.checkpoint.weight_check import check_weights

EMBEDDING = "text_decoder.embedding.word_embeddings.weight"
HEAD = "text_decoder.output_layer.weight"
FC1 = "text_decoder.decoder.layers.1.mlp.linear_fc1.weight"
NORM = "text_decoder.decoder.layers.2.input_layernorm.weight"
LAYOUTS = {
    "dp4": (Layout(), ((2, FC1), (0, NORM))),
    "tp2-dp2": (Layout(tp=2, precision="bf16", flags=("--use-distributed-optimizer",)), ((1, FC1), (1, NORM))),
    "pp2-tied-dp2": (Layout((4, 0), (1, 3), tied=True), ((0, EMBEDDING), (3, HEAD), (2, NORM))),
}
"""Layout, and the ranks and weights to damage."""


def flip(weight: torch.Tensor) -> None:
    """Flip the lowest bit of the last element."""
    bits = weight.detach().view(-1).view({2: torch.int16, 4: torch.int32}[weight.element_size()])
    bits[-1] ^= 1


def held(stage: Stage, name: str) -> torch.Tensor:
    """What this rank keeps of a weight: the norm that is damaged begins its bucket, which is in the first shard."""
    parameter, shards = stage.get_parameter(name), stage.chunks[0].weight_shards
    return parameter if shards is None else shards.shard_of(parameter)[0]


def find(run: Run) -> str:
    try:
        check_weights(run.setup, run.progress.iteration)
    except AgreedError as error:
        return str(error)
    return ""


def main(output: str) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=parallel.timedelta(minutes=2))
    results = {}
    for name, (layout, damages) in LAYOUTS.items():
        run = Run(layout)
        if layout.flags:  # ranks have updated different weights
            run.train(2)
        found = {"": find(run)}
        for rank, weight in damages:
            for _ in range(2):  # and mend it
                if (shards := run.stage.chunks[0].weight_shards) is not None:
                    shards.weights_change()
                if dist.get_rank() == rank:
                    flip(held(run.stage, weight))
                found.setdefault(f"{rank} {weight}", find(run))
        found["mended"] = find(run)
        results[name] = found
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(results), encoding="utf-8")
    parallel.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
