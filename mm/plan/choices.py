"""The layouts that a run could have, and the run with each of them.

They differ in tensor, context and pipeline sizes, chunks, samples per microbatch, packing, encoder placement and batch,
and recomputation.  All train on the same samples in each step, with the same loss and gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, get_args

from mm.config.data import DataConfig
from mm.config.flag_rules import loss_problems
from mm.config.layers import RecomputeConfig
from mm.config.model import EncoderPlacement, ModelConfig
from mm.config.run import Run, parallel_problems
from mm.plan.lists import Lists

AS_GIVEN, BALANCED, PACKS = "as given", "balanced", "balanced packs"
SAMPLERS = (AS_GIVEN, BALANCED, PACKS)
"""How samples become microbatches: as the data JSON says, or balanced by cost, unpacked or in packs."""
_NONE, _SELECTIVE, _FULL = RecomputeConfig(), RecomputeConfig("selective"), RecomputeConfig("full", "uniform", 1)
RECOMPUTE: Mapping[str, tuple[RecomputeConfig, RecomputeConfig]] = {
    "none": (_NONE, _NONE), "selective": (_SELECTIVE, _SELECTIVE), "ViT full": (_FULL, _SELECTIVE),
    "LLM full": (_SELECTIVE, _FULL), "full": (_FULL, _FULL),
}  # fmt: skip
"""Settings of the ViT and of the LLM, from fast to small.  A frozen tower keeps no activations, so they have no effect
there."""
ENCODERS: Sequence[EncoderPlacement] = get_args(EncoderPlacement)
ENCODER_BATCH_SIZES = (1, 2, 4, 8)
"""Microbatches whose images pass the ViT together, as the search tries them."""
_BUCKETS = "BucketBatchSampler"
_MAX_CHUNKS, _MAX_SLOTS = 4, 64
_MAX_SAMPLES = 8
"""Most samples in a microbatch: with more, few microbatches are left, and matrix products hardly get faster."""
_MAX_CP_SIZE = 16
_MIN_TOKENS = 2048
"""Fewest tokens of the longest sample per context-parallel rank: fewer make small matrix products, and such short
samples fit anyway."""


@dataclass(frozen=True, order=True)
class Choice:
    """One layout, without its lists."""

    tp_size: int
    cp_size: int
    num_stages: int
    num_chunks: int
    micro_batch_size: int
    sampler: str
    encoder: EncoderPlacement
    """``encoder_placement`` of the model JSON."""
    recompute: str
    encoder_batch: int = 1
    """``encoder_batch_microbatches`` of the model JSON."""

    @property
    def group(self) -> tuple[int, int, int]:
        """Layouts with the same group differ in chunks, microbatches, the encoder and recomputation only."""
        return self.tp_size, self.cp_size, self.num_stages

    def applied(self, run: Run) -> Run:
        """``run`` with this layout and the same number of samples per step.  Its lists are legal, but not the best."""
        dp_size = max(1, run.world_size // (self.tp_size * self.cp_size * self.num_stages))
        args = replace(
            run.args, tensor_model_parallel_size=self.tp_size, sequence_parallel=self.tp_size > 1,
            context_parallel_size=self.cp_size, pipeline_model_parallel_size=None,
            virtual_pipeline_model_parallel_size=None, micro_batch_size=self.micro_batch_size,
            global_batch_size=run.global_batch_size,
            use_distributed_optimizer=run.args.splits_optimizer or (
                run.args.data_parallel_sharding_strategy is None and dp_size * self.cp_size > 1))
        model = replace(_placed(run.model, self.num_stages, self.num_chunks, self.encoder, self.recompute),
                        encoder_batch_microbatches=self.encoder_batch)
        return replace(run, args=args, model=model, data=self._data(run.data))

    def _data(self, data: DataConfig) -> DataConfig:
        if self.sampler == AS_GIVEN:
            return data
        # packing would change the default truncation of long samples, so it is stated
        truncation = "turns" if data.drops_turns else "tokens"
        packs = self.sampler == PACKS or data.packs
        return replace(data, sampler_type="BalancedBatchSampler", packing=packs, truncation=truncation)


@lru_cache(1024)
def _placed(
    model: ModelConfig, num_stages: int, num_chunks: int, encoder: EncoderPlacement, recompute: str
) -> ModelConfig:
    """``model`` with its own lists if they have these stages and chunks, or else lists of about equal length."""
    lists = Lists.of(model)
    if (num_stages, num_chunks) != (model.num_stages, model.num_chunks):
        lists = Lists.spread(model.vision.num_layers, model.language.num_layers, num_stages, num_chunks)
    model = replace(lists.applied(model), encoder_placement=encoder)
    if recompute == AS_GIVEN:
        return model
    towers = zip((model.vision, model.language), RECOMPUTE[recompute], strict=True)
    vision, language = (replace(tower, recompute=how) for tower, how in towers)
    return replace(model, vision=vision, language=language)


def present_choice(run: Run) -> Choice:
    """The layout that ``run`` has."""
    return Choice(run.tp_size, run.cp_size, run.num_stages, run.num_chunks, run.args.micro_batch_size, AS_GIVEN,
                  run.model.encoder_placement, AS_GIVEN, run.model.encoder_batch_microbatches)


NAMES = {"TP": "tp_size", "CP": "cp_size", "PP": "num_stages", "VPP": "num_chunks", "MBS": "micro_batch_size",
         "SAMPLER": "sampler", "ENCODER": "encoder", "RECOMPUTE": "recompute", "EB": "encoder_batch"}
"""Words of ``--fix`` -> fields of ``Choice``; DP follows from the others."""


def choices(run: Run, fixed: Mapping[str, Sequence[object]], node_size: int) -> Iterator[Choice]:
    """Every legal layout, with the fastest recomputation and the smallest encoder batch allowed.

    ``fixed``: name of a field -> its allowed values.

    Tensor-parallel ranks stay within a node, and context-parallel ranks get at least ``_MIN_TOKENS`` tokens.
    Microbatches and packing are as given if the loss is a mean over microbatches.
    """
    is_free, model, most_tokens = run.args.loss_unit != "microbatch", run.model, run.args.seq_length
    num_layers = model.vision.num_layers + model.language.num_layers
    options: dict[str, Sequence[object]] = {
        "tp_size": [size for size in replace(model, encoder_placement="tensor_ranks").tp_sizes if size <= node_size],
        "cp_size": [size for size in _powers(_MAX_CP_SIZE) if size == 1 or most_tokens // size >= _MIN_TOKENS],
        "num_stages": [size for size in range(1, num_layers + 1) if run.world_size % size == 0],
        "num_chunks": [*range(1, _MAX_CHUNKS + 1)],
        "micro_batch_size": _powers(_MAX_SAMPLES) if is_free else [run.args.micro_batch_size],
        "sampler": _samplers(run.data) if is_free else [AS_GIVEN],
        "encoder": ENCODERS,
    } | {name: values for name, values in fixed.items() if name not in ("recompute", "encoder_batch")}
    of_all: dict[str, Any] = {"recompute": recomputations(fixed)[0], "encoder_batch": encoder_batch_sizes(fixed)[0]}
    for values in product(*options.values()):
        choice = replace(present_choice(run), **of_all, **dict(zip(options, values, strict=True)))
        if choice.tp_size == 1 and choice.encoder != options["encoder"][0]:
            continue  # one rank holds the whole ViT in either placement
        if not _is_divisible(choice, run):
            continue
        applied = choice.applied(run)
        if not [*parallel_problems(applied), *loss_problems(applied.args, applied.data)]:
            yield choice


def fixed_problems(run: Run, fixed: Mapping[str, Sequence[object]]) -> Iterator[str]:
    """Values of ``fixed`` that would change what is learnt."""
    is_of_microbatches, present = run.args.loss_unit == "microbatch", run.args.micro_batch_size
    if is_of_microbatches and {*fixed.get("micro_batch_size", ())} - {present}:
        yield (f"--fix: MBS must stay {present}, because --calculate-per-microbatch-loss gives a sample another weight "
               f"in another microbatch; train with --calculate-per-sample-loss")
    if {*fixed.get("sampler", ())} - {AS_GIVEN} and (is_of_microbatches or run.data.sampler_type == _BUCKETS):
        yield (f"--fix: SAMPLER must stay {AS_GIVEN!r}, because with this loss or BucketBatchSampler another one would "
               f"change what is learnt; leave it out")


def recomputations(fixed: Mapping[str, Sequence[object]]) -> list[str]:
    """The kinds of recomputation allowed, from fast to small; ``AS_GIVEN`` comes last."""
    return [name for name in (*RECOMPUTE, AS_GIVEN) if name in fixed.get("recompute", RECOMPUTE)]


def encoder_batch_sizes(fixed: Mapping[str, Sequence[object]]) -> list[int]:
    """The encoder batches allowed, smallest first."""
    return sorted(value for value in fixed.get("encoder_batch", ENCODER_BATCH_SIZES) if isinstance(value, int))


def _is_divisible(choice: Choice, run: Run) -> bool:
    """Whether the sizes divide evenly: a quick filter that drops layouts that ``parallel_problems`` refuses, and those
    with empty chunks."""
    replica_size = choice.tp_size * choice.cp_size * choice.num_stages
    if run.world_size % replica_size or (choice.num_chunks > 1 and choice.num_stages == 1):
        return False
    dp_size = run.world_size // replica_size
    packs = choice.sampler == PACKS or run.data.packs
    num_microbatches, rest = divmod(run.global_batch_size, dp_size if packs else dp_size * choice.micro_batch_size)
    if packs and choice.num_chunks == 1:
        return num_microbatches > 0
    num_layers = run.model.vision.num_layers + run.model.language.num_layers
    return not rest and (choice.num_chunks == 1 or (
        num_microbatches >= choice.num_stages and choice.num_chunks * choice.num_stages <= min(_MAX_SLOTS, num_layers)))


def _samplers(data: DataConfig) -> list[str]:
    """The samplers that keep the samples of each step.  A bucket sampler cannot be replaced: it decides which samples
    share a step."""
    if data.sampler_type == _BUCKETS:
        return [AS_GIVEN]
    return [PACKS] if data.packs else [BALANCED, PACKS]


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]
