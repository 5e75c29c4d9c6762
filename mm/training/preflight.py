"""The check of a run's files and directories, before any device or process group is touched.

``mm.config.run`` has checked the flags and JSON files themselves before, and which files are missing.  One rank checks,
or none; what it has opened goes on to the start.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mm.config.command_line import flag_name
from mm.config.evaluate import evaluating_in_training
from mm.config.flags import step_problems
from mm.config.outputs import folder_problems
from mm.config.run import Run
from mm.config.sources import training_sources, validation_sources
from mm.conversion.adapters import base_notes, check_base, holds_adapters
from mm.conversion.convert import check_target
from mm.data.encode.encoder import SampleEncoder, image_processor
from mm.data.feed.quarantine import too_many_bad
from mm.data.index.contents import TrainedOn
from mm.data.index.dataset import Dataset, datasets, notes_of
from mm.data.index.gauge import Gauge
from mm.data.index.sample_files import Part
from mm.data.order.sampler import order_description
from mm.data.sample import Image
from mm.errors import UserError, collected
from mm.formats.hf import HFDirectory
from mm.formats.hf_config import hf_problems
from mm.formats.source import Kind, find_kind
from mm.formats.training import LATEST_FILE, Manifest, find_checkpoint
from mm.scoring.questions import read_items
from mm.training.epochs import with_steps
from mm.training.opened import Opened, Questions, Samples
from mm.training.saves import save_problems
from mm.training.schedule import scheduled
from mm.training.sources import Sources, open_start
from mm.training.trackers import tracker_problems
from mm.weights.groups import group_problems
from mm.weights.lora import adapter_problems
from mm.weights.trained import feature_cache_problems, freeze_problems, lacks_adapters

_NUM_COMPARED = 100
"""Samples whose pictures are looked at for the note on sizes."""


@dataclass(frozen=True)
class Found:
    """What is wrong, and what is strange, in some of a run's files."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Checked:
    """What the check of a run's files has opened and found."""

    run: Run
    """The run with the number of steps of its epochs."""
    opened: Opened
    """For the start.  Where there are problems, some of it is missing."""
    files: Found
    """In weights and patterns of their names, tokenizer, processor and output directories."""
    samples: Found
    """In the samples, those for validation too, and in what they are compared with."""
    questions: Found
    """In the questions for the model in training."""

    @property
    def problems(self) -> list[str]:
        """All problems."""
        return [*self.files.problems, *self.samples.problems, *self.questions.problems]

    @property
    def notes(self) -> list[str]:
        """All notes."""
        return [*self.files.notes, *self.samples.notes, *self.questions.notes]


def check(run: Run) -> Checked:
    """Open what the run reads, each thing once, and look for everything that stops the run.

    It reads headers of weights only, and of a model beside adapters what its checksum is made of.  It makes the index
    of the samples, which takes minutes for a million of them; where the index is there, it takes seconds.  It reads
    the headers of pictures, but the whole pictures of questions: one that fails later would end the training.
    """
    files, samples, questions = Found(), Found(), Found()
    of_start: list[str] = []
    of_encoder: list[str] = []
    sources = gauge = None
    with collected(of_start):
        if _may_start(run):
            sources = open_start(run)
    with collected(of_encoder):
        if Path(run.data.model_name_or_path).is_dir():
            gauge = Gauge.from_config(run.data, run.model, run.args.seq_length)
    parts = _sample_parts(run, gauge, sources, samples)
    opened = Opened(sources, Samples(gauge, parts) if gauge is not None and "training" in parts else None)
    run = with_steps(run, opened, samples.notes)
    if run.args.num_train_epochs and run.args.train_iters:
        samples.problems.extend(step_problems(run.args))
    _check_files(run, opened, of_start, of_encoder, files)
    return Checked(run, replace(opened, questions=_open_questions(run, questions)), files, samples, questions)


def _may_start(run: Run) -> bool:
    """Whether the directories are there, and the model has adapters where ``--load`` does: those fit no model whose own
    targets are wrong.  Both are told as other problems."""
    args = run.args
    return all(path is None or Path(path).is_dir() for path in (args.load, args.load_base_model)) and not (
        lacks_adapters(run.model) and args.load is not None and holds_adapters(args.load))


def _check_files(run: Run, opened: Opened, of_start: list[str], of_encoder: list[str], found: Found) -> None:
    """Look at weights, tokenizer, processor and output directories; ``of_start`` and ``of_encoder`` are the problems in
    opening them."""
    args, base, problems, sources = run.args, run.data.model_name_or_path, found.problems, opened.sources
    problems += _other_models(run, sources)
    if not problems:  # nothing fits another model
        problems += of_start
        with collected(problems):
            if sources is not None:
                _check_start(run, sources, found)
        problems += of_encoder
        for flag in ("export_hf", "export_merged_hf"):
            if (target := getattr(args, flag)) is not None and Path(base).is_dir():
                problems += _export_problems(run, Path(base), Path(target).resolve(), flag_name(flag))
    with collected(problems):
        problems.extend(_output_problems(run))
    if args.vision_feature_cache is not None:
        problems += feature_cache_problems(run.model)
    problems += [*freeze_problems(run.model), *adapter_problems(run.model), *group_problems(args, run.model)]


def _other_models(run: Run, sources: Sources | None) -> Iterator[str]:
    """How the Hugging Face directories that are named differ from the model JSON."""
    args, named_by = run.args, dict[str | None, str]()
    for name, path in ((f"{args.mm_data}: model_name_or_path", run.data.model_name_or_path), ("--load", args.load),
                       ("--load-base-model", args.load_base_model)):
        named_by[path] = f"{named_by[path]} and {name}" if path in named_by else name
    compared = [] if sources is None else [
        one.path for one in (sources.model, sources.adapters) if one is not None and one.kind is Kind.HUGGING_FACE]
    for path, names in named_by.items():
        if path is not None and Path(path) not in compared:
            yield from (f"{names}: {problem}" for problem in hf_problems(run.model, path, args.mm_model))


def _check_start(run: Run, sources: Sources, found: Found) -> None:
    """Compare what the run starts from with the settings.  Raises UserError with the first mistake of some kinds."""
    if sources.adapters is not None and sources.model is not None:
        found.notes.extend(base_notes(sources.adapters, sources.model))
        if sources.adapters.base_crc32 is not None:
            check_base(sources.adapters, sources.model)
    found.problems.extend(save_problems(run, sources))
    if run.args.train_iters:  # else nothing says yet how long the schedule is, because of another problem
        scheduled(run, sources)


def _sample_parts(
    run: Run, gauge: Gauge | None, sources: Sources | None, found: Found
) -> Mapping[Part, Dataset]:
    """Open and check the samples for training and for validation.

    It is a problem, too, if they are not those of the checkpoint from which training goes on.  Without ``gauge``, where
    tokenizer or processor cannot be read, only the form of the records is checked.
    """
    if not _has_samples(run):
        return {}
    problems, notes = found.problems, found.notes
    parts = datasets(run.data, problems, run.args.bad_sample == "skip", gauge, run.args.seed)
    notes += [*notes_of(parts), *_bad_notes(run, parts, problems)]
    if (dataset := parts.get("training")) is None:
        return parts
    with collected(problems):
        if len(dataset) < run.global_batch_size:
            notes.append(f"{len(dataset)} samples are fewer than the {run.global_batch_size} of one step: each step "
                         f"repeats some")
        if gauge is not None:
            notes += [*_picture_notes(run, dataset, gauge), *_data_notes(run, dataset, sources)]
    return parts


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
                            f"first: {dataset.skipped[0].message()}")


def _open_questions(run: Run, found: Found) -> Questions | None:
    """Open and encode the questions for the model in training, with their pictures."""
    path, num_positions = run.args.eval_generate_questions, run.model.language.max_position_embeddings
    if path is None or not Path(path).is_file() or not Path(run.data.model_name_or_path).is_dir():
        return None  # what is not there is another problem
    asked = evaluating_in_training(run.args, run.data, run.world_size)
    with collected(found.problems), TemporaryDirectory() as folder:
        items = read_items(asked)
        found.notes.extend(items.notes)
        media = asked.asking.media_config(run.data.model_name_or_path)
        encoder = SampleEncoder.from_config(media, run.model, num_positions)
        for _, sample, _ in items.as_prompts(Path(folder)):
            with collected(found.problems):
                encoder.encode_prompt(sample)
        return Questions(items, encoder)
    return None


def _has_samples(run: Run) -> bool:
    """Whether the files are there; where they are not, that is another problem."""
    missing: list[str] = []
    with collected(missing):
        training_sources(run.data)
        validation_sources(run.data)
    return not missing and all(Path(path).is_dir() for path in (run.data.dataset_dir, run.data.model_name_or_path))


def _data_notes(run: Run, dataset: Dataset, sources: Sources | None) -> list[str]:
    """What has changed since the checkpoint ``--load``.  Raises UserError unless it may."""
    args, data = run.args, None
    with collected([]):  # what is wrong with the checkpoint is another problem
        if args.load is not None and not args.finetune:
            # Of a checkpoint whose weights cannot be used, the data are compared all the same.
            opened = sources and (sources.adapters or sources.model)
            manifest = opened.manifest if opened else (
                Manifest.read(find_checkpoint(args.load)[0]) if find_kind(args.load) is Kind.TRAINING else None)
            data = manifest and manifest.data
    if data is None:
        return []
    then, now = TrainedOn.from_json(data), dataset.contents()
    then.followed_by(now, order_description(run), 0, args.allow_new_data)
    return [f"--allow-new-data: {change}; training goes on with the first sample"
            for change in then.changes(now, order_description(run))]


def _picture_notes(run: Run, dataset: Dataset, gauge: Gauge) -> list[str]:
    """The first picture of the first samples that LLaMA-Factory, and so MindSpeed-MM, makes another size of."""
    if run.data.image_resize is not None:
        return []
    ours, theirs = gauge.encoder.images, image_processor(run.data, "llamafactory")
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
