"""What the flags of LLaMA-Factory, ms-swift, transformers and Qwen's own trainer are called here.

The pages ``docs/coming-from-*.md`` explain them; a test compares both.
"""

from collections.abc import Mapping


def _same(answer: str, words: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), answer)


_DATA, _MODEL = "in the data JSON", "in the model JSON"
_PIXELS = f"image_max_pixels and image_min_pixels {_DATA}"
_BATCH = "--global-batch-size, which counts the samples of a step over all ranks"

ELSEWHERE: Mapping[str, str] = {
    **_same(f"--load, and model_name_or_path {_DATA}", "--model --model-name-or-path"),
    **_same(f"dataset and dataset_dir {_DATA}",
            "--dataset --data --data-path --dataset-use --dataset-dir --media-dir --image-folder"),
    **_same(f"val_dataset or val_rate {_DATA}, and --eval-interval",
            "--val-dataset --val-data --eval-dataset --val-size --split-dataset-ratio"),
    **_same("--eval-interval", "--eval-steps --eval-strategy --evaluation-strategy"),
    **_same("--seq-length", "--cutoff-len --max-length --model-max-length --max-seq-length"),
    "--truncation-strategy": f"truncation {_DATA}",
    **_same(f"packing {_DATA}", "--packing --neat-packing --data-flatten --data-packing"),
    **_same(f"train_on_prompt, mask_history or max_samples {_DATA}", "--train-on-prompt --mask-history --max-samples"),
    **_same(_PIXELS, "--image-max-pixels --image-min-pixels --max-pixels --min-pixels"),
    **_same("--micro-batch-size", "--per-device-train-batch-size --train-micro-batch-size-per-gpu --batch-size"),
    **_same(_BATCH, "--gradient-accumulation-steps --train-batch-size"),
    **_same("--num-train-epochs", "--epochs --num-epochs"),
    **_same("--train-iters", "--max-steps --steps"),
    "--learning-rate": "--lr",
    "--lr-scheduler-type": "--lr-decay-style",
    **_same("--lr-warmup-fraction", "--warmup-ratio --warmup"),
    "--warmup-steps": "--lr-warmup-iters",
    "--max-grad-norm": "--clip-grad",
    **_same("--adam-beta1 and --adam-beta2", "--adam-betas"),
    "--adam-epsilon": "--adam-eps",
    **_same("--vision-tower-lr", "--vit-lr"),
    **_same("--mm-projector-lr", "--aligner-lr"),
    "--optim": "always Adam",
    "--torch-dtype": "--bf16 or --fp16; fp32 without either",
    **_same("--data-parallel-sharding-strategy optim, optim_grads (ZeRO-2) or optim_grads_params (ZeRO-3)",
            "--deepspeed --fsdp --fsdp-config --zero-stage"),
    **_same("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "--gradient-checkpointing --gradient-checkpointing-kwargs --vit-gradient-checkpointing"),
    **_same(f"freeze of vision_encoder, vision_projector and text_decoder {_MODEL}",
            "--freeze --freeze-vit --freeze-aligner --freeze-llm --freeze-vision-tower --freeze-multi-modal-projector "
            "--freeze-language-model --tune-mm-vision --tune-mm-mlp --tune-mm-llm"),
    **_same("--freeze-modules and --trainable-modules",
            "--freeze-parameters --trainable-parameters --freeze-trainable-modules --freeze-extra-modules"),
    "--freeze-trainable-layers": f"freeze_layers {_MODEL}, which lists the layers to freeze",
    **_same("--lora-target-modules for adapters; without it everything that is not frozen is trained",
            "--train-type --tuner-type --finetuning-type --lora-enable --use-peft"),
    **_same("--lora-target-modules", "--target-modules --lora-target"),
    **_same("--lora-r", "--lora-rank --lora"),
    "--use-rslora": "--lora-use-rslora",
    **_same("--load with a PEFT directory", "--adapters --adapter-name-or-path"),
    **_same("--export-merged-hf", "--merge-lora --export-dir"),
    **_same("--save, and --export-hf for a Hugging Face directory", "--output-dir --output"),
    "--save-steps": "--save-interval",
    "--save-total-limit": "--keep-last-checkpoints",
    **_same("--save-interval with a number of steps", "--save-strategy"),
    "--save-only-model": "--no-save-optim",
    "--load-best-model-at-end": "--save-best",
    "--resume-from-checkpoint": "--load and --save with the same directory",
    "--logging-steps": "--log-interval",
    "--logging-dir": "--log-dir",
    **_same("--num-workers", "--dataloader-num-workers"),
    "--preprocessing-num-workers": f"preprocessing_num_workers {_DATA}",
    **_same("--tensorboard-dir, --wandb-project or --swanlab-project", "--report-to --use-swanlab"),
    "--run-name": "--wandb-exp-name",
    "--ddp-timeout": "--distributed-timeout-minutes",
    **_same("the chat template of the checkpoint; leave it out", "--template --model-type"),
    **_same(f"video_fps, video_maxlen and video_max_pixels {_DATA}", "--video-fps --video-maxlen --video-max-pixels"),
    **_same(f"pipeline_num_layers of both towers {_MODEL}", "--pp-size --pipeline-parallel-size"),
    **_same("--tensor-model-parallel-size", "--tp-size --tensor-parallel --tensor-parallel-size"),
    **_same("--context-parallel-size", "--sequence-parallel-size --cp-size --ulysses-degree"),
}
"""Flag with hyphens -> what to write here."""


def here(flag: str) -> str | None:
    """What ``flag`` of another trainer is called here, with hyphens or underscores; None if it is not known."""
    return ELSEWHERE.get(flag.replace("_", "-"))
