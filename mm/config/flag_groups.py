"""How ``--help`` divides the flags of a run: those that every run needs first, the others by what they are about."""

from collections.abc import Mapping

FIRST = ("mm_model", "mm_data", "load", "save", "export_hf", "train_iters", "lr", "micro_batch_size",
         "global_batch_size", "seq_length")  # fmt: skip
"""Flags that stand first."""
GROUPS: Mapping[str, str] = {
    "mm_model": "Files",
    "device": "Machines",
    "micro_batch_size": "Batches and steps",
    "eval_interval": "Validation: of val_dataset or val_rate in the data JSON",
    "freeze_modules": "What is trained",
    "lr": "Optimizer (Adam)",
    "bf16": "Precision",
    "recompute_granularity": "Memory",
    "finetune": "Checkpoints",
    "log_interval": "Reports",
}
"""The first field of each group -> the title that stands above it in ``mm.config.flags``."""
