"""What is wrong with the files and directories of a run, found before any device or process group is touched.

The flags and JSON files themselves, and files that are missing, are checked before in ``mm.config.run``.  One rank, or
none, calls it.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from mm.config.command_line import flag_name
from mm.config.evaluate import evaluating_in_training
from mm.config.outputs import folder_problems
from mm.config.run import Run
from mm.config.sources import training_sources, validation_sources
from mm.conversion.adapters import base_notes, check_base, holds_adapters
from mm.conversion.convert import check_target
from mm.data.encode.encoder import SampleEncoder, image_processor
from mm.data.feed.quarantine import too_many_bad
from mm.data.index.contents import TrainedOn
from mm.data.index.dataset import Dataset, Part, datasets, notes_of
from mm.data.index.gauge import Gauge
from mm.data.order.sampler import told_order
from mm.data.sample import Image
from mm.errors import UserError, collected
from mm.formats.hf import HFDirectory
from mm.formats.hf_config import hf_problems
from mm.formats.source import Kind, find_kind
from mm.formats.training import LATEST_FILE, Manifest, find_checkpoint
from mm.scoring.questions import read_items
from mm.training.saves import save_problems
from mm.training.schedule import scheduled
from mm.training.sources import open_start
from mm.training.trackers import tracker_problems
from mm.weights.groups import group_problems
from mm.weights.lora import adapter_problems
from mm.weights.trained import feature_cache_problems, freeze_problems, lacks_adapters

_NUM_COMPARED = 100
"""Samples whose pictures are looked at for the note on sizes."""


def file_problems(run: Run, notes: list[str]) -> list[str]:
    """Problems of weights and patterns of their names, tokenizer, processor and output directories; adds to ``notes``
    that adapters may be of another model.

    Reads headers only, and of the model beside adapters what its checksum is made of, so it takes seconds.
    """
    args, base, problems = run.args, run.data.model_name_or_path, []
    named_by: dict[str | None, str] = {}
    for name, path in ((f"{args.mm_data}: model_name_or_path", base), ("--load", args.load),
                       ("--load-base-model", args.load_base_model)):
        named_by[path] = f"{named_by[path]} and {name}" if path in named_by else name
    for path, names in named_by.items():
        if path is not None:
            problems += [f"{names}: {problem}" for problem in hf_problems(run.model, path, args.mm_model)]
    if not problems:  # nothing fits another model
        with collected(problems):
            if all(path is None or Path(path).is_dir() for path in (args.load, args.load_base_model)) and not (
                    lacks_adapters(run.model) and args.load is not None and holds_adapters(args.load)):
                start = open_start(run)  # adapters fit no model whose own targets are wrong, which is told below
                if start.adapters is not None and start.model is not None:
                    notes += base_notes(start.adapters, start.model)
                    if start.adapters.base_crc32 is not None:
                        check_base(start.adapters, start.model)
                problems += save_problems(run, start)
                if args.train_iters:  # else nothing says yet how long the schedule is, because of another problem
                    scheduled(run, start)
        with collected(problems):
            if Path(base).is_dir():
                SampleEncoder.from_config(run.data, run.model, args.seq_length)
        for flag in ("export_hf", "export_merged_hf"):
            if (target := getattr(args, flag)) is not None and Path(base).is_dir():
                problems += _export_problems(run, Path(base), Path(target).resolve(), flag_name(flag))
    with collected(problems):
        problems.extend(_output_problems(run))
    if args.vision_feature_cache is not None:
        problems += feature_cache_problems(run.model)
    return [*problems, *freeze_problems(run.model), *adapter_problems(run.model), *group_problems(args, run.model)]


def sample_problems(run: Run, notes: list[str]) -> list[str]:
    """Problems of the samples, those for validation too; adds to ``notes`` what is strange in good ones.

    It is a problem, too, when they are not those of the checkpoint from which training goes on.

    Makes the index of the samples, which takes minutes for a million of them; where it is there, it takes seconds.  Of
    pictures it reads headers.  Where tokenizer or processor cannot be read, which is another problem, only the form of
    the records is checked.
    """
    problems: list[str] = []
    if not _has_samples(run):
        return problems
    skips_bad, gauge = run.args.bad_sample == "skip", None
    with collected([]):
        gauge = Gauge.from_config(run.data, run.model, run.args.seq_length)
    parts = datasets(run.data, problems, skips_bad, gauge, run.args.seed)
    notes += [*notes_of(parts), *_bad_notes(run, parts, problems)]
    if (dataset := parts.get("training")) is None:
        return problems
    with collected(problems):
        if len(dataset) < run.global_batch_size:
            notes.append(f"{len(dataset)} samples are fewer than the {run.global_batch_size} of one step: each step "
                         f"repeats some")
        notes += [*_picture_notes(run, dataset), *_data_notes(run, dataset)] if gauge is not None else []
    return problems


def _bad_notes(run: Run, parts: Mapping[Part, Dataset], problems: list[str]) -> Iterator[str]:
    """How many samples ``--bad-sample skip`` leaves out; adds to ``problems`` where training would refuse so many."""
    for name, dataset in parts.items():
        num_bad, num_samples = len(dataset.skipped), len(dataset) + len(dataset.skipped)
        if not num_bad or (name == "validation" and run.data.val_dataset is None):  # else counted with the training's
            continue
        yield f"{num_bad} of {num_samples} samples for {name} cannot be used and are left out (--bad-sample skip)"
        problem = too_many_bad(num_bad, num_samples, run.args.max_bad_fraction)
        if problem is not None:
            problems.append(f"{name}: {problem}: mend or remove them, or allow more.  'mm-data check' lists them; the "
                            f"first: {dataset.skipped[0].told()}")


def question_problems(run: Run, notes: list[str]) -> list[str]:
    """Everything that keeps the questions for the model in training from being asked or scored; adds to ``notes`` what
    is strange in their file.

    Reads all their pictures: of a small set it takes seconds, and one that fails later ends the training.
    """
    problems: list[str] = []
    path, num_positions = run.args.eval_generate_questions, run.model.language.max_position_embeddings
    if path is None or not Path(path).is_file() or not Path(run.data.model_name_or_path).is_dir():
        return problems  # what is not there is another problem
    asked = evaluating_in_training(run.args, run.data, run.world_size)
    with collected(problems), TemporaryDirectory() as folder:
        items = read_items(asked)
        notes += items.notes
        media = asked.asking.media_config(run.data.model_name_or_path)
        encoder = SampleEncoder.from_config(media, run.model, num_positions)
        for _, sample, _ in items.as_prompts(Path(folder)):
            with collected(problems):
                encoder.encode_prompt(sample)
    return problems


def _has_samples(run: Run) -> bool:
    """Whether the files are there; where they are not, that is another problem."""
    missing: list[str] = []
    with collected(missing):
        training_sources(run.data)
        validation_sources(run.data)
    return not missing and all(Path(path).is_dir() for path in (run.data.dataset_dir, run.data.model_name_or_path))


def _data_notes(run: Run, dataset: Dataset) -> list[str]:
    """What has changed since the checkpoint ``--load``.  Raises UserError unless it may."""
    args, data = run.args, None
    with collected([]):  # what is wrong with the checkpoint is another problem
        if args.load is not None and not args.finetune and find_kind(args.load) is Kind.TRAINING:
            data = Manifest.read(find_checkpoint(args.load)[0]).data
    if data is None:
        return []
    then, now = TrainedOn.from_json(data), dataset.contents()
    then.followed_by(now, told_order(run), 0, args.allow_new_data)
    return [f"--allow-new-data: {change}; training goes on with the first sample"
            for change in then.changes(now, told_order(run))]


def _picture_notes(run: Run, dataset: Dataset) -> list[str]:
    """The first picture of the first samples that LLaMA-Factory, and so MindSpeed-MM, makes another size of."""
    if run.data.image_resize is not None:
        return []
    ours, theirs = image_processor(run.data), image_processor(run.data, "llamafactory")
    for index in range(min(len(dataset), _NUM_COMPARED)):
        for path in (part.path for part in dataset[index].media if isinstance(part, Image)):
            sizes = [math.prod(images.image_grid(path)) // images.merge_size**2 for images in (ours, theirs)]
            if sizes[0] != sizes[1]:
                return [
                    f"{path} becomes {sizes[0]} tokens, as in transformers.  LLaMA-Factory and MindSpeed-MM first "
                    f"bring it within image_max_pixels, which makes {sizes[1]}: add \"image_resize\": \"llamafactory\" "
                    f"to the preprocess_parameters of {run.args.mm_data} for that, or \"transformers\" to keep this"
                ]
    return []


def _export_problems(run: Run, base: Path, target: Path, flag: str) -> list[str]:
    """Problems of the base of the export, unless ``--load`` gives it too, and of the target, which ``flag`` gives."""
    problems: list[str] = []
    resolved = base.resolve()
    if run.args.load is None or Path(run.args.load).resolve() != resolved:
        with collected(problems):
            HFDirectory.open(base, weights_required=False).check(run.model.base)
    if flag == "--export-merged-hf" and run.args.load is None and run.args.load_base_model is None:
        problems.append(f"{flag} is {run.args.export_merged_hf!r}, but the weights beside the adapters are random, and "
                        f"no directory holds them; give --load-base-model")
    with collected(problems, f"{flag}: "):
        if resolved.is_relative_to(target):
            raise UserError(f"The target {target} is or contains the base directory {resolved}; give another target.")
        check_target(target, num_bytes=0)
    return problems


def _output_problems(run: Run) -> Iterator[str]:
    args = run.args
    directories = {"--save": args.save, "--log-dir": args.log_dir, "--tensorboard-dir": args.tensorboard_dir,
                   "--wandb-save-dir": args.wandb_save_dir, "--swanlab-save-dir": args.swanlab_save_dir,
                   "--vision-feature-cache": args.vision_feature_cache}
    for flag, path in directories.items():
        if path is not None:
            yield from folder_problems(flag, path)
    if args.save is not None and any(Path(args.save).glob("*/mp_rank_*")):
        yield (f"--save is {args.save!r}, which holds weights in MindSpeed-MM's layout; a checkpoint beside them would "
               f"take the place of what {LATEST_FILE} names: give another directory")
    yield from tracker_problems(args)
