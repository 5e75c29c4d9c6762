"""Rules and notes on the division of samples into microbatches together with the unit of the loss."""

from collections.abc import Iterator

from mm.config.args import Arguments
from mm.config.data import DataConfig
from mm.config.notes import NoEffect


def loss_problems(args: Arguments, data: DataConfig) -> Iterator[str]:
    """With the mean over microbatches, a token's weight depends on its microbatch, which must not depend on the layout.

    Means over tokens and over samples do not depend on the division of the global batch.
    """
    if args.loss_unit == "microbatch" and (why := _deals_by_layout(args, data)):
        yield (f"--calculate-per-microbatch-loss is given, but {why} in {args.mm_data} decides which samples share a "
               f"microbatch, so a sample's weight would depend on the number of ranks; use --calculate-per-sample-loss "
               f"or --calculate-per-token-loss")


def sampling_notes(args: Arguments, data: DataConfig) -> Iterator[str]:
    """Differences from MindSpeed-MM, and settings without effect."""
    if not (args.calculate_per_token_loss or args.calculate_per_sample_loss or args.calculate_per_microbatch_loss):
        why = _deals_by_layout(args, data)
        advice = f"with {why} that would depend on the number of ranks" if why else (
            "add --calculate-per-microbatch-loss for that, or --calculate-per-token-loss to confirm this")
        yield (f"loss: every target token of the global batch has the same weight.  MindSpeed-MM averages over each "
               f"microbatch, then over the microbatches: {advice}")
    if data.packs and data.truncation is None:
        yield (f"{args.mm_data}: packing fills each microbatch with whole samples, up to --seq-length x "
               f"--micro-batch-size = {args.seq_length * args.micro_batch_size} tokens; --global-batch-size counts "
               f"samples, not packs as in MindSpeed-MM.  Samples longer than --seq-length lose whole turns; set "
               f"\"truncation\" in basic_parameters to \"turns\" to confirm this, or to \"tokens\" to cut them as "
               f"MindSpeed-MM does without packing")
    if data.priority_mode != "data_bucketing_img" and data.sampler_type != "BucketBatchSampler":
        yield NoEffect(["priority_mode"], "it affects the BucketBatchSampler only", args.mm_data)


def _deals_by_layout(args: Arguments, data: DataConfig) -> str:
    """The setting that makes the samples of a microbatch depend on the layout; empty if there is none.

    With one sample per microbatch the distribution over ranks does not matter.
    """
    if data.packs:
        return "packing"
    return f"sampler_type {data.sampler_type!r}" if data.is_balanced and args.micro_batch_size > 1 else ""
