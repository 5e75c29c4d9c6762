"""Settings of ``mm-evaluate``: its flags, MindSpeed-MM's ``evaluate_*.json``, and an evaluation during training."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.args import Arguments, BenchmarkName, Rule
from mm.config.command_line import CommandLine
from mm.config.data import DataConfig
from mm.config.generate import (
    Asking,
    GenerationSettings,
    InferenceConfig,
    ModelArguments,
    other_flags,
    read_asking,
)
from mm.config.parse import FIRST, STRICT, Count, Excludes, Group
from mm.errors import nearest, refuse
from mm.families import TITLES
from mm.files import ANSWERS_FOLDER

PEER_NAMES: Mapping[str, BenchmarkName] = {
    "ai2d_test": "ai2d", "chartqa_test": "chartqa", "docvqa_val": "docvqa", "mmmu_dev_val": "mmmu"}
"""MindSpeed-MM's ``evaluation_dataset``, which are also the names of OpenCompass's files in lower case."""

_BENCHMARK_PIXELS = (1280 * 28 * 28, 16384 * 28 * 28)
"""Minimum and maximum pixels of an image: VLMEvalKit's for Qwen2.5-VL (vlmeval/config.py), and MindSpeed-MM's."""
_LIKELIEST = GenerationSettings(do_sample=False, repetition_penalty=1.0)
"""Replaces the checkpoint's sampling settings, which are for conversations: a score should not depend on chance."""
_LONGEST_NAME_BYTES = 100
"""``evaluation_model`` begins file names, which file systems limit to 255 bytes including dataset and suffix."""
_BENCHMARK_TOKENS = 2048
"""Longest answer: VLMEvalKit's (vlmeval/vlm/qwen2_vl/model.py)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateArguments(ModelArguments):
    """Everything on the command line."""

    questions: Annotated[str | None, FIRST, Group("Results")] = Field(None, description=(
        "OpenCompass's TSV file of --benchmark, or with --rule your own JSON, JSONL or Parquet file"))
    benchmark: Annotated[BenchmarkName | None, FIRST] = Field(None, description="benchmark that the questions are from")
    rule: Annotated[Rule | None, FIRST, Excludes("benchmark")] = Field(
        None, description="scoring rule for your own questions")
    output: Annotated[str | None, FIRST] = Field(None, description=(
        "directory of predictions, scores and report; an interrupted evaluation there is resumed"))
    max_questions: Annotated[Count | None, FIRST] = Field(
        None, description="number of questions to ask, from the start; absent = all")
    use_custom_prompt: bool = Field(False, description=(
        f"use VLMEvalKit's prompts for Qwen2-VL, as MindSpeed-MM does, instead of its default prompts, with which "
        f"{TITLES} is evaluated"))
    evaluation_model: str | None = Field(None, description=(
        "also write MindSpeed-MM's result files, under this name: NAME_DATASET.xlsx and so on"))


EVALUATE = CommandLine(
    "mm-evaluate", f"Score {TITLES} on a benchmark or on your own questions.", EvaluateArguments,
    "--load DIR --questions FILE --benchmark NAME | --rule NAME  --output DIR  [flags]", other_flags(EvaluateArguments))


@dataclass(frozen=True, config=STRICT)
class EvaluationConfig(InferenceConfig):
    """A model JSON, with what MindSpeed-MM's ``evaluate_*.json`` has besides the model."""

    dataset_path: str | None = None
    evaluation_dataset: str | None = None
    evaluation_model: str | None = None
    """Only a name, as in MindSpeed-MM: the names of the result files start with it."""
    result_output_path: str | None = None
    use_custom_prompt: bool = True


@plain_dataclass(frozen=True)
class Evaluating:
    """The checked settings of one evaluation."""

    asking: Asking[EvaluateArguments]
    questions: str
    benchmark: BenchmarkName | None
    rule: Rule | None
    """Set if there is no benchmark."""
    output: str
    custom_prompt: bool
    peer_model: str | None
    """The name at the start of MindSpeed-MM's result files; None: they are not written."""

    @property
    def peer_dataset(self) -> str:
        """The part after ``peer_model`` in those file names."""
        names = (peer for peer, ours in PEER_NAMES.items() if ours == self.benchmark)
        return next(names, Path(self.questions).stem)


def load_evaluating(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Evaluating:
    """Read and check flags and JSON files; raises UserError with all problems.  Flags take precedence over the JSON."""
    asking, problems = read_asking(EVALUATE, argv, EvaluationConfig, environment)
    args, file = asking.args, cast(EvaluationConfig | None, asking.inference)
    named = file.evaluation_dataset if file and not args.benchmark and not args.rule else None
    by_name: Mapping[str, BenchmarkName] = {**PEER_NAMES, **{one: one for one in PEER_NAMES.values()}}
    benchmark = args.benchmark or (by_name.get(named.lower()) if named else None)
    questions = args.questions or (file and file.dataset_path)
    output = args.output or (file and file.result_output_path)
    if named and not benchmark:
        problems.append(f"{args.mm_model}: evaluation_dataset is {named!r}{nearest(named, by_name)}; expected one of "
                        f"{', '.join(PEER_NAMES)}")
    peer_model = args.evaluation_model if args.evaluation_model is not None else file and file.evaluation_model
    problems += _problems(args, benchmark, bool(named), questions, output, peer_model)
    refuse(problems)
    assert questions is not None and output is not None
    asking = replace(asking, notes=(*asking.notes, *(_peer_notes(benchmark) if named else ())))
    return Evaluating(
        _with_defaults(asking, benchmark), questions, benchmark, args.rule, output,
        custom_prompt=args.use_custom_prompt or (file is not None and file.evaluation_dataset is not None and
                                                 file.use_custom_prompt),
        peer_model=peer_model or None)


def evaluating_in_training(args: Arguments, data: DataConfig, world_size: int) -> Evaluating:
    """The settings with which ``mm-evaluate`` would evaluate a checkpoint of this run with its ``--mm-data``."""
    questions, benchmark = args.eval_generate_questions, args.eval_generate_benchmark
    assert questions is not None, "checked with the settings"
    defaults = EVALUATE.read(EVALUATE.split(("--load", "the model in training")))  # which is required, and not loaded
    settings = replace(
        defaults, mm_data=args.mm_data, media_roots=(data.dataset_dir, *(data.media_roots or ())), questions=questions,
        max_questions=args.eval_generate_max_questions, max_new_tokens=args.eval_generate_max_new_tokens)
    asking = _with_defaults(Asking(settings, None, data, world_size), benchmark)
    return Evaluating(asking, questions, benchmark, args.eval_generate_rule, str(Path(args.log_dir) / ANSWERS_FOLDER),
                      custom_prompt=False, peer_model=None)


def _problems(
    args: EvaluateArguments, benchmark: str | None, is_named: bool, questions: str | None, output: str | None,
    name: str | None,
) -> Iterator[str]:
    if not benchmark and not args.rule and not is_named:
        yield "--benchmark or --rule is missing: name the benchmark of the questions, or the scoring rule for your own"
    if name and (len(os.fsencode(name)) > _LONGEST_NAME_BYTES or Path(name).name != name or not name.isprintable()):
        where = "--evaluation-model" if args.evaluation_model is not None else f"{args.mm_model}: evaluation_model"
        yield (f"{where} is {name!r}, which cannot start file names in --output; give printable text of at most "
               f"{_LONGEST_NAME_BYTES} bytes without '/'")
    if questions is None:
        yield "--questions is missing: the TSV file of the benchmark, or your own JSON file"
    elif not os.path.isfile(questions):
        yield f"--questions is {questions!r}, which is not a file"
    if output is None:
        yield "--output is missing: the directory of predictions and scores"
    elif os.path.exists(output) and not os.path.isdir(output):
        yield f"--output is {output!r}, which is a file; give a directory"


def _peer_notes(benchmark: str | None) -> Iterator[str]:
    """Differences from MindSpeed-MM."""
    if benchmark == "chartqa":
        yield "a number is right within 5% of the correct answer, as published; MindSpeed-MM uses 5% of the model's"
    if benchmark in ("ai2d", "mmmu"):
        yield ("an option letter counts only in the last four words of an answer, as in current VLMEvalKit; "
               "MindSpeed-MM accepts it anywhere")


def _with_defaults(asking: Asking[EvaluateArguments], benchmark: str | None) -> Asking[EvaluateArguments]:
    """Greedy decoding and, for a benchmark, its published image sizes, unless the user has set them."""
    args, file = asking.args, asking.inference
    has_sizes = asking.data is not None or (args.image_min_pixels, args.image_max_pixels) != (None, None) or (
        file is not None and (file.min_pixels, file.max_pixels) != (None, None))
    if benchmark and not has_sizes:
        least, most = _BENCHMARK_PIXELS
        args = replace(args, image_min_pixels=least, image_max_pixels=most)
    defaults = replace(_LIKELIEST, max_new_tokens=_BENCHMARK_TOKENS) if benchmark else _LIKELIEST
    return replace(asking, args=args, defaults=defaults)
