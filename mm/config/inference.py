"""Sampling settings in files: ``generation_config.json`` of a checkpoint, and MindSpeed-MM's
``inference_*.json``, which has the model, the same settings and a prompt in one file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, Strict
from pydantic.dataclasses import dataclass

from mm.config.mindspeed import MODEL_KEYS, NOT_HERE, Fixed, Inert, Row, rows
from mm.config.model import ModelConfig, model_problems, with_image_token
from mm.config.schema import STRICT, Count, Int, Key, NaturalNumber, NotNegative, Positive, ReadSettings, read_settings
from mm.config.strict_json import read_json
from mm.families.known import TITLES, names_of


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


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
    top_p: NotNegative | None = None
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

_OUTPUT = Inert("only the tokens of an answer are kept")
_SPEED = Inert("it affects speed only; keys and values are always cached")
_BEAMS = Inert("it affects beam search only")
_IDS = Inert("the ids come from the tokenizer and the model JSON")


GENERATION_KEYS: Mapping[str, Row] = {
    **rows(_OUTPUT, "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"),
    **rows(_SPEED, "kv_cache use_cache use_mtp cache_implementation cache_config return_legacy_cache max_cache_len "
                   "low_memory is_assistant num_assistant_tokens num_assistant_tokens_schedule "
                   "assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size "
                   "assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight "
                   "speculation_type compile_config disable_compile continuous_batching_config prefill_chunk_size "
                   "split_batch"),
    **rows(_BEAMS, "early_stopping length_penalty num_return_groups"),
    **rows(_IDS, "bos_token_id pad_token_id decoder_start_token_id vision_start_token_id image_token_id "
                 "video_token_id"),
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


def read_inference(path: str | Path) -> ReadSettings[InferenceConfig]:
    """Read a model JSON or MindSpeed-MM's ``inference_*.json``; raises UserError with every problem in the file."""
    return read_model_and_more(path, InferenceConfig)


def read_model_and_more(path: str | Path, cls: type[Config]) -> ReadSettings[Config]:
    """``read_inference`` for ``cls``, which may have more fields than ``InferenceConfig``."""
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
    yield from (f"generation_config.{problem}" for problem in settings_problems(inference.generation))


def read_generation(path: str | Path) -> GenerationSettings:
    """Read a checkpoint's ``generation_config.json``; raises UserError with every problem in the file."""
    return read_settings(path, GenerationSettings, {"": GENERATION_KEYS}, settings_problems).value


def settings_problems(settings: GenerationSettings) -> Iterator[str]:
    """Problems that the fields' annotations do not cover."""
    if settings.top_p is not None and not 0 < settings.top_p <= 1:
        yield f"top_p is {settings.top_p:g}; expected above 0 and at most 1"
