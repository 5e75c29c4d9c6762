"""Writes the measurements on an accelerator into docs/performance.md, between two marks.

    python -m benchmarks.device_hour.render [--records runs/device/records.jsonl] [--document docs/performance.md]

Without ``--records`` it takes the records in benchmarks/device_hour/records.jsonl, if that file exists: the document
has no figure whose record is not in the repository.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.device_hour.goals import goals
from benchmarks.measure import report
from benchmarks.records import LOSS, NORM, OURS, PEER, Results, read_records
from mm.device.platforms import known_device
from tests.files import ROOT, table
from tests.workload import microbatches_of

KEPT = Path(__file__).with_name("records.jsonl")
BEGIN = "<!-- measured on a device: written by python -m benchmarks.device_hour.render -->"
END = "<!-- end of what was measured on a device -->"
NOTHING = """Nothing was measured yet. This measures it, on one CUDA or NPU device, within an hour:

```
python -m benchmarks.device_hour --output runs/device
```
"""


def block(records: list[dict]) -> str:
    """The text between the marks."""
    results = Results.latest(records)
    machines = results.of("machine")
    if not any(one["kind"] in ("kernel", "side", "tower", "loader", "parity", "train") for one in results.records):
        return "\n".join([NOTHING, *table(("what", "measured"), _goal_rows(results)), ""])
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
        table(("what", "measured"), _goal_rows(results)),
        _titled("Steps", STEP_HEAD, _step_rows(results)),
        _titled("Parts of a step, in ms", ("step", "side", *PHASES), _phase_rows(results)),
        _titled("Towers alone, forward and backward", ("tower", "side", "rows", "ms", "TFLOP/s"), _tower_rows(results)),
        _titled("Parity with transformers in fp32 on the CPU", PARITY_HEAD, _parity_rows(results)),
        _titled("A tiny run of the program, beside the same in fp32 on the CPU", TRAIN_HEAD, _train_rows(results)),
        _titled("mm-plan's predictions of a step, in seconds", PREDICTION_HEAD, _prediction_rows(results)),
        _titled("Loader", LOADER_HEAD, _loader_rows(results)),
        *_kernel_tables(results),
        _titled("Commands", ("command", "ended", "s"), _command_rows(results)),
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


def _goal_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """What was measured of each goal; the bounds are for ``--goals``, not for the document."""
    for goal in goals(results):
        unit = goal.unit if goal.unit in ("x", "%", "") else f" {goal.unit}"
        yield goal.what, "not measured" if goal.value is None else f"{_number(goal.value)}{unit}"


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
    # imported here, because it takes seconds
    from benchmarks.plan.meta import predicted_step
    from tests.meta.step import Case

    case = Case(run["size"], freeze=tuple(run["frozen"]), recompute="full" if run["recompute"] else "none",
                offload=1000 * run.get("offload", False))
    samples = microbatches_of(step["tokens"] // run["num_microbatches"], run["num_microbatches"], run["mix"])
    return predicted_step(case.model(), samples, known).seconds


def _with_error(predicted: float, measured: float) -> str:
    return f"{predicted:.3f} ({predicted / measured - 1:+.1%})"


PHASES = ("start", "forward", "backward", "optimizer")


def _phase_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for label, side, step in _steps(results):
        if step["phases_ms"]:
            yield label, side, *(_number(step["phases_ms"].get(name)) for name in PHASES)


def _tower_rows(results: Results) -> Iterator[tuple[object, ...]]:
    for one in results.of("tower"):
        yield one["tower"], one["name"], f"{one['rows']:,}", _number(one["ms"]), _number(one["tflops"])


PARITY_HEAD = ("model, precision", "loss", "gradient norm", "worst gradient", "transformers' worst", "")


def _parity_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for one in results.of("parity"):
        for name, case in one["cases"].items():
            ours = [case["ours"][key] for key in (LOSS, NORM, "gradient_error_max")]
            yield (name, *map(_number, ours), _number(case["transformers"]["gradient_error_max"]),
                   "passed" if case["passed"] else "**missed**")  # fmt: skip


TRAIN_HEAD = ("precision", "largest error of the loss", "of the gradient norm", "resumed and exported to the bit", "")


def _train_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for one in results.of("train"):
        for precision, case in one["cases"].items():
            is_same = case["resumes_to_the_bit"] and case["exports_the_same_file"]
            yield (precision, _number(case[LOSS]), _number(case[NORM]), "yes" if is_same else "**no**",
                   "passed" if case["passed"] else "**missed**")  # fmt: skip


PREDICTION_HEAD = ("step", "measured (least .. largest)", "by published figures, at the time",
                   "by kernels, at the time", "calibrated", "interval")  # fmt: skip


def _prediction_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Each prediction with its error."""
    for one in results.of("prediction"):
        cells = ("" if (found := one[name]) is None else _with_error(found, one["measured"])
                 for name in ("by_figures", "by_kernels", "calibrated"))
        least, largest = one["spread"]
        yield (one["case"], f"{one['measured']:.3f} ({least:.3f} .. {largest:.3f})", *cells,
               f"{one['low']:.3f} .. {one['high']:.3f}")  # fmt: skip


LOADER_HEAD = ("workers", "cores", "samples/s", "step, s", "wait, s (largest)", "share of the step")


def _loader_rows(results: Results) -> Iterator[tuple[object, ...]]:
    for one in results.of("loader"):
        waits = [f"{_number(one['wait_seconds'])} ({_number(one['wait_seconds_max'])})",
                 f"{one['wait_share']:.2%}"] if "wait_share" in one else ["", ""]  # fmt: skip
        yield (one["num_workers"], one["num_cores"], _number(one["samples_per_second"]),
               _number(one.get("step_seconds")), *waits)  # fmt: skip


def _kernel_tables(results: Results) -> Iterator[list[str]]:
    """A table for each group of kernels.  The forward pass of attention alone is only in the records."""
    products = results.of("kernel", group="gemm")
    passes = list(dict.fromkeys(one["name"] for one in products))
    cases = {case: {one["name"]: one for one in products if one["case"] == case}
             for case in dict.fromkeys(one["case"] for one in products)}  # fmt: skip
    rows = [(case, *(_number(found.get(name, {}).get("tflops")) for name in passes)) for case, found in cases.items()]
    yield _titled("Matrix products of a linear layer, TFLOP/s", ("layer", *passes), rows)
    for group in dict.fromkeys(one["group"] for one in results.of("kernel") if one["group"] != "gemm"):
        kernels = [one for one in results.of("kernel", group=group) if one.get("part") != "forward"]
        rows = [(one["case"], one["name"], _number(one.get("ms")), _number(one.get("tflops")), _number(one.get("gbps")),
                 _number(one.get("difference")), one.get("error", "").replace("|", "/")[:80] or _operators(one))
                for one in kernels]  # fmt: skip
        yield _titled(f"Kernels, {group}", ("case", "form", "ms", "TFLOP/s", "GB/s", "difference", ""), rows)


def _operators(kernel: dict) -> str:
    return " ".join(name.partition("::_")[2] for name in kernel.get("ran", ()))


def _command_rows(results: Results) -> Iterator[tuple[object, ...]]:
    for one in results.of("command"):
        yield one["label"], {0: "done"}.get(one["status"], f"**{one['status']}**"), one["seconds"]


def put(document: str, text: str) -> str:
    """``document`` with ``text`` between the marks.  Raises ValueError without them."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"expected one line {BEGIN!r} and one line {END!r}")
    before, _, rest = document.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--goals", type=Path, help="JSON file to write the goals and their measurements to")
    flags = parser.parse_args(argv)
    path = flags.records or (KEPT if KEPT.exists() else None)
    records = read_records(path) if path else []
    text = put(flags.document.read_text(encoding="utf-8"), block(records))
    flags.document.write_text(text, encoding="utf-8")
    if flags.goals:
        judged = [{**asdict(goal), "is_reached": goal.is_reached} for goal in goals(Results.latest(records))]
        report(judged, flags.goals, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
