"""``mm-plan`` without a command: which layout trains a run fastest, on its data or on lengths like published ones."""

import copy
import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from mm.batch import image_pairs, window_pairs
from mm.config.parse import read_json
from mm.config.rules import parallel_problems
from mm.config.run import Run, load_run
from mm.console import whole_number
from mm.cost.by_device import calibration_by_device
from mm.cost.calibration import Calibration, calibration_for
from mm.data.index.dataset import Dataset
from mm.data.index.index import Measure
from mm.data.media.image_patches import smart_resize
from mm.data.sample import HasLengths, Lengths
from mm.device.device import KNOWN_DEVICES
from mm.device.platform import KnownDevice, Links
from mm.errors import UserError, counted, nearest, printable, refuse, writing
from mm.files import write_whole
from mm.plan.flags import LayoutFlags
from mm.plan.lists import Lists
from mm.plan.search import (
    AS_GIVEN,
    ENCODERS,
    NAMES,
    RECOMPUTE,
    SAMPLERS,
    LayoutSearch,
    Planned,
    SearchResult,
    choices,
    encoder_batch_sizes,
    fixed_problems,
    present_choice,
    recomputations,
)
from mm.report import Report, Table

_SHARDING_FLAGS = {"no_shard": (), "optim": ("--use-distributed-optimizer",),
                   **{name: ("--data-parallel-sharding-strategy", name)
                      for name in ("optim_grads", "optim_grads_params")}}  # fmt: skip


def write_layout(folder: Path, best: Planned, given: Run) -> str:
    """Write ``given``'s JSON files with the best layout, and layout.sh, into ``folder``; returns how to use them."""
    run, folder = best.run, folder.absolute()
    if run.global_batch_size % (run.args.micro_batch_size * run.dp_size):
        raise UserError(f"--write: the training scripts need {run.global_batch_size} samples per step to be a multiple "
                        f"of MBS x DP = {run.args.micro_batch_size} x {run.dp_size}; add --fix MBS=1, or call python "
                        f"-m mm.train without a script")
    model, data = (copy.deepcopy(read_json(path).root) for path in (given.args.mm_model, given.args.mm_data))
    _set_layout(model, run)
    if run.data != given.data:
        data.setdefault("dataloader_param", {})["sampler_type"] = run.data.sampler_type
        parameters = data.setdefault("dataset_param", {}).setdefault("basic_parameters", {})
        parameters |= {"packing": run.data.packing, "truncation": run.data.truncation}
    with writing(folder, "--write"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("model.json", model), ("data.json", data)):
            write_whole(folder / name, (json.dumps(content, indent=4, ensure_ascii=False) + "\n").encode())
        write_whole(folder / "layout.sh", _script(folder, run).encode())
    return (f"Written   {folder}: model.json, data.json, layout.sh; train with: source "
            f'{shlex.quote(str(folder / "layout.sh"))}; bash SCRIPT "${{LAYOUT_FLAGS[@]}}"')


def _set_layout(model: dict[str, Any], run: Run) -> None:
    """Set the lists, what becomes of activations, and the placement and batch of the encoder."""
    sections = model["image_encoder"]["vision_encoder"], model["text_decoder"]
    towers = run.model.vision, run.model.language
    for section, values, tower in zip(sections, Lists.of(run.model).values(), towers, strict=True):
        recompute, offload = tower.recompute, tower.offload
        keys = {
            "recompute_granularity": recompute.granularity, "recompute_method": recompute.method,
            "recompute_num_layers": recompute.num_layers, "recompute_modules": list(recompute.modules) or None,
            "cpu_offloading_activations": offload.activations, "cpu_offloading_num_layers": offload.num_layers,
        }  # fmt: skip
        for key in keys:
            section.pop(key, None)
        section |= {key: value for key, value in keys.items() if value is not None} | {"pipeline_num_layers": values}
    if run.model.encodes_whole or "encoder_placement" in model:
        model["encoder_placement"] = run.model.encoder_placement
    if run.model.encoder_batch_microbatches > 1 or "encoder_batch_microbatches" in model:
        model["encoder_batch_microbatches"] = run.model.encoder_batch_microbatches


def _script(folder: Path, run: Run) -> str:
    """The content of layout.sh: variables of the training scripts, and flags that have no variable."""
    flags = [*["--sequence-parallel"] * run.args.sequence_parallel, *_SHARDING_FLAGS[run.args.sharding]]
    variables = {
        "TP": run.tp_size, "PP": run.num_stages, "CP": run.cp_size, "MBS": run.args.micro_batch_size,
        "GBS": run.global_batch_size, "MM_MODEL": folder / "model.json", "MM_DATA": folder / "data.json",
    }
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()]
    return "\n".join([f"# {run.world_size} ranks: NNODES x NPUS_PER_NODE must be {run.world_size}.", *lines,
                      f"LAYOUT_FLAGS=({' '.join(flags)})", ""])


NUM_SAMPLES = 20_000
"""Samples drawn for ``--lengths``."""
NUM_STEPS = 4
"""Steps over which the layouts of the report are predicted."""
MEMORY_SHARE = 0.92
"""Fraction of a device's memory that a rank may need by default.  The driver, communication buffers and fragmentation
take the rest."""
_WORDS = {"sampler": SAMPLERS, "encoder": ENCODERS, "recompute": (*RECOMPUTE, AS_GIVEN)}
"""Fields of ``--fix`` whose values are words, with the legal ones."""
_MOST_RANKS = 1 << 20
_MIN_SPEEDUP = 1.01
"""Least speedup for which the report advises a change."""
_HEAD = ("", "TP", "CP", "PP", "VPP", "DP", "MBS", "samples", "encoder", "recompute", "step, s", "90% interval",
         "tok/s/device", "MFU", "waits", "GiB")


@dataclass(frozen=True)
class _LayoutPlan:
    """What the report shows."""

    run: Run
    """The run as given."""
    device: KnownDevice | None
    calibration: str
    """The source of the predictions."""
    found: SearchResult
    seconds: float
    """Duration of the search."""
    present: Planned | None
    """None if the run's own layout is not legal, which ``present_problems`` then explains."""
    present_problems: tuple[str, ...]
    max_bytes: int | None


def layouts(flags: LayoutFlags, training: Sequence[str]) -> Iterator[str]:
    """Search, and yield the report.  With ``--write``, also write the best layout, and yield what was written."""
    plan = _planned(flags, training)
    yield _report(plan).text()
    if flags.write is not None:
        yield printable(write_layout(flags.write, plan.found.ranking[0], plan.run))


def _planned(flags: LayoutFlags, training: Sequence[str]) -> _LayoutPlan:
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
    search = LayoutSearch(run, calibrate, lengths, max_bytes, NUM_STEPS, recomputations(fixed))
    began = time.perf_counter()
    found = search.best(legal, flags.top, encoder_batch_sizes=encoder_batch_sizes(fixed))
    seconds = time.perf_counter() - began
    if not found.ranking:
        raise UserError(_nothing_fits(found, max_bytes) if found.smallest else found.refusals)
    present, problems = None, tuple(parallel_problems(run))
    if not problems:
        with suppress(UserError):  # the calibration lacks its blocks
            present = search.planned(present_choice(run), run)
    return _LayoutPlan(run, device, what, found, seconds, present, problems, max_bytes)


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
    measure = Measure.from_config(run.data, run.model, run.args.seq_length)
    return Dataset(run.data, run.args.bad_sample == "skip", measure, run.args.seed).columns


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


def _report(plan: _LayoutPlan) -> Report:
    """What to do and what it is based on, then the layouts and the memory of the best."""
    best = plan.found.ranking[0]
    rows = [_row(str(number), one, plan) for number, one in enumerate(plan.found.ranking, 1)]
    rows += [] if plan.present is None else [_row("now", plan.present, plan)]
    title = "Layouts: all train on the same samples in each step, with the same loss and gradients"
    model = Path(plan.run.args.mm_model).name
    return Report(
        f"Layouts for {counted(plan.run.world_size, 'rank')} and {model}", tuple(_facts(plan, best)),
        (Table(title, _HEAD, tuple(rows)),))


def _facts(plan: _LayoutPlan, best: Planned) -> Iterator[tuple[str, str]]:
    yield "Advice", _advice(plan, best)
    yield "Based on", plan.calibration
    tokens, patches = map(best.workload.mean, ("num_tokens", "num_patches"))
    yield "Data", (f"{counted(best.run.global_batch_size, 'sample')} per step: {tokens:,.0f} tokens and {patches:,.0f} "
                   f"patches, the mean of {counted(len(best.workload.steps), 'step')}")
    vision, language = Lists.of(best.run.model).values()
    yield "ViT", f"layout 1: image_encoder.vision_encoder.pipeline_num_layers: {vision}"
    yield "LLM", f"layout 1: text_decoder.pipeline_num_layers: {language}"
    yield "Searched", (
        f"{counted(plan.found.num_considered, 'layout')} in {plan.seconds:.1f} s; no layout that fits can take less "
        f"than {plan.found.least:.4g} s, whatever its lists, so layout 1 is at most "
        f"{best.step.seconds / plan.found.least - 1:.1%} slower than the best possible")
    if plan.run.args.shards_weights:
        yield "Stages", ("only layouts with one pipeline stage: optim_grads_params works with no more; give "
                         "--data-parallel-sharding-strategy optim_grads to search the others")
    of_stages = ", ".join(f"{num_bytes / 2**30:.1f}" for num_bytes in best.stage_bytes)
    yield "Memory", f"layout 1: {of_stages} GiB on a rank of each stage"
    if plan.max_bytes is not None:
        yield "Limit", (f"{plan.max_bytes / 2**30:.1f} GiB per rank; no lists that fit were found for "
                        f"{counted(plan.found.num_too_large, 'layout')}")
    yield from (("Refused", reason) for reason in plan.found.refusals[:2])
    if plan.present_problems:
        yield "Now", f"the present layout is not legal: {'; '.join(plan.present_problems)}"


def _advice(plan: _LayoutPlan, best: Planned) -> str:
    seconds = f"layout 1: {best.step.seconds:.3g} s per step"
    if plan.present is None:
        return seconds
    if plan.max_bytes is not None and plan.present.peak_bytes > plan.max_bytes:
        return f"{seconds}; the present layout does not fit; --write DIR writes layout 1"
    gain = plan.present.step.seconds / best.step.seconds
    if gain < _MIN_SPEEDUP:
        return f"keep the present layout: no layout that was found is more than {_MIN_SPEEDUP - 1:.0%} faster"
    return f"{seconds} instead of {plan.present.step.seconds:.3g} s, {gain:.2f} times as fast; --write DIR writes it"


def _row(name: str, one: Planned, plan: _LayoutPlan) -> tuple[str, ...]:
    choice, step, (low, high) = one.choice, one.step, one.step.interval
    peak = None if plan.device is None else plan.device.peak_flops
    mfu = "" if peak is None else f"{one.predictor.flops(one.workload) / step.seconds / one.run.world_size / peak:.1%}"
    tokens = one.workload.mean("num_tokens") / step.seconds / one.run.world_size
    num_together = one.run.model.encoder_batch_size
    encoder = choice.encoder + (f" x {num_together}" if num_together > 1 else "")
    return (name, *map(str, (choice.tp_size, choice.cp_size, choice.num_stages, choice.num_chunks, one.run.dp_size,
                             choice.micro_batch_size, choice.sampler, encoder, choice.recompute)),
            f"{step.seconds:.4g}", f"{low:.3g} .. {high:.3g}", f"{tokens:,.0f}", mfu, f"{max(0.0, step.bubble):.1%}",
            f"{one.peak_bytes / 2**30:.1f}")


SEQ_LENGTH = 8192
"""Default of the distributions below.  A longer sample loses text and whole images."""
WINDOW = 8
"""Patches along a window's side."""
_MIN_TEXT = 50
"""Tokens reserved for text: the system's message, the template around two turns, and a few words."""


def llava(num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """LLaVA-Instruct-158K on COCO pictures of at most 262,144 pixels, as MindSpeed-MM's script has it.

    58 k conversations, 23 k descriptions and 77 k answers that reason, of 568, 233 and 271 tokens (from the bytes of
    its JSON, at 3.8 a token); with pictures of about 315 tokens a mean of 691, where MindSpeed-MM's README says 689.
    Three of four COCO pictures are 640 x 480 or upright.  The spread within a kind (log-normal, 0.35) is our guess.
    """
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, num_samples, p=np.array([58, 23, 77]) / 158)
    text = _log_normal(rng, np.array([568.0, 233.0, 271.0])[kind], 0.35)
    height, width = rng.integers(333, 641, num_samples), rng.integers(500, 641, num_samples)
    usual = rng.random(num_samples)
    height, width = np.where(usual < 0.75, 480, height), np.where(usual < 0.75, 640, width)
    upright = rng.random(num_samples) < 0.3
    sides = np.where(upright, width, height).tolist(), np.where(upright, height, width).tolist()
    grids = [[(1, *_patches(*side, 262_144))] for side in zip(*sides, strict=True)]
    return _lengths(text, grids, 0.8, seq_length)


def documents(num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """Questions on scanned pages, charts and documents of several pages, pictures of at most 4,000,000 pixels.

    Half is one letter page of 100 to 240 dpi, a quarter a chart or figure of 400 to 1,000 pixels a side, an eighth two
    to eight pages at 70 to 110 dpi (MP-DocVQA has 48 k pages in 6 k documents), an eighth text.  The shares are ours.
    """
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, num_samples, p=[0.5, 0.25, 0.125, 0.125])
    text = np.where(kind == 3, _log_normal(rng, np.full(num_samples, 1200.0), 0.8), rng.integers(30, 201, num_samples))
    media = []
    for one in kind.tolist():
        if one == 0:
            dpi = rng.uniform(100, 240)
            media.append([(1, *_patches(round(11 * dpi), round(8.5 * dpi), 4_000_000))])
        elif one == 1:
            height, width = rng.integers(400, 1001, 2).tolist()
            media.append([(1, *_patches(height, width, 4_000_000))])
        elif one == 2:
            dpi = rng.uniform(70, 110)
            media.append([(1, *_patches(round(11 * dpi), round(8.5 * dpi), 4_000_000))] * int(rng.integers(2, 9)))
        else:
            media.append([])
    return _lengths(text, media, 0.3, seq_length)


def videos(num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """LLaVA-Video-178K, by MindSpeed-MM's settings: 2 frames a second, at most 128, frames of at most 65,536 pixels.

    Videos last 3 to 180 s, 40 s on average; nine of ten are 16:9, the others upright.  Text: captions of several
    hundred tokens for a quarter, answers of 30 to 150 for the rest; the shares are ours.
    """
    rng = np.random.default_rng(seed)
    seconds = np.clip(_log_normal(rng, np.full(num_samples, 42.0), 0.75), 3, 180)
    frames = np.clip(2 * seconds, 4, 128).astype(int)
    text = np.where(rng.random(num_samples) < 0.25, _log_normal(rng, np.full(num_samples, 450.0), 0.5),
                    rng.integers(30, 151, num_samples))  # fmt: skip
    wide, tall = _patches(720, 1280, 65_536), _patches(1280, 720, 65_536)
    is_wide = rng.random(num_samples) < 0.9
    grids = [[(-(-count // 2), *(wide if one else tall))]
             for count, one in zip(frames.tolist(), is_wide.tolist(), strict=True)]  # fmt: skip
    return _lengths(text, grids, 0.5, seq_length)


def text(num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """Conversations without images: log-normal lengths with a mean of 600 tokens, which is our choice."""
    rng = np.random.default_rng(seed)
    words = _log_normal(rng, np.full(num_samples, 600.0), 0.8)
    return _lengths(words, [[]] * num_samples, 0.6, seq_length)


def mixed(shares: Mapping[str, float], num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """A shuffled mix of ``DISTRIBUTIONS``; ``shares`` need not add up to 1."""
    rng, total = np.random.default_rng(seed), sum(shares.values())
    drawn = [DISTRIBUTIONS[name](max(1, round(num_samples * share / total)), seed, seq_length)
             for name, share in shares.items()]  # fmt: skip
    order = rng.permutation(sum(map(len, drawn)))
    return Lengths(*(np.concatenate([getattr(one, field.name) for one in drawn])[order] for field in fields(Lengths)))


DISTRIBUTIONS = {"llava": llava, "documents": documents, "videos": videos, "text": text}


def _log_normal(rng: np.random.Generator, means: np.ndarray, sigma: float) -> np.ndarray:
    return np.maximum(5, rng.lognormal(np.log(means) - sigma**2 / 2, sigma)).astype(int)


def _patches(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    rows, columns = smart_resize(height, width, 28, 3136, max_pixels)
    return rows // 14, columns // 14


def _lengths(
    text: np.ndarray, media: list[list[tuple[int, int, int]]], targets: float, seq_length: int
) -> Lengths:
    """``targets``: the share of the text that has a loss."""
    rows = []
    for words, grids in zip(text.tolist(), media, strict=True):
        kept, left = [], seq_length - _MIN_TEXT
        for grid in grids:
            if math.prod(grid) // 4 + 2 <= left:
                kept.append(grid)
                left -= math.prod(grid) // 4 + 2
        num_tokens = min(seq_length, seq_length - _MIN_TEXT - left + words)
        rows.append((
            num_tokens, int(min(words, num_tokens) * targets), len(kept), sum(map(math.prod, kept)),
            sum(map(image_pairs, kept)), sum(window_pairs(grid, WINDOW) for grid in kept),
        ))  # fmt: skip
    tokens, num_targets, num_media, patches, full, windows = np.array(rows, dtype=np.int64).T
    return Lengths(tokens.astype(np.int32), num_targets.astype(np.int32), num_media.astype(np.int32),
                   patches.astype(np.int32), full, windows)  # fmt: skip
