"""Settings of ``mm-generate``: its flags, the JSON files that they name, and how tokens are chosen.

The files are a checkpoint's ``generation_config.json`` and MindSpeed-MM's ``inference_*.json``, which has the model,
sampling settings and a prompt.  ``mm.config.evaluate`` also uses ``ModelArguments`` and ``Asking``.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from annotated_types import Le
from pydantic import BeforeValidator, Field, Strict
from pydantic.dataclasses import dataclass

from mm.config.args import Arguments, DeviceName, HasPrecision, VitQkvOrder
from mm.config.command_line import CommandLine, flag_name, rule_problems
from mm.config.data import DataConfig, read_data
from mm.config.mindspeed import FLAGS, MODEL_KEYS, NOT_HERE, Fixed, FlagRow, Inert, Row, SameAs, rows
from mm.config.model import ModelConfig, model_problems, with_image_token
from mm.config.parse import (
    FIRST,
    STRICT,
    Count,
    Excludes,
    Group,
    Int,
    Key,
    NaturalNumber,
    Needs,
    NotNegative,
    Patterns,
    Positive,
    ReadSettings,
    fields_of,
    read_json,
    read_settings,
)
from mm.environment import Launched, named_in_script, world_problems
from mm.errors import UserError, attempt, refuse
from mm.families import TITLES, names_of


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


TopP = Annotated[Positive, Le(1)]
Ids = Annotated[tuple[Int, ...], Strict(False), BeforeValidator(_one_or_more)]
_IDS_OR_NULL = Field(title="a token id, a list of them, or null")


@dataclass(frozen=True, config=STRICT)
class GenerationSettings:
    """One file's sampling settings; None for those that it lacks."""

    do_sample: bool | None = None
    """Sample tokens; if false, take the likeliest regardless of temperature, top_k and top_p."""
    temperature: NotNegative | None = None
    top_k: NaturalNumber | None = None
    """Draw from this many likeliest tokens; 0: from all."""
    top_p: TopP | None = None
    """Draw from the likeliest tokens with this total probability; 1: from all."""
    repetition_penalty: Positive | None = None
    max_new_tokens: Count | None = None
    eos_token_id: Annotated[Ids | None, _IDS_OR_NULL] = None
    """Tokens that end an answer."""


@dataclass(frozen=True, config=STRICT)
class InferenceConfig:
    """A model JSON, with what MindSpeed-MM's ``inference_*.json`` has besides the model."""

    model: Annotated[ModelConfig, Key("")]
    generation: Annotated[GenerationSettings, Key("generation_config.")] = GenerationSettings()
    directory: Annotated[str | None, Key("tokenizer.from_pretrained")] = None
    """Hugging Face directory of tokenizer, chat template and preprocessor config."""
    image_path: str | None = None
    video_path: str | None = None
    prompts: str | None = None
    """One question, asked before the image is shown, as MindSpeed-MM's pipeline does."""
    min_pixels: NaturalNumber | None = None
    """Minimum pixels of an image."""
    max_pixels: Count | None = None


Config = TypeVar("Config", bound=InferenceConfig)

GENERATION_KEYS: Mapping[str, Row] = {
    **rows(Inert("only the tokens of an answer are kept"),
           "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"),
    **rows(Inert("it affects speed only; keys and values are always cached"),
           "kv_cache use_cache use_mtp cache_implementation cache_config return_legacy_cache max_cache_len low_memory "
           "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
           "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind "
           "target_lookbehind assistant_ensemble_weight speculation_type compile_config disable_compile "
           "continuous_batching_config prefill_chunk_size split_batch"),
    **rows(Inert("it affects beam search only"), "early_stopping length_penalty num_return_groups"),
    **rows(Inert("the ids come from the tokenizer and the model JSON"),
           "bos_token_id pad_token_id decoder_start_token_id vision_start_token_id image_token_id video_token_id"),
    **rows(Inert("it only states which program wrote the file"), "transformers_version _from_model_config"),
    "max_length": Inert("max_new_tokens limits the length of an answer"),
    **rows(Fixed((None, 1), NOT_HERE), "num_beams num_beam_groups num_return_sequences"),
    **rows(Fixed((None, 0), NOT_HERE),
           "diversity_penalty epsilon_cutoff eta_cutoff no_repeat_ngram_size encoder_no_repeat_ngram_size min_length "
           "min_new_tokens penalty_alpha"),
    **rows(Fixed((None, 1.0), NOT_HERE), "typical_p encoder_repetition_penalty guidance_scale"),
    **rows(Fixed((None, False), NOT_HERE), "renormalize_logits remove_invalid_values token_healing"),
    **rows(Fixed((None,), NOT_HERE),
           "min_p top_h bad_words_ids force_words_ids forced_bos_token_id forced_eos_token_id forced_decoder_ids "
           "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias constraints "
           "dola_layers watermarking_config max_time"),
    "stop_strings": Fixed((None,), "use --stop-tokens"),
}
"""Keys of transformers 4 and 5 that are no fields of ``GenerationSettings``."""

_PRECISION = ("bf16", "fp16", "fp32", "bfloat16", "float16", "float32", None)
_MODELS = names_of(lambda family: family.mindspeed.model_ids)
_PIPELINES = names_of(lambda family: family.mindspeed.pipelines)
INFERENCE_KEYS: Mapping[str, Mapping[str, Row]] = {
    **MODEL_KEYS,
    "": {
        **MODEL_KEYS[""],
        "model_id": Fixed(_MODELS + _PIPELINES, f"this program is for {TITLES}"),
        "pipeline_class": Fixed(_PIPELINES, f"the pipeline of {TITLES}"),
        "dtype": Fixed(_PRECISION, "it must match --bf16 or --fp16"),
        "device": Inert("--device decides"),
    },
    "text_decoder": {
        **MODEL_KEYS["text_decoder"],
        "tokenizer_type": Inert("tokenizer.from_pretrained decides"),
        "is_encoder_decoder": Fixed((False,)),
        **rows(Inert("the command line flags decide"), "tensor_model_parallel_size pipeline_model_parallel_size"),
        "use_infer_fa": Inert("the device chooses its kernels"),
    },
    "tokenizer": {
        "hub_backend": Fixed(("hf",), "only local directories are read"),
        "autotokenizer_name": Fixed(("AutoTokenizer",), "the tokenizer of the directory"),
    },
    "generation_config": GENERATION_KEYS,
}
_OPTIONAL = ("tokenizer", "generation_config")
"""Objects that a model JSON of the trainer does not have."""


def read_inference(path: str | Path, cls: type[Config]) -> ReadSettings[Config]:
    """Read a model JSON or MindSpeed-MM's ``inference_*.json``; raises UserError with every problem in the file."""
    document = read_json(path)
    tables = {key: rows for key, rows in INFERENCE_KEYS.items() if key not in _OPTIONAL or document.has(key)}
    read = read_settings(path, cls, tables, _inference_problems)
    model, notes = with_image_token(read.value.model, path)
    return replace(read, value=replace(read.value, model=model), notes=(*read.notes, *notes))


def _inference_problems(inference: InferenceConfig) -> Iterator[str]:
    yield from model_problems(inference.model)
    least, most = inference.min_pixels, inference.max_pixels
    if least is not None and most is not None and least > most:
        yield f"min_pixels is {least}, above max_pixels = {most}"


def read_generation(path: str | Path) -> GenerationSettings:
    """Read a checkpoint's ``generation_config.json``; raises UserError with every problem in the file."""
    return read_settings(path, GenerationSettings, {"": GENERATION_KEYS}, lambda _: iter(())).value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelArguments(HasPrecision):
    """Which model answers, where, and how."""

    load: Annotated[str, Group("The model")] = Field(
        description="weights: a Hugging Face directory, converted weights, or training checkpoints")
    mm_model: str | None = Field(
        None, description="model JSON, or MindSpeed-MM's inference JSON; absent = the model in --load")
    model_name_or_path: str | None = Field(None, description=(
        "Hugging Face directory of tokenizer, chat template and processor, and the base model of adapters; absent = "
        "from the JSON, or --load"))
    mm_data: str | None = Field(None, description=(
        "data JSON of the training, for its image and video sizes"))
    vit_qkv_order: VitQkvOrder | None = Field(
        None, description="order of the ViT's qkv in --load of MindSpeed-MM; absent = from model_name_or_path")

    device: Annotated[DeviceName, Group("Machines")] = Field("auto", description="what to run on")
    tensor_model_parallel_size: Annotated[Count, FIRST] = Field(1, description="tensor-parallel ranks")
    pipeline_model_parallel_size: Count | None = Field(None, description=(
        "pipeline stages; absent = those of the model JSON's lists if there are enough ranks, else 1"))
    distributed_timeout_minutes: Count = Field(10, description="time limit of one collective")
    bf16: Annotated[bool, FIRST] = Field(False, description="compute in bfloat16; neither --bf16 nor --fp16 = fp32")
    fp16: Annotated[bool, Excludes("bf16")] = Field(False, description="compute in float16")

    media_roots: Annotated[Patterns, Group("Files of questions")] = Field((), description=(
        "folders that may contain the images and videos of a questions file, besides the file's own folder"))
    batch_size: Annotated[Count, FIRST] = Field(8, description="questions of a file that are answered together")

    image_min_pixels: Annotated[NaturalNumber | None, Group("Images and videos")] = Field(
        None, description="minimum pixels of an image")
    image_max_pixels: Count | None = Field(None, description="maximum pixels of an image; absent = the checkpoint's")
    video_max_pixels: Count | None = Field(None, description="maximum pixels of a frame")
    video_fps: Positive | None = Field(None, description="frames sampled per second of video")
    video_maxlen: Count | None = Field(None, description="maximum frames of a video")

    max_new_tokens: Annotated[Count | None, FIRST, Group("How tokens are chosen")] = Field(
        None, description="maximum tokens of an answer; absent = generation_config.json's, or 512")
    greedy: bool = Field(False, description="take the likeliest token, like --temperature 0")
    temperature: NotNegative | None = Field(
        None, description="sample tokens at this temperature; 0 = take the likeliest")
    top_k: NaturalNumber | None = Field(None, description="sample from this many likeliest tokens; 0 = from all")
    top_p: TopP | None = Field(
        None, description="sample from the likeliest tokens with this total probability; 1 = from all")
    repetition_penalty: Positive | None = Field(None, description="above 1: repeated tokens become less likely")
    stop_tokens: Patterns = Field((), description="tokens or ids that end an answer, instead of the checkpoint's")
    seed: NaturalNumber = Field(1234, description="seed of sampling")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerateArguments(ModelArguments):
    """Everything on the command line."""

    prompt: Annotated[str | None, FIRST, Group("The question")] = Field(
        None, description="one question; <image> and <video> in it mark the places of media")
    image: Annotated[Patterns, FIRST] = Field((), description="images of the question, in order")
    video: Annotated[Patterns, FIRST] = Field((), description="videos of the question, in order")
    system: str | None = Field(None, description="system message; absent = the chat template's own")
    chat: Annotated[bool, FIRST, Excludes("prompt")] = Field(False, description="chat in the terminal")
    prompts: Annotated[
        str | None, FIRST, Needs("output"), Excludes("prompt"), Excludes("chat"), Excludes("image"), Excludes("video"),
    ] = Field(None, description="JSON or JSONL file of prompts; answers go to --output")
    output: Annotated[str | None, FIRST, Needs("prompts")] = Field(
        None, description="JSONL file of answers; prompts already answered there are skipped")


_TRAINING = Inert("it affects training only")
_OTHER_FLAGS: Mapping[str, FlagRow] = {
    **{flag_name(name): _TRAINING for name in fields_of(Arguments)},
    **FLAGS,
    "--check": Fixed((), "each run reports every mistake before it loads the weights"),
    "--context-parallel-size": Fixed(("1",), "expected 1: prompts are not split over context-parallel ranks"),
}


def other_flags(cls: type[ModelArguments]) -> Mapping[str, FlagRow]:
    """The flags of other programs that are no fields of ``cls``; an alias of such a flag has no effect either."""
    own = {flag_name(name) for name in fields_of(cls)}
    return {flag: _TRAINING if isinstance(row, SameAs) and row.flag not in own else row
            for flag, row in _OTHER_FLAGS.items() if flag not in own}


GENERATE = CommandLine(
    "mm-generate", f"Generate answers with {TITLES}, using the trainer's forward pass, on any layout.",
    GenerateArguments, "--load DIR --prompt TEXT [--image FILE ...] | --chat | --prompts FILE --output FILE  [flags]",
    other_flags(GenerateArguments))

Said = TypeVar("Said", bound=ModelArguments)

_NO_BOUND = 1 << 40
"""Pixels; above the checkpoint's own bound, which then applies."""


@plain_dataclass(frozen=True)
class Decoding:
    """How the tokens of an answer are chosen."""

    max_new_tokens: int
    temperature: float
    """0 takes the likeliest token."""
    top_k: int
    """0: draw from all tokens."""
    top_p: float
    repetition_penalty: float
    stop_token_ids: tuple[int, ...]
    seed: int


DEFAULT = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0,
           "max_new_tokens": 512, "eos_token_id": ()}
"""The defaults of transformers (``_get_default_generation_params``), except for the length of an answer, 20 there."""


@plain_dataclass(frozen=True)
class Asking(Generic[Said]):
    """The checked settings of one call of ``mm.generate``, or those that ``mm.evaluate`` shares with it."""

    args: Said
    inference: InferenceConfig | None
    """From ``--mm-model``."""
    data: DataConfig | None
    """From ``--mm-data``."""
    world_size: int
    notes: tuple[str, ...] = ()
    defaults: GenerationSettings | None = None
    """Settings that take precedence over the checkpoint's."""

    def directory(self) -> tuple[str | None, str]:
        """The Hugging Face directory that goes with the weights, if one is given, and the flag or key that names it."""
        if not self.args.model_name_or_path:
            if self.inference is not None and self.inference.directory:
                return self.inference.directory, f"{self.args.mm_model}: tokenizer.from_pretrained"
            if self.data is not None and self.data.model_name_or_path:
                return self.data.model_name_or_path, f"{self.args.mm_data}: model_name_or_path"
        return self.args.model_name_or_path or None, "--model-name-or-path"

    def media_config(self, directory: str) -> DataConfig:
        """How images and videos are read, by precedence: flags, data JSON, inference JSON.

        Without any of these: images as the checkpoint's ``directory`` says, and videos as in qwen-vl-utils 0.0.14.
        """
        args: Any = self.args
        changes: dict[str, Any] = {"model_name_or_path": directory}
        base = self.data or DataConfig(
            model_name_or_path=directory, dataset=("-",), image_min_pixels=0, image_max_pixels=_NO_BOUND,
            video_min_pixels=128 * 28 * 28, video_max_pixels=768 * 28 * 28, video_maxlen=768)
        if self.inference is not None and self.data is None:
            changes |= {"image_min_pixels": self.inference.min_pixels, "image_max_pixels": self.inference.max_pixels}
        for name in ("image_min_pixels", "image_max_pixels", "video_max_pixels", "video_fps", "video_maxlen"):
            if getattr(args, name) is not None:
                changes[name] = getattr(args, name)
        changes = {name: value for name, value in changes.items() if value is not None}
        most = changes.get("video_max_pixels", base.video_max_pixels)
        return replace(base, **changes, video_min_pixels=min(base.video_min_pixels, most))

    def decoding(self, checkpoint: GenerationSettings) -> Decoding:
        """Settings by precedence: flags, inference JSON, ``checkpoint``, transformers' defaults.

        ``stop_token_ids`` come from the files; ``--stop-tokens`` is applied once the tokenizer is read.
        """
        args, files = self.args, (
            *((self.inference.generation,) if self.inference else ()), self.defaults, checkpoint)

        def setting(name: str) -> Any:
            given = (getattr(one, name, None) for one in (args, *files))
            return next((value for value in given if value is not None), DEFAULT[name])

        is_asked = any(value is not None for value in (args.temperature, args.top_k, args.top_p))
        samples = not args.greedy and args.temperature != 0 and (is_asked or setting("do_sample"))
        return Decoding(
            max_new_tokens=setting("max_new_tokens"),
            temperature=setting("temperature") if samples else 0.0,
            top_k=setting("top_k"), top_p=setting("top_p"), repetition_penalty=setting("repetition_penalty"),
            stop_token_ids=tuple(setting("eos_token_id")), seed=args.seed)


def kept_answers(line: CommandLine[Any], argv: Sequence[str]) -> str:
    """What remains of the answers after Ctrl-C, for its message."""
    output = line.split(argv).last("--output")
    return "no answer is kept, because there is no --output" if output is None else (
        f"answers so far are kept in {output}; the same command continues from them")


def load_asking(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Asking[GenerateArguments]:
    """Read and check flags and JSON files; raises UserError with all problems."""
    asking, problems = read_asking(GENERATE, argv, InferenceConfig, environment)
    refuse((*problems, *_question_problems(asking)))
    return replace(asking, notes=(*asking.notes, *_peer_notes(asking)))


def read_asking(
    line: CommandLine[Said], argv: Sequence[str], cls: type[InferenceConfig], environment: Mapping[str, str]
) -> tuple[Asking[Said], list[str]]:
    """Read the flags of ``line`` and the JSON files that they name; returns them with their problems.

    Raises UserError if the flags cannot be read.
    """
    words = line.split(argv)
    problems: list[str] = []
    args = attempt(line.read, words, problems)
    inference = attempt(lambda path: read_inference(path, cls), words.last("--mm-model"), problems)
    data = attempt(read_data, words.last("--mm-data"), problems)
    if not args:
        raise UserError(problems)
    notes = (*line.notes(words), *(inference.notes if inference else ()), *(data.notes if data else ()))
    world_size = Launched.here(environment).num_ranks or 1
    asking = Asking(args, inference and inference.value, data and data.value, world_size, notes)
    return asking, [*problems, *world_problems(environment, None, ""), *_problems(args, environment)]


def _problems(args: ModelArguments, environment: Mapping[str, str]) -> Iterator[str]:
    """Rules between flags."""
    yield from rule_problems(args)
    if args.greedy and args.temperature:
        yield f"--greedy and --temperature {args.temperature:g} are both given; keep one"
    least, most = args.image_min_pixels, args.image_max_pixels
    if least is not None and most is not None and least > most:
        yield f"--image-min-pixels is {least}, above --image-max-pixels = {most}"
    if not os.path.isdir(args.load):
        yield f"{named_in_script('--load', args.load, environment)} is {args.load!r}, which is not a directory"


def _question_problems(asking: Asking[GenerateArguments]) -> Iterator[str]:
    args, inference = asking.args, asking.inference
    if args.prompts is not None and not os.path.isfile(args.prompts):
        yield f"--prompts is {args.prompts!r}, which is not a file; expected a JSON or JSONL file of prompts"
    if args.output is not None and os.path.isdir(args.output):
        yield f"--output is {args.output!r}, which is a directory; give a file"
    given = (args.prompt, args.chat, args.prompts, args.image, args.video, inference and inference.prompts)
    if not any(given):
        yield "no question is given: use --prompt TEXT, --chat, or --prompts FILE and --output FILE"


def _peer_notes(asking: Asking[GenerateArguments]) -> Iterator[str]:
    """Differences from MindSpeed-MM."""
    inference, args = asking.inference, asking.args
    if inference is None or asking.data is not None or (inference.min_pixels, inference.max_pixels) == (None, None):
        return
    if args.image_min_pixels is None and args.image_max_pixels is None:
        yield (f"{args.mm_model}: min_pixels and max_pixels are applied; MindSpeed-MM's pipeline uses the checkpoint's "
               f"instead: --image-min-pixels 3136 --image-max-pixels 12845056 for all published ones")
