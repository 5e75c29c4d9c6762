"""What a step must cost by its formulas: bytes kept for the backward pass, and FLOPs with recomputation."""

import math
from dataclasses import dataclass

from mm.batch import BatchTotals
from mm.config.model import LanguageConfig, ModelConfig, VisionConfig
from mm.model.flops import forward_flops, training_flops
from mm.weights.table import model_weights

OPTIMIZER_BYTES_PER_PARAM = 30
"""Of one update: fp32 weight and both moments read and written, gradient read, bf16 weight written."""
STATE_BYTES_PER_PARAM = 18
"""bf16 weight 2, and in fp32 gradient, weight and two moments."""
FROZEN_BYTES_PER_PARAM = 2
LOGIT_BYTES = 10
"""Of one logit: bf16, its fp32 copy, and the fp32 log-softmax kept for the backward pass."""


@dataclass(frozen=True)
class Params:
    """How many weights a model has."""

    trained: int
    frozen: int

    @classmethod
    def of(cls, model: ModelConfig) -> "Params":
        sizes = [(math.prod(weight.shape), model.is_frozen(weight.part)) for weight in model_weights(model)]
        return cls(sum(n for n, frozen in sizes if not frozen), sum(n for n, frozen in sizes if frozen))


@dataclass(frozen=True)
class ExpectedMemory:
    """Bytes on one device at the peak of a bf16 step, without chunks and without parallelism."""

    states: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits

    @classmethod
    def of(cls, model: ModelConfig, largest: BatchTotals) -> "ExpectedMemory":
        """``largest``: the counts of the largest microbatch."""
        params, vision, language = Params.of(model), model.vision, model.language
        activations = largest.num_tokens * _kept_bytes(language, language.num_query_groups * language.kv_channels)
        if not vision.freeze:
            activations += largest.num_patches * _kept_bytes(vision, vision.hidden_size)
        states = STATE_BYTES_PER_PARAM * params.trained + FROZEN_BYTES_PER_PARAM * params.frozen
        return cls(states, activations, float(LOGIT_BYTES * language.vocab_size * largest.num_target_tokens))


def _kept_bytes(tower: VisionConfig | LanguageConfig, kv_size: int) -> float:
    """Bytes of one row in all layers of ``tower``, whose keys have ``kv_size`` numbers.

    A bf16 layer with flash attention keeps six vectors of the hidden size (both residual sums, both norms' outputs,
    queries, attention's output), keys and values, and gate, up and their product.  With recomputation it keeps its
    input, and one layer at a time the rest.
    """
    layer = 12 * tower.hidden_size + 4 * kv_size + 6 * tower.ffn_hidden_size
    if tower.recompute.granularity == "full":
        return 2 * tower.hidden_size * tower.num_layers + layer
    return layer * tower.num_layers


def hardware_flops(model: ModelConfig, totals: BatchTotals) -> float:
    """FLOPs of one step with those of recomputation; of frozen towers that no gradient passes nothing is recomputed."""
    forward, language = forward_flops(model, totals), model.language
    flops = training_flops(model, totals)
    if language.recompute.granularity == "full":
        flops += forward.language - 2 * totals.num_target_tokens * language.hidden_size * language.vocab_size
    if model.vision.recompute.granularity == "full" and not model.vision.freeze:
        flops += forward.vision
    return flops
