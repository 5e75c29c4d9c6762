"""The dry run's table of what each way to keep fewer activations costs, by device.

Times follow from published peaks and an assumed speed of the host's link; nothing is measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mm.config.activations import OffloadConfig, RecomputeConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.device.known import KNOWN_DEVICES
from mm.device.platform import KnownDevice
from mm.plan.by_device import calibration_by_device
from mm.plan.costs import Cutting, block_keys, laws_of
from mm.plan.layer_memory import INPUT, NOTHING, WIDTHS, layer_memories
from mm.plan.lists import one_stage
from mm.plan.offload import HOST_BYTES_PER_SECOND, Ways
from mm.plan.sizes import STATED, TEXT, VISUAL, longest_microbatches
from mm.weights.table import Place


@dataclass(frozen=True)
class _TypicalLayer:
    """The layer of a tower that keeps most, in the longest microbatch."""

    tower: str
    place: Place
    number: int
    num_rows: int
    num_pairs: int
    kept_bytes: int
    """What the layer keeps for all rows."""
    input_bytes: int


def is_wanted(run: Run) -> bool:
    """Whether the run uses one of the ways, so that its user may want to know about the others."""
    recomputes = any(tower.recompute.granularity == "full" for tower in (run.model.vision, run.model.language))
    return run.args.precision != "fp32" and (run.model.offloads_activations or recomputes)


def activation_rows(run: Run, min_bytes: int) -> Iterator[tuple[str, ...]]:
    """The table, with its header: for each group of devices with equal numbers, the milliseconds that a way adds to a
    layer of a microbatch.

    ``run`` is in 16 bits: no peaks are published for fp32.  Devices with less memory than ``min_bytes`` are left out,
    unless all have less.
    """
    plain = replace(run, model=_keeps_all(run.model))
    layers, found = list(_layers(plain)), dict[tuple[str, ...], list[str]]()
    devices = [one for one in KNOWN_DEVICES if one.peak_flops is not None]
    for device in [one for one in devices if (one.memory_bytes or 0) >= min_bytes] or devices:
        ways = [_ways(plain, device, layer) for layer in layers]
        cells = [f"{1000 * seconds:.2f}" for one in ways for seconds in (one.recomputed, one.offloaded, one.both)]
        found.setdefault(tuple(cells), []).append(device.label)
    yield "device", *(cell for one in layers for cell in (f"{one.tower}: recompute", "offload", "both"))
    yield from ((", ".join(labels), *cells) for cells, labels in found.items())


def activation_notes(run: Run) -> Iterator[str]:
    """The layers that the table is about."""
    for one in _layers(replace(run, model=_keeps_all(run.model))):
        yield (f"A layer of the {one.tower} keeps {one.kept_bytes / 2**30:.2f} GiB of {one.num_rows:,} "
               f"{'tokens' if one.tower == 'LLM' else 'patches'}, or its input of {one.input_bytes / 2**30:.2f} GiB.")


def _keeps_all(model: ModelConfig) -> ModelConfig:
    vision, language = (replace(tower, recompute=RecomputeConfig(), offload=OffloadConfig())
                        for tower in (model.vision, model.language))
    return replace(model, vision=vision, language=language)


def _layers(run: Run) -> Iterator[_TypicalLayer]:
    """One layer of each tower that keeps anything; of the ViT one that attends within windows, as most do."""
    model, kinds, vision = one_stage(run.model), longest_microbatches(run), run.model.vision
    text, visual = (kinds.get(STATED) or kinds[kind] for kind in (TEXT, VISUAL))
    causal = run.args.micro_batch_size * run.args.seq_length * (run.args.seq_length + 1) // 2 // run.cp_size
    windows = visual.num_patches * (vision.window_attn_size // vision.patch_size) ** 2
    for tower, place, num_rows, num_pairs in (("LLM", Place.LANGUAGE_LAYER, text.num_tokens, causal),
                                              ("ViT", Place.VISION_LAYER, visual.num_patches, windows)):
        known = layer_memories(model, place, run.tp_size, WIDTHS[run.args.precision], run.num_pieces,
                               1 if run.is_ring else run.cp_size)
        candidates = [layer for layer in range(len(known))
                      if tower == "LLM" or layer not in vision.fullatt_block_indexes]
        number = max(candidates, key=lambda layer: known[layer][0].kept(known[layer][1]), default=0)
        sizes, keeps = known[number]
        if keeps != NOTHING and num_rows:
            yield _TypicalLayer(tower, place, number, num_rows, num_pairs, sizes.kept(keeps) * num_rows,
                                sizes.kept(INPUT) * num_rows)


def _ways(run: Run, device: KnownDevice, layer: _TypicalLayer) -> Ways:
    calibration = calibration_by_device(run, device, device.links)
    keys = block_keys(run.model, Cutting(run.tp_size, run.args.sequence_parallel), has_images=True)
    laws = laws_of(keys[layer.place, layer.number], calibration)
    forward, backward = (law.seconds(layer.num_rows, layer.num_pairs) for law in (laws.forward, laws.backward))
    return Ways.of(forward, backward, layer.kept_bytes, layer.input_bytes, HOST_BYTES_PER_SECOND)
