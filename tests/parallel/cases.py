"""The layouts whose loss, gradients and first two updates must equal transformers'."""

from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from mm.batch import Grid
from mm.config.args import LossUnit, Sharding
from tests.tiny import RawSample, random_sample

Lists = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Layers per stage, or for every virtual chunk."""


def nested(lists: Lists) -> tuple[tuple[int, ...], ...]:
    return lists if isinstance(lists[0], tuple) else (lists,)


@dataclass(frozen=True)
class Case:
    """One layout of the small model with one batch."""

    name: str
    vision: Lists = (4,)
    language: Lists = (4,)
    tp: int = 1
    dp: int = 1
    tied: bool = False
    num_key_heads: int = 2
    """Key/value heads of the LLM; tensor parallelism of 4 needs 4."""
    freeze: tuple[str, ...] = ()
    freeze_layers: tuple[str, str] = ("", "")
    """Frozen layers of the ViT and the LLM, in the syntax of the model JSON."""
    freeze_modules: tuple[str, ...] = ()
    trainable_modules: tuple[str, ...] = ()
    batch: str = "mixed"
    grids: tuple[tuple[Grid, ...], ...] = ()
    """Pictures of each sample, in place of those that ``batch`` names."""
    text_tokens: tuple[int, ...] = (9, 14, 19, 24)
    """Number of text tokens of consecutive samples, repeated cyclically."""
    sharding: Sharding = "no_shard"
    overlap: bool = False
    loss_unit: LossUnit = "token"
    micro_batch_size: int = 2
    recompute: str | None = None
    """A method of "full", which may be followed by its number of layers, else 1; or "selective" and its modules."""
    offload: int = 0
    """Layers of each tower and chunk, the first ones, whose activations are offloaded."""
    logit_rows: int | None = None
    """Rows whose logits exist at a time, for a loss in several rounds."""
    sequence_parallel: bool = False
    cp: int = 1
    ring: bool = False
    """Whether context parallelism is a ring; else Ulysses."""
    clip_grad: float = 0.0
    """1e-6 brings gradients near Adam's epsilon of 1e-8, below which its update is no longer their sign alone."""
    waits: bool = False
    """Whether messages come only when they are wanted."""
    fused: bool = False
    """Whether the kernel functions are those that CUDA compiles, here as they are written."""
    whole_encoder: bool = False
    """Whether every tensor-parallel rank has the whole ViT and projector, and images of its own."""
    encoder_batch: int = 1
    """Microbatches whose images pass the ViT together."""
    groups: bool = False
    """Groups of the optimizer: ``GROUP_FLAGS`` and the rates of parts beside them."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Case":
        """A case from its fields after a round trip through JSON, which turned tuples into lists."""
        def tuples(value: Any) -> Any:
            return tuple(map(tuples, value)) if isinstance(value, list) else value

        return cls(**{name: tuples(value) for name, value in fields.items()})

    @property
    def vision_chunks(self) -> tuple[tuple[int, ...], ...]:
        return nested(self.vision)

    @property
    def language_chunks(self) -> tuple[tuple[int, ...], ...]:
        return nested(self.language)

    @property
    def pp(self) -> int:
        return len(self.vision_chunks[0])

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def without_layout(self) -> "Case":
        """The same training on one rank: what transformers does."""
        return replace(self, name="", vision=(4,), language=(4,), tp=1, dp=1, sharding="no_shard", overlap=False,
                       recompute=None, offload=0, logit_rows=None, sequence_parallel=False, cp=1, ring=False,
                       waits=False, whole_encoder=False, encoder_batch=1)


ALL = ("vision", "projector", "language")
"""For ``freeze``; what is trained then are ``trainable_modules``."""
GROUP_FLAGS = ("--weight-decay", "2", "--lr-scale-modules", "linear_fc", "--lr-mult", "0.5",
               "--weight-decay-exclude-modules", "embedding")
VISION_LR, PROJECTOR_LR, PROJECTOR_DECAY = 1e-4, 2e-3, 5.0
"""Beside a learning rate of 1e-3.  Each setting changes weights by several times what rounding does to them."""
_IMAGE: tuple[Grid, ...] = ((1, 4, 6),)
TEXT_AT_BOTH_ENDS = ((), _IMAGE, (), (), _IMAGE, ())
IMAGES_AT_BOTH_ENDS = (_IMAGE, (), _IMAGE, _IMAGE, (), _IMAGE)
"""In one of the two each microbatch of a step has no image."""
FEW_TOKENS: dict[str, Any] = {
    "grids": ((), _IMAGE, (), ((1, 2, 2),), ((1, 8, 4), (1, 2, 4))), "text_tokens": (1, 1, 2, 3, 9),
    "micro_batch_size": 1,
}
"""Microbatches of one token, two and three among others: a context or tensor-parallel rank is left without any."""
ONE_IMAGE_OUTWEIGHS_ALL: tuple[tuple[Grid, ...], ...] = (((1, 2, 2),), ((1, 16, 20), (1, 2, 4)), ((1, 4, 2),))
_SHARDED = (
    # replicas with images in different microbatches, and with none; what ties units together
    Case("dp2", dp=2),
    Case("dp2-overlap", dp=2, batch="images on one rank", overlap=True),
    Case("dp2-tied-overlap", dp=2, tied=True, batch="last without targets", logit_rows=5, overlap=True),
    Case("dp2-text-only", dp=2, batch="text"),
    Case("dp2-only-projector", dp=2, freeze=("vision", "language"), batch="images on one rank"),
    Case("dp2-vision-frozen-recompute", dp=2, freeze=("vision",), recompute="uniform", overlap=True),
    Case("cp2-few-tokens", cp=2, overlap=True, **FEW_TOKENS),
    Case("tp2-dp2-sp-overlap", tp=2, dp=2, sequence_parallel=True, overlap=True),
    Case("dp2-pp2-vpp2-tied-on-one-rank", ((4, 0), (0, 0)), ((0, 1), (1, 2)), dp=2, tied=True, overlap=True,
         batch="images on one rank", micro_batch_size=1),
    # the first replica waits in its first microbatch for the second one, which has images in its last only
    Case("dp2-pp2-only-encoder-images-at-other-ends", (4, 0), (2, 2), dp=2, freeze=("language",),
         trainable_modules=("output_layer",), micro_batch_size=1,
         grids=(_IMAGE, (), (), (), (), (), (), (), (), _IMAGE)),
    # in the cool-down, each replica lacks a pass of the other
    Case("dp2-pp2-vpp2-images-in-different-microbatches", ((2, 1), (1, 0)), ((0, 0), (0, 4)), dp=2,
         freeze=("language",), micro_batch_size=1, grids=((), _IMAGE, _IMAGE, ())),
    # a rank whose last images of an encoder batch are not the batch's last
    Case("cp2-pp2-encoded-together", (4, 0), (0, 4), cp=2, encoder_batch=3, **FEW_TOKENS),
    Case("whole-tp2-dp2-sp-encoded-together", tp=2, dp=2, whole_encoder=True, sequence_parallel=True,
         batch="images on one rank", encoder_batch=3, micro_batch_size=1),
)
"""Gradients in shards; and weights, on one stage."""
CASES = (
    Case("tp1"),
    Case("tp2-sp-few-tokens", tp=2, sequence_parallel=True, **FEW_TOKENS),
    Case("cp4-few-tokens", cp=4, **FEW_TOKENS),
    Case("ring4-few-tokens", cp=4, ring=True, **FEW_TOKENS),
    Case("tp2-ring2-sp-few-tokens", tp=2, cp=2, ring=True, sequence_parallel=True, tied=True, **FEW_TOKENS),
    Case("ring2-pp2-vpp2-few-tokens-vision-frozen", ((2, 1), (1, 0)), ((0, 0), (1, 3)), cp=2, ring=True,
         freeze=("vision",), **FEW_TOKENS),
    Case("tp2-cp2-pp2-sp-few-tokens", (3, 1), (0, 4), tp=2, cp=2, sequence_parallel=True, **FEW_TOKENS),
    Case("tp1-fused", fused=True),
    Case("tp1-fused-recompute-mlp-half-frozen", fused=True, recompute="selective mlp layernorm",
         freeze_modules=("fc1", "0.pre")),
    Case("tp1-fused-norms-and-biases-trained", fused=True, freeze=ALL, trainable_modules=("norm", "bias")),
    Case("tp2-fused-logits-in-rounds", tp=2, fused=True, logit_rows=5),
    Case("tp2-sp-fused-odd-rows", tp=2, fused=True, sequence_parallel=True, micro_batch_size=1),
    Case("tp2", tp=2),
    Case("tp2-no-targets", tp=2, batch="no targets"),
    Case("tp2-sp-norms-and-biases-trained", tp=2, sequence_parallel=True, freeze=ALL,
         trainable_modules=("norm", "bias")),
    Case("pp2-vit-on-both", (3, 1), (0, 4)),
    Case("pp2-nothing-trainable-on-first", (4, 0), (0, 4), freeze=("vision", "projector")),
    Case("pp2-first-of-llm-frozen", (4, 0), (2, 2), freeze=("vision", "projector"), freeze_layers=("", "0-2"),
         freeze_modules=("word_embeddings",)),
    Case("pp2-tied-embedding-frozen", (4, 0), (1, 3), tied=True, freeze_modules=("word_embeddings",)),
    Case("pp2-text-only-language-frozen", (3, 1), (0, 4), freeze=("language",), batch="text"),
    # two virtual chunks: the ViT over both, chunks of nothing, and what ties the first to the last on one rank
    Case("pp2-vpp2-chunks-of-nothing", ((0, 4), (0, 0)), ((0, 0), (0, 4))),
    Case("pp2-vpp2-tied-on-two-ranks", ((4, 0), (0, 0)), ((1, 1), (1, 1)), tied=True),
    Case("pp2-vpp2-layers-frozen", ((2, 1), (1, 0)), ((0, 0), (1, 3)), freeze=("projector",), recompute="block",
         freeze_layers=("0-2", "0-1"), freeze_modules=("patch_embed", "word_embeddings", "fc2")),
    Case("pp2-vpp3-of-4-microbatches", ((2, 1), (1, 0), (0, 0)), ((0, 0), (0, 1), (1, 2))),
    Case("dp2-images-on-one-rank-overlap", dp=2, batch="images on one rank", overlap=True),
    Case("dp2-distributed-optimizer", dp=2, sharding="optim"),
    Case("dp2-distributed-optimizer-layers-frozen", dp=2, batch="images on one rank", sharding="optim",
         overlap=True, freeze_layers=("0-1", "1-2"), freeze_modules=("patch_embed", "norm")),
    Case("dp2-per-sample", dp=2, loss_unit="sample"),
    Case("dp2-clipped", dp=2, clip_grad=1e-6),
    *(replace(case, name=f"shards-{case.name}", sharding="optim_grads") for case in _SHARDED),
    *(replace(case, name=f"weight-shards-{case.name}", sharding="optim_grads_params")
      for case in _SHARDED if case.pp == 1),
    Case("pp4-first-with-neither", (0, 2, 2, 0), (0, 0, 1, 3)),
    Case("pp4-last-with-neither", (4, 0, 0, 0), (1, 3, 0, 0)),
    Case("pp4-fewer-microbatches-than-stages", (2, 2, 0, 0), (0, 0, 2, 2), batch="three samples"),
    Case("pp4-images-at-both-ends", (2, 2, 0, 0), (0, 0, 2, 2), grids=IMAGES_AT_BOTH_ENDS, micro_batch_size=1),
    Case("pp2-vpp2-text-at-both-ends", ((2, 1), (1, 0)), ((0, 0), (1, 3)), grids=TEXT_AT_BOTH_ENDS, micro_batch_size=1),
    Case("tp2-pp2-per-microbatch", (3, 1), (0, 4), tp=2, loss_unit="microbatch"),
    Case("tp2-pp2-sp-vit-stage", (4, 0), (0, 4), tp=2, sequence_parallel=True, batch="video"),
    Case("tp2-dp2-distributed-optimizer", tp=2, dp=2, sharding="optim"),
    Case("dp2-pp2-distributed-optimizer-groups", (2, 2), (0, 4), dp=2, sharding="optim", groups=True),
    Case("pp4-vpp2-waits-vision-frozen", ((1, 1, 1, 1), (0, 0, 0, 0)), ((0, 0, 0, 0), (1, 1, 1, 1)), waits=True,
         freeze=("vision",)),
    Case("pp4-vpp2-tied", ((0, 2, 0, 2), (0, 0, 0, 0)), ((0, 0, 0, 0), (2, 0, 1, 1)), tied=True),
    Case("dp2-pp2-vpp2-distributed-optimizer-overlap", ((2, 1), (1, 0)), ((0, 0), (1, 3)), dp=2, tied=True,
         batch="images on one rank", sharding="optim", overlap=True, micro_batch_size=1),
    Case("tp2-cp2-sp-one-sample-selective-recompute", tp=2, cp=2, sequence_parallel=True, micro_batch_size=1,
         recompute="selective"),
    Case("cp2-dp2-images-on-one-rank-overlap", cp=2, dp=2, batch="images on one rank", sharding="optim", overlap=True),
    Case("tp2-ring2-pp2-sp-vpp2-tied", ((2, 1), (1, 0)), ((0, 0), (1, 3)), tp=2, cp=2, ring=True, tied=True,
         sequence_parallel=True, recompute="selective"),
    # whole encoders: every tensor- and context-parallel rank has images of its own
    *(replace(case, name=f"whole-{case.name}", whole_encoder=True) for case in (
        Case("tp2-text-only", tp=2, batch="text"),
        Case("tp2-sp-few-tokens", tp=2, sequence_parallel=True, **FEW_TOKENS),
        Case("tp2-sp-one-image-outweighs-all", tp=2, sequence_parallel=True, grids=ONE_IMAGE_OUTWEIGHS_ALL,
             micro_batch_size=3),
        Case("tp2-sp-encoder-frozen", tp=2, sequence_parallel=True, freeze=("vision", "projector")),
        Case("tp2-sp-norms-and-biases-trained", tp=2, sequence_parallel=True, freeze=ALL,
             trainable_modules=("norm", "bias")),
        Case("tp4-sp-one-sample", tp=4, num_key_heads=4, sequence_parallel=True, micro_batch_size=1),
        Case("tp2-pp2-sp-few-tokens", (4, 0), (0, 4), tp=2, sequence_parallel=True, **FEW_TOKENS),
        Case("tp2-ring2-sp-vision-frozen", tp=2, cp=2, ring=True, sequence_parallel=True, freeze=("vision",)),
        Case("tp2-dp2-distributed-optimizer-overlap", tp=2, dp=2, batch="images on one rank",
             sharding="optim", overlap=True),
        Case("tp2-cp2-pp2-sp-few-tokens", (3, 1), (0, 4), tp=2, cp=2, sequence_parallel=True, **FEW_TOKENS),
    )),
    # images of several microbatches in one pass of the ViT
    *(replace(case, name=f"together-{case.name}", encoder_batch=max(2, case.encoder_batch)) for case in (
        Case("tp1-all-few-tokens", **FEW_TOKENS, encoder_batch=8),
        Case("tp1-encoder-frozen", freeze=("vision", "projector"), encoder_batch=4),
        Case("tp2-sp-few-tokens", tp=2, sequence_parallel=True, encoder_batch=4, **FEW_TOKENS),
        Case("ring2-video", cp=2, ring=True, batch="video"),
        Case("dp2-text-last-overlap", dp=2, grids=(_IMAGE, _IMAGE, (), _IMAGE, (), ()), micro_batch_size=1,
             overlap=True, encoder_batch=3),
        Case("pp2-vit-stage-images-at-both-ends", (4, 0), (0, 4), grids=IMAGES_AT_BOTH_ENDS, micro_batch_size=1,
             encoder_batch=4),
        Case("pp2-tied-text-at-both-ends", (4, 0), (1, 3), tied=True, grids=TEXT_AT_BOTH_ENDS, micro_batch_size=1),
        Case("pp2-vpp2-few-tokens", ((4, 0), (0, 0)), ((0, 1), (1, 2)), encoder_batch=3, **FEW_TOKENS),
        Case("whole-tp2-cp2-sp-few-tokens", tp=2, cp=2, sequence_parallel=True, whole_encoder=True, encoder_batch=4,
             **FEW_TOKENS),
    )),
)


CASES = (*CASES, *(replace(case, name=f"host-{case.name}") for case in (
    # activations in host memory, of all layers or the first
    Case("tp1", offload=4),
    Case("tp1-fused-selective", fused=True, recompute="selective mlp layernorm", offload=4),
    Case("ring2-few-tokens", cp=2, ring=True, offload=4, **FEW_TOKENS),  # a rank without rows
    Case("weight-shards-dp2", dp=2, sharding="optim_grads_params", overlap=True, offload=4),
    Case("pp2", (3, 1), (0, 4), offload=2),
    Case("pp2-vpp2-tied-recompute", ((2, 1), (1, 0)), ((0, 0), (1, 3)), tied=True, recompute="uniform", offload=4,
         micro_batch_size=1),
)))


NOT_FINITE = ("tp1", "tp2", "pp2-vit-on-both", "dp2-clipped", "dp2-distributed-optimizer",
              "tp2-dp2-distributed-optimizer", "shards-dp2")  # fmt: skip
"""Cases that are also tried with a NaN in one gradient of one rank."""


_REPLICAS = {
    "dp2": Case("", dp=2), "dp4": Case("", dp=4), "tp2-dp2": Case("", tp=2, dp=2), "cp2-dp2": Case("", cp=2, dp=2),
    "dp2-pp2": Case("", (3, 1), (0, 4), dp=2),
}  # fmt: skip
_TRAINED: dict[str, dict[str, Any]] = {
    "all": {}, "vision-frozen": {"freeze": ("vision",)}, "tied": {"tied": True}, "text-only": {"batch": "text"}}
MATRIX = tuple(
    replace(layout, name=f"matrix-{sharding}-{where}-{trained}", sharding=sharding, micro_batch_size=1, **others)
    for sharding in ("optim", "optim_grads", "optim_grads_params")
    for where, layout in _REPLICAS.items() for trained, others in _TRAINED.items()
    if sharding != "optim_grads_params" or layout.pp == 1)  # weights in shards and a pipeline are refused together
"""Every strategy with every way to have replicas and every kind of training, which --hypothesis-profile=many runs."""
IN_TURN = tuple(case for case in MATRIX if case.name in {
    "matrix-optim-dp4-all", "matrix-optim_grads-tp2-dp2-vision-frozen", "matrix-optim_grads_params-cp2-dp2-tied",
    "matrix-optim-dp2-pp2-text-only"})
"""Strategies, ways to have replicas on four ranks, and kinds of training, each in turn.  The first is the only pair of
strategy and way that ``CASES`` lacks."""


def batch_of(case: Case) -> list[list[list[RawSample]]]:
    """Samples as ``[dp rank][microbatch][sample]``, two a microbatch unless the case says otherwise."""
    import torch

    generator = torch.Generator().manual_seed(7)
    grids = case.grids or {
        # two of four microbatches mix text and pictures, one has no picture, and one has them in both samples
        "mixed": [(), ((1, 4, 6),), ((1, 6, 10), (1, 2, 4)), (), (), (), ((1, 8, 4),), ((1, 4, 4), (1, 4, 6))],
        "mixed, longer": [(), ((1, 4, 6),), ((1, 6, 10), (1, 2, 4)), (), (), (), ((1, 8, 4),), (), ((1, 2, 2),),
                          ((1, 4, 4), (1, 4, 6)), (), ((1, 10, 6),)],
        # one video alone, two, and between pictures
        "video": [((3, 4, 6),), (), ((1, 4, 4), (2, 6, 10), (1, 2, 4)), ((2, 4, 4), (4, 2, 2)), (), ((5, 6, 4),)],
        "text": [()] * 8,
        "three samples": [((1, 4, 6),), (), ((1, 6, 10), (1, 2, 4))],
        "no targets": [(), ((1, 4, 6),)] * 3,
        "last without targets": [(), ((1, 4, 6),)] * 6,
        # rank 0 of two takes the first six samples
        "images on one rank": [(), ((1, 4, 6),), ((1, 6, 10), (1, 2, 4)), (), ((1, 4, 4),), ()] + [()] * 6,
    }[case.batch]
    samples = [random_sample(generator, grid, length)
               for grid, length in zip(grids, cycle(case.text_tokens), strict=False)]
    # the last microbatch of either of two ranks is the samples 4 and 5, 10 and 11
    without = {"no targets": range(6), "last without targets": (4, 5, 10, 11)}.get(case.batch, ())
    for index in without:
        samples[index].is_target[:] = False
    size = case.micro_batch_size
    microbatches = [samples[start : start + size] for start in range(0, len(samples), size)]
    assert len(microbatches) % case.dp == 0, "some would be left out"
    per_rank = len(microbatches) // case.dp
    return [microbatches[rank * per_rank : (rank + 1) * per_rank] for rank in range(case.dp)]
