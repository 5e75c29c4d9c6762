"""Checks a run's files and directories before any device or process group is touched.

``mm.config.run`` has already checked the flags and JSON files, and that what they name exists; in a dry run, missing
files are only notes.  One rank checks, and hands what it has opened to the start.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from mm.checkpoint.adapters import base_notes, check_base, holds_adapters
from mm.checkpoint.convert import check_target
from mm.checkpoint.directories import LATEST_FILE
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.hf_config import hf_problems
from mm.checkpoint.source import Kind
from mm.config.command_line import flag_name
from mm.config.data import dataset_files
from mm.config.evaluate import evaluating_in_training
from mm.config.rules import step_problems
from mm.config.run import Run
from mm.console import Progress
from mm.data.encode import image_processor
from mm.data.index.dataset import Dataset, Split, TrainedOn, datasets, notes_of
from mm.data.index.index import Measure
from mm.data.loader.quarantine import too_many_bad
from mm.data.sample import Image
from mm.data.sampler.sampler import order_description
from mm.errors import UserError, collected, counted
from mm.files import folder_problems
from mm.generation.prompts import encoder_for_prompts
from mm.run.schedule import scheduled, with_steps
from mm.run.sources import Checked, Questions, Samples, Sources, open_start, save_problems
from mm.run.watch.trackers import tracker_problems
from mm.scoring.questions import read_items
from mm.weights.trained import adapter_problems, feature_cache_problems, freeze_problems, group_problems, lacks_adapters

_NUM_COMPARED = 100
"""Number of samples whose image sizes are compared for the note."""


def check(run: Run) -> Checked:
    """Open what the run reads, decide its steps and learning rates, and find everything that would stop it.

    It reads only the headers of weights, and the tensors for the checksum of adapters' base model.  It builds
    the index of the samples, which takes minutes for a million of them, or seconds if the index exists.  It reads only
    the headers of images, but decodes those of questions, because one that fails later would end the training.
    """
    start_problems, encoder_problems, sample_problems, question_problems = (list[str]() for _ in range(4))
    checked, measure = Checked(run), None
    with collected(start_problems):
        if _can_open_start(run):
            checked.sources = open_start(run)
    with collected(encoder_problems):
        if os.path.isdir(run.data.model_name_or_path):
            measure = Measure.from_config(run.data, run.model, run.args.seq_length)
    sample_notes = list[str]()
    splits = _sample_splits(run, measure, checked.sources, sample_problems, sample_notes)
    if measure is not None and "training" in splits:
        checked.samples = Samples(measure, splits)
        _count_steps(checked, splits["training"], sample_problems, sample_notes)
    checked.problems += _file_problems(checked, start_problems, encoder_problems)
    checked.problems += sample_problems
    checked.notes += sample_notes
    checked.questions = _open_questions(run, measure, question_problems, checked.notes)
    checked.problems += question_problems
    return checked


def _count_steps(checked: Checked, dataset: Dataset, problems: list[str], notes: list[str]) -> None:
    """Give the run the number of steps that its epochs take, which stays 0 if the checkpoint could not be opened."""
    run, sources = checked.run, checked.sources
    if run.args.num_train_epochs is None or (sources is None and not run.args.finetune):
        return
    with collected([]):  # reported with the samples
        checked.run = run = with_steps(run, sources and sources.trained(run), dataset, notes)
        problems.extend(step_problems(run.args))


def _can_open_start(run: Run) -> bool:
    """Whether ``open_start`` makes sense.  It does not if a directory is missing, or if ``--load`` holds adapters and
    the targets of this run match no layer; both are reported elsewhere."""
    args = run.args
    return all(path is None or os.path.isdir(path) for path in (args.load, args.load_base_model)) and not (
        lacks_adapters(run.model) and args.load is not None and holds_adapters(args.load))


def _file_problems(checked: Checked, start_problems: list[str], encoder_problems: list[str]) -> list[str]:
    """Problems of weights, tokenizer, processor, output directories, and patterns of weight names.  ``start_problems``
    and ``encoder_problems`` were found while opening the weights, and tokenizer and processor."""
    run, sources = checked.run, checked.sources
    args, base = run.args, run.data.model_name_or_path
    problems = list(_other_models(run, sources))
    if not problems:  # with another model, everything else would fail as well
        problems += start_problems
        with collected(problems):
            if sources is not None:
                _check_start(checked, sources, problems)
        problems += encoder_problems
        for flag in ("export_hf", "export_merged_hf"):
            if (target := getattr(args, flag)) is not None and os.path.isdir(base):
                problems += _export_problems(run, Path(base), Path(target).resolve(), flag_name(flag),
                                             _only_exports(run, sources))
    with collected(problems):
        problems.extend(_output_problems(run))
    if args.vision_feature_cache is not None:
        problems += feature_cache_problems(run.model)
    return [*problems, *freeze_problems(run.model), *adapter_problems(run.model), *group_problems(args, run.model)]


def _other_models(run: Run, sources: Sources | None) -> Iterator[str]:
    """How the given Hugging Face directories differ from the model JSON."""
    args, names_by_path = run.args, dict[str, list[str]]()
    for name, path in ((f"{args.mm_data}: model_name_or_path", run.data.model_name_or_path), ("--load", args.load),
                       ("--load-base-model", args.load_base_model)):
        if path is not None:
            names_by_path.setdefault(path, []).append(name)
    model = sources and sources.model
    compared = model.path if model and model.kind is Kind.HUGGING_FACE else None  # ``open_start`` has compared it
    for path, names in names_by_path.items():
        if Path(path) != compared:
            yield from (f"{' and '.join(names)}: {problem}" for problem in hf_problems(run.model, path, args.mm_model))


def _check_start(checked: Checked, sources: Sources, problems: list[str]) -> None:
    """Compare what the run starts from with the settings, and decide its learning-rate schedule.  Raises UserError for
    another base model or schedule."""
    run = checked.run
    if sources.adapters is not None and sources.model is not None:
        checked.notes.extend(base_notes(sources.adapters, sources.model))
        if sources.adapters.base_crc32 is not None:
            check_base(sources.adapters, sources.model, "--load-base-model")
    problems.extend(save_problems(run, sources))
    if run.args.train_iters:  # 0 if the steps of the epochs could not be counted
        checked.run, checked.schedule, notes = scheduled(run, sources.trained(run))
        checked.notes.extend(notes)


def _sample_splits(
    run: Run, measure: Measure | None, sources: Sources | None, problems: list[str], notes: list[str]
) -> Mapping[Split, Dataset]:
    """Open and check the samples for training and validation.  A resumed run must have the samples of its checkpoint.
    Without ``measure``, because tokenizer or processor cannot be read, only the form of the records is checked."""
    if not _has_samples(run):
        return {}
    splits = datasets(run.data, problems, run.args.bad_sample == "skip", measure, run.args.seed)
    notes += [*notes_of(splits), *_bad_notes(run, splits, problems)]
    if (dataset := splits.get("training")) is None:
        return splits
    with collected(problems):
        if len(dataset) < run.global_batch_size:
            notes.append(f"there are only {counted(len(dataset), 'sample')} for the {run.global_batch_size} of one "
                         f"step: each step repeats some")
        if measure is not None:
            notes += [*_image_notes(run, dataset, measure), *_data_notes(run, dataset, sources)]
    return splits


def _bad_notes(run: Run, splits: Mapping[Split, Dataset], problems: list[str]) -> Iterator[str]:
    """How many samples ``--bad-sample skip`` leaves out; adds to ``problems`` if training would refuse so many."""
    for name, dataset in splits.items():
        num_bad, num_samples = len(dataset.skipped), len(dataset) + len(dataset.skipped)
        if not num_bad or (name == "validation" and run.data.val_dataset is None):  # else counted with the training's
            continue
        yield f"{num_bad} of {num_samples} samples for {name} cannot be used and are left out (--bad-sample skip)"
        problem = too_many_bad(num_bad, num_samples, run.args.max_bad_fraction)
        if problem is not None:
            problems.append(f"{name}: {problem}: fix or remove them, or allow more.  'mm-data check' lists them; the "
                            f"first: {dataset.skipped[0].message()}")


def _open_questions(run: Run, measure: Measure | None, problems: list[str], notes: list[str]) -> Questions | None:
    """Open and encode the questions for the model in training, with their images.  Without ``measure``, as tokenizer
    or processor cannot be read, only the file of questions is checked."""
    path = run.args.eval_generate_questions
    if path is None or not os.path.isfile(path) or not os.path.isdir(run.data.model_name_or_path):
        return None
    asked = evaluating_in_training(run.args, run.data, run.world_size)
    with collected(problems):
        items = read_items(asked)
        notes.extend(items.notes)
        if measure is None:
            return None
        assert asked.asking.media_config(run.data.model_name_or_path) == run.data, "one encoder suits both"
        encoder = encoder_for_prompts(measure.encoder, run.model)
        shown = Progress("checking questions", len(items.items), "questions")
        for item in shown.each(items.items):
            with collected(problems):
                encoder.encode_prompt(item.sample)
        return Questions(items, encoder)
    return None


def _has_samples(run: Run) -> bool:
    """Whether all files and directories that the samples need exist."""
    missing: list[str] = []
    with collected(missing):
        dataset_files(run.data, "dataset")
        dataset_files(run.data, "val_dataset")
    return not missing and all(os.path.isdir(path) for path in (run.data.dataset_dir, run.data.model_name_or_path))


def _data_notes(run: Run, dataset: Dataset, sources: Sources | None) -> list[str]:
    """Notes on how the data have changed since the checkpoint in ``--load``.  Raises UserError unless
    ``--allow-new-data`` is given."""
    trained = sources and sources.trained(run)
    data = trained and trained.manifest and trained.manifest.data
    if trained is None or data is None or run.args.finetune:
        return []
    then, now = TrainedOn.from_json(data, trained.path), dataset.fingerprints()
    then.followed_by(now, order_description(run), 0, run.args.allow_new_data)
    return [f"--allow-new-data: {change}; training goes on with the first sample"
            for change in then.changes(now, order_description(run))]


def _image_notes(run: Run, dataset: Dataset, measure: Measure) -> list[str]:
    """A note on the first image that LLaMA-Factory, and so MindSpeed-MM, would resize to another size."""
    if run.data.image_resize is not None:
        return []
    processors = measure.encoder.images, image_processor(run.data, "llamafactory")
    for index in range(min(len(dataset), _NUM_COMPARED)):
        for path in (item.path for item in dataset[index].media if isinstance(item, Image)):
            here, there = (math.prod(images.plan(path).grid) // images.merge_size**2 for images in processors)
            if here != there:
                return [
                    f"{path} becomes {here} tokens, as in transformers.  LLaMA-Factory and MindSpeed-MM first "
                    f"bring it within image_max_pixels, which makes {there}: add \"image_resize\": \"llamafactory\" "
                    f"to the preprocess_parameters of {run.args.mm_data} for that, or \"transformers\" to keep this"
                ]
    return []


def _only_exports(run: Run, sources: Sources | None) -> bool:
    """Whether ``--load`` is the run's last checkpoint: the run was killed in its export or after, so only that is left.
    """
    trained = sources and sources.trained(run)
    if not trained or run.args.finetune or not run.args.train_iters:
        return False
    return trained.iteration is not None and trained.iteration >= run.args.train_iters


def _export_problems(run: Run, base: Path, target: Path, flag: str, may_exist: bool) -> list[str]:
    """Problems with the base of the export, unless ``--load`` is the same directory, and with ``target``.
    ``may_exist``: the export itself compares an existing target with the weights, and leaves an identical one alone."""
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
        check_target(target, num_bytes=0, hint=None if may_exist else "")
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
               f"replace them in {LATEST_FILE}: give another directory")
    yield from tracker_problems(args)
