"""Which flags make each published model fit on how many devices of which memory, by the dry run's formulas.

    python -m benchmarks.plan.fits [--size 3b 7b 32b 72b]

Prints the tables of docs/planning.md.  Each device holds a tensor-parallel part of the whole model; the first tensor
parallel size with which flags suffice is the answer.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import report, shipped_model, step_arguments
from mm.config.data import DataConfig
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.plan.memory_flags import CHANGES, cheapest_fits

SIZES = ("3b", "7b", "32b", "72b")
TRAINED = ("everything", "ViT frozen", "adapters")
NUM_DEVICES = (1, 2, 4, 8, 16)
MEMORIES = (64.0, 79.65, 140.4)
"""GiB: of Ascend 910B and A2, of an 80 GB and of a 141 GB GPU, as their drivers report them."""
NUM_TOKENS = 8192
"""Tokens of the one microbatch that a device holds at a time."""
LETTERS = dict(zip((change.flags for change in CHANGES), "DRSGMWFAOBN", strict=True))


def model_of(size: str, trained: str) -> ModelConfig:
    model = shipped_model(size)
    vision, language = ((model.vision.num_layers,),), ((model.language.num_layers,),)
    is_vision_frozen = trained != "everything"
    return replace(
        model, vision=replace(model.vision, pipeline_num_layers=vision, freeze=is_vision_frozen),
        projector=replace(model.projector, freeze=False),
        language=replace(model.language, pipeline_num_layers=language, freeze=False),
        lora=LoraConfig(("all-linear",), r=16) if trained == "adapters" else LoraConfig())


def answers(model: ModelConfig, num_devices: int) -> list[str]:
    """For each of ``MEMORIES``: TP size and letters of the flags, or a dash."""
    found = dict[float, str]()
    for tp_size in (one for one in model.tp_sizes if one <= num_devices and num_devices % one == 0):
        run = _run(model, num_devices, tp_size)
        limits = {int(memory * 2**30): memory for memory in MEMORIES if memory not in found}
        fits = {fit.max_bytes: fit for limit in limits for fit in cheapest_fits(run, [limit])}
        for limit, memory in limits.items():
            flags = fits[limit].flags if limit in fits else ()
            if flags or limit not in fits:
                found[memory] = f"TP {tp_size} {''.join(LETTERS[one] for one in flags)}".strip()
    return [found.get(memory, "-") for memory in MEMORIES]


def _run(model: ModelConfig, num_devices: int, tp_size: int) -> Run:
    args = step_arguments("--bf16", "--tensor-model-parallel-size", str(tp_size), "--seq-length", str(NUM_TOKENS),
                          *(["--sequence-parallel"] if tp_size > 1 else []))
    return Run(args, model, DataConfig("hf", ("data.json",)), num_devices)


def tables(sizes: Sequence[str]) -> Iterator[str]:
    """The lines of a table in Markdown for each of ``MEMORIES``."""
    found = {(size, trained): [answers(model_of(size, trained), count) for count in NUM_DEVICES]
             for size in sizes for trained in TRAINED}
    for place, memory in enumerate(MEMORIES):
        yield f"| {memory:g} GiB | {' | '.join(_devices(count) for count in NUM_DEVICES)} |"
        yield f"| --- |{' --- |' * len(NUM_DEVICES)}"
        for (size, trained), row in found.items():
            yield f"| {size.upper()}, {trained} | {' | '.join(one[place] for one in row)} |"
        yield ""


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="*", default=SIZES, choices=SIZES)
    parser.add_argument("--output", type=Path, help="JSON file of the lines to write")
    flags = parser.parse_args(argv)
    lines = list(tables(flags.size))
    print("\n".join(lines))
    if flags.output is not None:
        report(lines, flags.output, prints=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
