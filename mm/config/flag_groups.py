"""How ``--help`` divides the flags: those that every run needs first, the others by what they are about."""

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

_ASK_GROUPS: Mapping[str, str] = {
    "load": "The model",
    "device": "Machines",
    "media_roots": "Files of questions",
    "image_min_pixels": "Images and videos",
    "max_new_tokens": "How tokens are chosen",
}
GENERATE_FIRST = ("load", "prompt", "image", "video", "chat", "prompts", "output", "bf16",
                  "tensor_model_parallel_size", "max_new_tokens")  # fmt: skip
GENERATE_GROUPS = {**_ASK_GROUPS, "prompt": "The question"}
EVALUATE_FIRST = ("load", "questions", "benchmark", "rule", "output", "max_questions", "bf16", "batch_size",
                  "tensor_model_parallel_size", "max_new_tokens")  # fmt: skip
EVALUATE_GROUPS = {**_ASK_GROUPS, "questions": "Results"}
