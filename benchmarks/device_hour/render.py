"""Writes the measurements on an accelerator into docs/performance.md, between two comments.  Most kernels stay in the
records.

    python -m benchmarks.device_hour.render [--records runs/device/records.jsonl] [--document docs/performance.md]

Without ``--records`` it takes the records in benchmarks/device_hour/records.jsonl, if that file exists: the document
has no figure whose record is not in the repository.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.kernels import LOOP, MASK
from benchmarks.measure import model_config, step_arguments
from benchmarks.records import OURS, PEER, Results, read_records
from benchmarks.step.speed import OPTIMIZER_BYTES_PER_PARAM
from mm.batch import image_pairs, window_pairs
from mm.config.data import DataConfig
from mm.config.run import Run
from mm.cost.by_device import calibration_by_device
from mm.cost.predict import Predictor
from mm.cost.workload import Workload, sample_counts
from mm.data.sample import Lengths
from mm.device.device import known_device
from mm.plan.layouts import WINDOW
from tests.files import ROOT, table
from tests.workload import Sample, microbatches_of, num_patches, num_targets, num_tokens

KEPT = Path(__file__).with_name("records.jsonl")
BEGIN = "<!-- measured on a device: written by python -m benchmarks.device_hour.render -->"
END = "<!-- end of what was measured on a device -->"
NOTHING = """Nothing was measured yet. This measures it, on one CUDA or NPU device, within a quarter of an hour:

```
python -m benchmarks.device_hour --output runs/device
```
"""


def block(records: list[dict]) -> str:
    """The text between the comments."""
    results = Results.latest(records)
    machines = results.of("machine")
    if not any(one["kind"] in ("kernel", "side", "parity", "train") for one in results.records):
        return NOTHING
    devices = sorted({one["device"] for one in machines} - {"no device", None})
    if len(devices) > 1:
        raise SystemExit(f"the records are of {' and '.join(devices)}; expected one device: keep a file for each")
    sizes = {one["size"] for one in machines}
    is_rehearsal = devices == ["cpu"] or "tiny" in sizes
    parts = [[_origin(machines, devices)]]
    if is_rehearsal:
        parts.append(["A rehearsal: a tiny size or the CPU. It shows that the commands run; its figures say nothing of "
                      "a device."])  # fmt: skip
    parts += [
        table(("what", "measured"), _figure_rows(results)),
        _titled("Steps", STEP_HEAD, _step_rows(results)),
        _correctness(results),
        _not_done(results),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _origin(machines: list[dict], devices: list[str]) -> str:
    versions: dict[str, str] = {}
    for machine in machines:
        versions |= machine["versions"]
    dates = sorted({one["date"][:10] for one in machines})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {', '.join(devices) or 'no device'}, {named}."


def _titled(title: str, head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    lines = table(head, rows)
    return [f"{title}:", "", *lines] if lines else []


def _number(value: float | None) -> str:
    """Three significant digits, without a fraction from 100 on; "" for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _figure_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for what, value, unit in _figures(results):
        if value is not None:
            yield what, f"{_number(value)}{unit}"


def _figures(results: Results) -> Iterator[tuple[str, float | None, str]]:
    """What is measured, the value (None: not measured), and its unit."""
    for label, what in (("mixed", "mixed samples, where transformers pads"), ("equal", "equal samples")):
        sides = (results.step(label, OURS), results.step(label, PEER))
        rates = [side["tokens_per_second"] if side else None for side in sides]
        yield f"tokens/s relative to transformers, {what}", _ratio(*rates), "x"
    small, large = results.step("step", OURS), results.step("large", OURS)
    yield ("7B, ViT frozen: FLOP/s with recomputation, share of the measured matrix-product rate",
           _hardware_share(large), "%")  # fmt: skip
    floor_ms = None
    if small and small["phases_ms"] and results.copy_gbps:
        floor_ms = OPTIMIZER_BYTES_PER_PARAM * small["params_trained"] / results.copy_gbps / 1e6
    yield ("optimizer, time relative to moving 30 bytes per weight at the measured copy rate",
           small["phases_ms"]["optimizer"] / floor_ms if small and floor_ms else None, "x")  # fmt: skip
    for label, what in (("step", "3B"), ("recompute", "3B, recomputed"), ("large", "7B, ViT frozen, recomputed")):
        step = results.step(label, OURS)
        error = abs(step["max_memory_gib"] / sum(step["expected_memory_gib"].values()) - 1) if step else None
        yield f"peak memory, deviation from the formula, {what}", None if error is None else 100 * error, "%"
    times = {name: (results.kernel("attention", "ViT windows, one size", name, part="forward and backward") or {})
             .get("ms") for name in (OURS, MASK, LOOP)}  # fmt: skip
    yield "window attention, speed relative to one masked call", _ratio(times[MASK], times[OURS]), "x"
    yield "window attention, speed relative to one call per window", _ratio(times[LOOP], times[OURS]), "x"
    errors = results.of("window error")
    yield "relative error of window attention in fp32", errors[-1]["difference"] if errors else None, ""


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _hardware_share(step: dict | None) -> float | None:
    """Percent of the measured ceiling at which the FLOPs of ``step`` ran, with those of recomputation."""
    if step is None or step["share_of_measured_ceiling"] is None:
        return None
    return 100 * step["share_of_measured_ceiling"] * step["hardware_flops"] / step["model_flops"]


STEP_HEAD = ("command", "side", "tokens", "seconds (least .. largest)", "by published figures", "tokens/s",
             "of published peak", "of measured ceiling", "GiB allocated", "reserved", "by formula")  # fmt: skip


def _steps(results: Results) -> Iterator[tuple[str, str, dict]]:
    for label in dict.fromkeys(one["label"] for one in results.of("side")):
        for side in (OURS, PEER):
            if step := results.step(label, side):
                yield label, side, step


def _step_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Every side that was timed, then those that failed."""

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    for label, side, step in _steps(results):
        seconds = step["step_seconds"]
        predicted = _predicted(results, label, step) if side == OURS else None
        yield (label, side, f"{step['tokens']:,}",
               f"{seconds['median']:.3f} ({seconds['min']:.3f} .. {seconds['max']:.3f})",
               "" if predicted is None else _with_error(predicted, seconds["median"]),
               _number(step["tokens_per_second"]), percent(step["mfu"]), percent(step["share_of_measured_ceiling"]),
               _number(step["max_memory_gib"]), _number(step["max_reserved_gib"]),
               _number(sum(step["expected_memory_gib"].values())) if side == OURS else "")  # fmt: skip
    for one in results.of("comparison"):
        for side in (OURS, PEER):
            if error := one.get(side, {}).get("error"):
                yield one["label"], side, "", error[:120].replace("|", "/"), *[""] * 7


def _predicted(results: Results, label: str, step: dict) -> float | None:
    """Seconds of a timed step as ``mm-plan`` predicts them today by published figures; None if the device has none."""
    known, runs = known_device(step["device"]), results.of("comparison", label=label)
    if known is None or known.peak_flops is None or not runs:
        return None
    (run,) = runs
    model = model_config(run["size"], run["frozen"], run["recompute"], run.get("offload", False))
    microbatches = microbatches_of(step["tokens"] // run["num_microbatches"], run["num_microbatches"], run["mix"])
    counts = np.stack([sample_counts(_lengths(samples)).sum(axis=0) for samples in microbatches])
    settings = Run(step_arguments("--use-distributed-optimizer", "--bf16"), model, DataConfig("hf", ("data.json",)), 1)
    calibration = calibration_by_device(settings, known, known.links)
    return Predictor(settings, calibration).predict(Workload(((counts,),))).seconds


def _lengths(samples: Sequence[Sample]) -> Lengths:
    rows = [(num_tokens(one), num_targets(one), len(one[0]), num_patches(one), sum(map(image_pairs, one[0])),
             sum(window_pairs(grid, WINDOW) for grid in one[0])) for one in samples]  # fmt: skip
    return Lengths(*np.array(rows).T)


def _with_error(predicted: float, measured: float) -> str:
    return f"{predicted:.3f} ({predicted / measured - 1:+.1%})"


def _correctness(results: Results) -> list[str]:
    """One line: how many comparisons with transformers and with the CPU passed."""
    found = []
    for kind, what in (("parity", "parity with transformers in fp32 on the CPU"),
                       ("train", "a tiny run beside the same in fp32 on the CPU, resumed and exported to the bit")):
        cases = {name: case for one in results.of(kind) for name, case in one["cases"].items()}
        good = sum(case["passed"] for case in cases.values())
        found += [f"{what}: {good} of {len(cases)} passed ({'; '.join(cases)})"] if cases else []
    return [f"Correctness: {'; '.join(found)}."] if found else []


def _not_done(results: Results) -> list[str]:
    failed = [f"{one['label']} ({one['status']})" for one in results.of("command") if one["status"] != 0]
    return [f"Not run to their end: {', '.join(failed)}."] if failed else []


def put(document: str, text: str) -> str:
    """``document`` with ``text`` between the comments.  Raises ValueError without them."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"expected one line {BEGIN!r} and one line {END!r}")
    before, _, rest = document.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "performance.md")
    flags = parser.parse_args(argv)
    path = flags.records or (KEPT if KEPT.exists() else None)
    records = read_records(path) if path else []
    text = put(flags.document.read_text(encoding="utf-8"), block(records))
    flags.document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
