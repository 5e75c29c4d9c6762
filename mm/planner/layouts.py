"""``mm-plan`` without a command: which layout trains a run fastest on a device, on its own data."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from mm.config.run import Run, load_run, parallel_problems
from mm.console import whole_number
from mm.data.index.dataset import Dataset
from mm.data.index.gauge import Gauge
from mm.data.lengths import HasLengths
from mm.device.platform import KnownDevice, Links
from mm.device.platforms import KNOWN_DEVICES
from mm.errors import UserError, counted, nearest, printable, refuse
from mm.plan.by_device import calibration_by_device
from mm.plan.calibration import Calibration
from mm.plan.choices import (
    AS_GIVEN,
    ENCODERS,
    NAMES,
    RECOMPUTE,
    SAMPLERS,
    choices,
    encoder_batch_sizes,
    fixed_problems,
    present_choice,
    recomputations,
)
from mm.plan.distributions import DISTRIBUTIONS, mixed
from mm.plan.search import LayoutSearch, SearchResult
from mm.planner.flags import LayoutFlags
from mm.planner.layout_report import LayoutPlan, layout_report
from mm.planner.machine import calibration_for
from mm.planner.written import write_layout

NUM_SAMPLES = 20_000
"""Samples drawn from the distributions of ``--lengths``."""
NUM_STEPS = 4
"""Steps over which the layouts of the report are predicted."""
MEMORY_SHARE = 0.92
"""Fraction of a device's memory that a rank may need by default.  The driver, communication buffers and fragmentation
take the rest."""
_WORDS = {"sampler": SAMPLERS, "encoder": ENCODERS, "recompute": (*RECOMPUTE, AS_GIVEN)}
"""Fields of ``--fix`` whose values are words, with the legal ones."""
_MOST_RANKS = 1 << 20


def layouts(flags: LayoutFlags, training: Sequence[str]) -> Iterator[str]:
    """Search, and yield the report.  With ``--write``, also write the best layout, and yield what was written."""
    plan = _planned(flags, training)
    yield layout_report(plan).text()
    if flags.write is not None:
        yield printable(write_layout(flags.write, plan.found.ranking[0], plan.run))


def _planned(flags: LayoutFlags, training: Sequence[str]) -> LayoutPlan:
    run = load_run([*training, "--dry-run"], checks_layout=False)
    if (flags.device is None) == (flags.calibration is None):
        raise UserError(f"--device is {flags.device or 'absent'} and --calibration is {flags.calibration or 'absent'}; "
                        f"give one of them: a device by name ({', '.join(_labels())}), or a file of mm-plan calibrate")
    device = None if flags.device is None else _device(flags.device)
    links = _links(flags, device)
    fixed = _fixed(flags.fix)
    lengths = lengths_of(run) if flags.lengths is None else _drawn_lengths(flags.lengths, run)
    max_bytes = None if flags.memory_gib is None else flags.memory_gib << 30
    if max_bytes is None and device is not None and device.memory_bytes is not None:
        max_bytes = int(MEMORY_SHARE * device.memory_bytes)
    calibrate, what = _calibrations(flags, device, links, run)
    refuse(fixed_problems(run, fixed))
    legal = list(choices(run, fixed, links.node_size))
    if not legal:
        raise UserError(
            f"no layout is legal for --world-size {run.world_size} with {run.global_batch_size} samples per step"
            f"{f' and --fix {flags.fix}' if fixed else ''}: TP must divide heads and vocabulary, TP x CP x PP the "
            f"ranks, and DP x MBS the samples; change --world-size, --global-batch-size or --fix")
    search, began = (LayoutSearch(run, calibrate, lengths, max_bytes, NUM_STEPS, recomputations(fixed)),
                     time.perf_counter())
    found = search.best(legal, flags.top, encoder_batch_sizes=encoder_batch_sizes(fixed))
    seconds = time.perf_counter() - began
    if not found.ranking:
        raise UserError(_nothing_fits(found, max_bytes) if found.smallest else found.refusals)
    present, problems = None, tuple(parallel_problems(run))
    if not problems:
        with suppress(UserError):  # the calibration lacks its blocks
            present = search.planned(present_choice(run), run)
    return LayoutPlan(run, device, what, found, seconds, present, problems, max_bytes)


def _labels() -> list[str]:
    return [one.label for one in KNOWN_DEVICES if one.peak_flops is not None]


def _device(name: str) -> KnownDevice:
    """The known device that ``name`` means: its label, or the only one that contains the word."""
    known = {one.label.casefold(): one for one in KNOWN_DEVICES if one.peak_flops is not None}
    word = name.casefold()
    found = [known[word]] if word in known else [one for label, one in known.items() if word in label]
    if len(found) != 1:
        several = f"which may be {' or '.join(one.label for one in found)}" if found else (
            f"which is not known{nearest(word, known)}")
        raise UserError(f"--device is {name!r}, {several}; expected one of {', '.join(_labels())}; or measure the "
                        f"device with mm-plan calibrate and give --calibration")
    return found[0]


def _links(flags: LayoutFlags, device: KnownDevice | None) -> Links:
    links = device.links if device is not None else Links(np.inf, np.inf, _MOST_RANKS)
    if flags.node_size is not None:
        links = replace(links, node_size=flags.node_size)
    return links if flags.network_gbit is None else replace(links, between=flags.network_gbit * 1e9 / 8)


def _calibrations(
    flags: LayoutFlags, device: KnownDevice | None, links: Links, run: Run
) -> tuple[Callable[[Run], Calibration], str]:
    """A function from a layout to its calibration, and a description of the source."""
    if device is not None:
        return (lambda one: calibration_by_device(one, device, links)), (
            f"published figures of {device.label} ({device.reference}), {counted(links.node_size, 'device')} per node, "
            f"{links.between * 8 / 1e9:.0f} Gbit/s each to other nodes; usual efficiencies; nothing was measured")
    assert flags.calibration is not None, "one of the two is given"
    found = calibration_for(flags.calibration, run, flags.accept_calibration)
    return (lambda _: found), f"{flags.calibration}: {found.machine.device}, {found.date}"


def lengths_of(run: Run) -> HasLengths:
    """The lengths of the run's own samples; their index is made if there is none."""
    gauge = Gauge.from_config(run.data, run.model, run.args.seq_length)
    return Dataset(run.data, run.args.bad_sample == "skip", gauge, run.args.seed).columns


def _drawn_lengths(words: str, run: Run) -> HasLengths:
    """Lengths drawn from the distributions that ``--lengths`` names."""
    shares: dict[str, float] = {}
    for word in words.split(","):
        name, _, share = word.partition("=")
        if name not in DISTRIBUTIONS:
            raise UserError(f"--lengths has {name!r}; expected one of {', '.join(DISTRIBUTIONS)}"
                            f"{nearest(name, DISTRIBUTIONS)}")
        try:
            shares[name] = float(share or 1)
        except ValueError:
            shares[name] = 0.0
        if not 0 < shares[name] < np.inf:
            raise UserError(f"--lengths has {word!r}; expected a share above 0, as in {name}=1")
    return mixed(shares, max(NUM_SAMPLES, NUM_STEPS * run.global_batch_size), run.args.seed, run.args.seq_length)


def _fixed(words: str) -> Mapping[str, Sequence[object]]:
    found: dict[str, Sequence[object]] = {}
    for word in filter(None, words.split(",")):
        name, _, values = word.partition("=")
        if name.upper() not in NAMES:
            raise UserError(f"--fix has {word!r}; expected {', '.join(NAMES)}{nearest(name.upper(), NAMES)}")
        field = NAMES[name.upper()]
        if field in _WORDS:
            legal = _WORDS[field]
            if strange := [value for value in values.split("/") if value not in legal]:
                raise UserError(f"--fix has {name}={strange[0]}; expected {', '.join(legal)}")
            found[field] = values.split("/")
        else:
            numbers = [number for value in values.split("/") if (number := whole_number(value))]
            if len(numbers) <= values.count("/"):
                raise UserError(f"--fix has {word!r}; expected an integer of at least 1, as in {name}=2")
            found[field] = numbers
    return found


def _nothing_fits(found: SearchResult, max_bytes: int | None) -> str:
    smallest = found.smallest
    assert smallest is not None and max_bytes is not None, "asked where nothing fits"
    choice, missing = smallest.choice, smallest.peak_bytes - max_bytes
    return (f"no layout fits into {max_bytes / 2**30:.1f} GiB: the smallest of {found.num_considered} needs "
            f"{smallest.peak_bytes / 2**30:.1f} GiB (TP {choice.tp_size}, CP {choice.cp_size}, PP {choice.num_stages}, "
            f"recompute {choice.recompute}), which is {missing / 2**30:.1f} GiB too much; use more or larger devices, "
            f"train adapters with --lora-target-modules, freeze a part, or reduce --seq-length")
