"""Which flags make each published model fit on how many devices of which memory, by the dry run's formulas.

    python -m benchmarks.plan.fits [--gib 64] [--size 3b 7b 32b 72b]

Prints the table of docs/planning.md.  Each device holds a tensor-parallel part of the whole model; the first tensor
parallel size with which flags suffice is the answer.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from benchmarks.measure import command, report, shipped_model, step_arguments
from mm.config.data import DataConfig
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.plan.dry_run import CHANGES, cheapest_fits

SIZES = ("3b", "7b", "32b", "72b")
TRAINED = ("everything", "ViT frozen", "adapters")
NUM_DEVICES = (1, 2, 4, 8, 16)
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


def answer(model: ModelConfig, num_devices: int, gib: float) -> str:
    """TP size and letters of the flags, or a dash."""
    for tp_size in (one for one in model.tp_sizes if one <= num_devices and num_devices % one == 0):
        fits = cheapest_fits(_run(model, num_devices, tp_size), [int(gib * 2**30)])
        if not fits or fits[0].flags:
            return f"TP {tp_size} {''.join(LETTERS[one] for fit in fits for one in fit.flags)}".strip()
    return "-"


def _run(model: ModelConfig, num_devices: int, tp_size: int) -> Run:
    args = step_arguments("--bf16", "--tensor-model-parallel-size", str(tp_size), "--seq-length", str(NUM_TOKENS),
                          *(["--sequence-parallel"] if tp_size > 1 else []))
    return Run(args, model, DataConfig("hf", ("data.json",)), num_devices)


def lines_of(sizes: Sequence[str], gib: float) -> Iterator[str]:
    """The lines of a table in Markdown."""
    columns = [f"{count} device{'s' * (count > 1)}" for count in NUM_DEVICES]
    yield f"| {gib:g} GiB | {' | '.join(columns)} |"
    yield f"| --- |{' --- |' * len(NUM_DEVICES)}"
    for size, trained in product(sizes, TRAINED):
        model = model_of(size, trained)
        yield f"| {size.upper()}, {trained} | {' | '.join(answer(model, count, gib) for count in NUM_DEVICES)} |"


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--gib", type=float, default=64.0, help="memory of a device")
    parser.add_argument("--size", nargs="*", default=SIZES, choices=SIZES)
    flags = parser.parse_args(argv)
    lines = list(lines_of(flags.size, flags.gib))
    print("\n".join(lines))
    report(lines, flags.output, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
