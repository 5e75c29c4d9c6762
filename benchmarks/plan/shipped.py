"""MindSpeed-MM's layouts beside those of ``mm-plan``, by prediction: four sizes, four kinds of data.

    python -m benchmarks.plan.shipped [--device 910b3] [--size 7b ...] [--data llava ...]

Devices, batch and samples are those of the scripts; only the layout changes.  Nothing is trained.  Each pair has three
rows: MindSpeed-MM's lists, the best layout with the script's TP and PP, and the best of all layouts.  "Used" is the
share of the pipeline's time in which a stage works; its bound with equal stages and microbatches is m / (m + p - 1),
which chunks can exceed.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.measure import command, report
from mm.config.run import Run, load_run
from mm.cost.by_device import calibration_by_device
from mm.device.device import KNOWN_DEVICES
from mm.plan.layouts import mixed
from mm.plan.lists import Lists
from mm.plan.search import ENCODER_BATCH_SIZES, LayoutSearch, Planned, choices, present_choice
from tests.files import ROOT, table

DATA = {"llava": {"llava": 1.0}, "documents": {"documents": 1.0}, "videos": {"videos": 1.0},
        "mix": {"llava": 2.0, "documents": 1.0, "videos": 1.0}}  # fmt: skip
NUM_SAMPLES, NUM_STEPS, MEMORY_SHARE = 20_000, 4, 0.92


@dataclass(frozen=True)
class Script:
    """What a script of MindSpeed-MM trains."""

    world_size: int
    tp_size: int
    micro_batch_size: int
    global_batch_size: int
    lists: tuple[tuple[int, ...], tuple[int, ...]]
    """Layers of the ViT and of the LLM on every stage."""


SCRIPTS = {
    "3b": Script(8, 1, 8, 256, ((32,), (36,))),
    "7b": Script(8, 1, 4, 192, ((32, 0), (12, 16))),
    "32b": Script(16, 2, 2, 96, ((32, *[0] * 7), (1, *[9] * 7))),
    "72b": Script(64, 2, 1, 384, ((32, *[0] * 7), (6, *[11] * 6, 8))),
}
_SEQ_LENGTH = {"llava": 1024}
_LONG = 8192
"""``--seq-length`` of the other kinds of data, whose samples are longer."""


def run_of(size: str, data: str) -> Run:
    """The run of MindSpeed-MM's script on these samples, with its lists."""
    script, shipped = SCRIPTS[size], ROOT / "examples/qwen2.5vl"
    values = {
        "mm_model": shipped / f"model_{size}.json", "mm_data": shipped / f"data_{size}.json", "lr": 1e-5,
        "train_iters": 10, "seq_length": _SEQ_LENGTH.get(data, _LONG), "world_size": script.world_size,
        "micro_batch_size": script.micro_batch_size, "global_batch_size": script.global_batch_size,
        "tensor_model_parallel_size": script.tp_size,
    }  # fmt: skip
    words = [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value))]
    switches = ["--bf16", "--use-distributed-optimizer", *(["--sequence-parallel"] if script.tp_size > 1 else [])]
    run = load_run([*words, *switches, "--dry-run"], checks_layout=False)
    vision, language = script.lists
    return replace(run, model=Lists((vision,), (language,)).applied(run.model))


def rows_of(size: str, data: str, label: str) -> Iterator[dict[str, Any]]:
    """MindSpeed-MM's layout, the best one with its TP and PP, and the best of all."""
    device = next(one for one in KNOWN_DEVICES if label in one.label.casefold() and one.peak_flops is not None)
    assert device.memory_bytes is not None, "devices with a peak have a memory"
    run, script = run_of(size, data), SCRIPTS[size]
    lengths = mixed(DATA[data], NUM_SAMPLES, run.args.seed, run.args.seq_length)
    search = LayoutSearch(run, lambda one: calibration_by_device(one, device, device.links), lengths,
                          int(MEMORY_SHARE * device.memory_bytes), NUM_STEPS)
    present = search.planned(present_choice(run), run)
    yield _row(size, data, "MindSpeed-MM", present, present)
    kept = {"tp_size": [script.tp_size], "num_stages": [len(script.lists[0])], "cp_size": [1]}
    for name, fixed in (("its TP and PP", kept), ("all layouts", {})):
        found = search.best(choices(run, fixed, device.links.node_size), 1, encoder_batch_sizes=ENCODER_BATCH_SIZES)
        for one in found.ranking:
            yield _row(size, data, name, one, present) | {"least": found.least}


def _row(size: str, data: str, name: str, one: Planned, present: Planned) -> dict[str, Any]:
    choice, num_stages = one.choice, one.choice.num_stages
    counts = fmean(fmean(map(len, step)) for step in one.workload.steps)
    bound = counts / (counts + num_stages - 1)
    words = (f"TP {choice.tp_size}, CP {choice.cp_size}, PP {num_stages} x {choice.num_chunks}, MBS "
             f"{choice.micro_batch_size}, {choice.sampler}, {choice.encoder} x {choice.encoder_batch}, recompute "
             f"{choice.recompute}")
    used = one.step.busy / one.step.pipeline
    return {"size": size, "data": data, "name": name, "layout": words, "seconds": one.step.seconds,
            "speedup": present.step.seconds / one.step.seconds, "used": used, "bound": bound,
            "share_of_bound": used / bound, "gib": one.peak_bytes / 2**30,
            "lists": Lists.of(one.run.model).values()}  # fmt: skip


def shown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of Markdown."""
    cells = [(row["size"].upper(), row["data"], row["name"], row["layout"], f"{row['seconds']:.2f}",
              f"{row['speedup']:.2f}", f"{row['used']:.3f}", f"{row['bound']:.3f}", f"{row['share_of_bound']:.3f}",
              f"{row['gib']:.1f}") for row in rows]
    return "\n".join(table(("model", "data", "lists", "layout", "step, s", "speedup", "used", "bound", "share", "GiB"),
                           cells))


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--device", default="910b3")
    parser.add_argument("--size", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    flags = parser.parse_args(argv)
    rows = [row for size in flags.size for data in flags.data for row in rows_of(size, data, flags.device)]
    print(shown(rows))
    report(rows, flags.output, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
