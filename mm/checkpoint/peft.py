"""PEFT adapter directories: reads and lays out ``adapter_config.json`` and ``adapter_model.safetensors``.

Only headers are read here.  ``mm.weights`` defines which adapters a model has, and the names of their matrices.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mm.checkpoint.hf import is_adapter_file
from mm.checkpoint.safetensors import FLOAT_DTYPES, read_header, read_metadata, safetensors_file
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.errors import UserError, refuse
from mm.files import json_object
from mm.weights.table import ALL_LINEAR, live_name, model_weights, published_name
from mm.weights.trained import model_adapters, saved_weights
from mm.weights.views import Stored, TargetFile, View, whole_view, whole_views

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_KEY = "base_crc32"
"""Key in the header of the weights: checksum of the base model they were trained on (``Source.base_crc32``)."""
_DEFAULT = 8
"""PEFT's default rank and alpha."""
_OFF: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_dora": (None, False), "bias": (None, "none"), "lora_bias": (None, False),
    "use_qalora": (None, False), "fan_in_fan_out": (None, False), "layer_replication": (None, []),
    "target_parameters": (None, []), "trainable_token_indices": (None, [], {}), "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []), "arrow_config": (None,),
}  # fmt: skip
"""Keys of adapter_config.json that select another kind of adapter, and their values for plain LoRA."""


def is_peft_directory(path: str | Path) -> bool:
    """Whether this is a PEFT directory.  It may also hold a tokenizer, but not a model."""
    path = Path(path)
    return path.is_dir() and any(map(is_adapter_file, os.listdir(path))) and not (path / "config.json").is_file()


@dataclass(frozen=True)
class AdapterDirectory:
    """A PEFT directory whose two files are complete."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    """By their name in the weight table."""
    base_crc32: int | None

    @classmethod
    def open(cls, path: str | Path) -> "AdapterDirectory":
        """Read config and header.  Raises UserError if a file is missing or damaged, or the adapter is not LoRA."""
        directory = Path(path)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (directory / name).is_file():
                raise UserError(f"{directory} holds an adapter, but no {name}; save one that has only an "
                                f"adapter_model.bin again with a newer peft.")
        try:
            config = json_object((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{directory / CONFIG_FILE} is not valid JSON ({error}); download it again.") from error
        refuse(f"{directory / CONFIG_FILE}: {key} is {config[key]!r}; expected {legal[0]!r}: adapters of that kind are "
               f"not trained here." for key, legal in _OFF.items() if key in config and config[key] not in legal)
        stated = read_metadata(directory / WEIGHTS_FILE).get(BASE_KEY)
        found = read_header(directory / WEIGHTS_FILE, dtypes=FLOAT_DTYPES)
        tensors = {published_name(name.removeprefix(PREFIX)): one for name, one in found.items()}
        return cls(directory, config, tensors, int(stated) if stated else None)

    @property
    def base_name(self) -> str | None:
        """The base model that the config names: a path, or a name on a hub."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) else None

    @property
    def files(self) -> tuple[Path, ...]:
        return self.path / CONFIG_FILE, self.path / WEIGHTS_FILE

    @cached_property
    def settings(self) -> LoraConfig:
        """Settings common to all adapters.  Raises UserError if they are invalid."""
        try:
            return LoraConfig(
                r=int(self.config.get("r") or _DEFAULT), alpha=float(self.config.get("lora_alpha") or _DEFAULT),
                dropout=float(self.config.get("lora_dropout") or 0.0), use_rslora=bool(self.config.get("use_rslora")))
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.path / CONFIG_FILE} has an invalid r, lora_alpha or lora_dropout; "
                            f"download it again.") from error

    def scale(self, layer: str, rank: int) -> float:
        """PEFT's factor for the adapter of ``layer``, which is named as in the live module."""
        alpha = next((one for pattern, one in self._alphas if pattern.match(layer)), self.settings.alpha)
        return self.settings.scale(rank, alpha)

    @cached_property
    def _alphas(self) -> Sequence[tuple[re.Pattern[str], float]]:
        """``alpha_pattern``: the layers that PEFT's patterns select, and their alpha.  Raises UserError if damaged."""
        try:
            return [(re.compile(rf"(.*\.)?({pattern})$"), float(alpha))
                    for pattern, alpha in (self.config.get("alpha_pattern") or {}).items()]
        except (AttributeError, TypeError, ValueError, re.error) as error:
            raise UserError(f"{self.path / CONFIG_FILE} has an invalid alpha_pattern ({error}); expected regular "
                            f"expressions for names of layers, and their alphas.") from error

    def views(self, model: ModelConfig, is_own: bool = False) -> tuple[list[View], list[str]]:
        """Views of the weights that a checkpoint of ``model`` (a run's, or its own) saves, and problems."""
        missing = ("without which the others are of no use; save or download it again" if is_own else
                   "which the settings of this run train: did --lora-target-modules, lora_mixed_training or "
                   "--trainable-modules change?")
        unknown = ("for which the given base model has no layer; give the model that the adapters were trained on"
                   if is_own else "which the settings of this run do not train; name its layer with "
                                  "--lora-target-modules, if the base model has it")
        views, problems, left_over = whole_views(
            saved_weights(model), self.tensors,
            lambda name, _: f"{self.path} has no {name}, {missing}",
            lambda name, shape, stored: (
                f"{self.path / WEIGHTS_FILE}: {name} has shape {list(stored.shape)}, but this model needs "
                f"{list(shape)}; does the adapter belong to another base model, or have another rank?"))
        whole = [name for name in left_over if ".lora_" not in name]
        return views, problems + [self._untrained(name, whole, model) if name in whole else
                                  f"{self.path / WEIGHTS_FILE} holds {name}, {unknown}" for name in left_over]

    def _untrained(self, name: str, whole: Sequence[str], model: ModelConfig) -> str:
        """Explain why the fully trained tensor ``name`` does not fit, and what to do.  ``whole``: all such tensors."""
        text = f"{self.path / WEIGHTS_FILE} holds {name}, which was fully trained along with the adapters"
        weights = {one: weight for weight in model_weights(model.base) for one in weight.hf_names}
        merge = "merge adapters and model with PEFT (merge_and_unload), and give that model, saved, instead"
        if name not in weights or any(one not in self.tensors for one in weights[name].hf_names):
            return f"{text}, but is no whole weight of the model here; {merge}"
        modules = dict.fromkeys(weights[one].name for one in whole if one in weights)
        return (f"{text}, but this run would not train it; give --trainable-modules "
                f"{' '.join((*model.trainable_modules, *modules))} to continue training it, or {merge}")

    def model(self, base: ModelConfig) -> ModelConfig:
        """``base`` with exactly these adapters, and with the fully saved weights marked as trained."""
        whole = {name for name in self.tensors if ".lora_" not in name}
        trained = tuple(one.name for one in model_weights(base.base) if not whole.isdisjoint(one.hf_names))
        plain = replace(base.unfrozen, trainable_modules=trained)
        layers = {name.removesuffix(".weight") for one in model_weights(base.base) for name in one.hf_names}
        ranks = {layer: stored.shape[0] for name, stored in self.tensors.items() if name.endswith(".lora_A.weight")
                 and (layer := name.removesuffix(".lora_A.weight")) in layers and stored.shape and stored.shape[0]}
        lora = replace(self.settings, target_modules=tuple(ranks) or (ALL_LINEAR,), rank_pattern=tuple(ranks.items()))
        found = model_adapters(replace(plain, lora=lora))
        scales = {one.layer: self.scale(live_name(one.layer), one.rank) for one in found}
        alphas = tuple((one.layer, scales[one.layer] * one.alpha / one.scale) for one in found)
        return replace(plain, lora=replace(lora, alpha_pattern=alphas))

    def problems(self, model: ModelConfig, is_own: bool = False) -> list[str]:
        """How these adapters differ from those of ``model``; see ``views``."""
        found = self.views(model, is_own)[1]
        if found:
            return [found[0] + (f" (and {len(found) - 1} more tensors)" if len(found) > 1 else "")]
        for adapter in model_adapters(model):
            scale = self.scale(live_name(adapter.layer), adapter.rank)
            if not math.isclose(scale, adapter.scale, rel_tol=1e-9):
                return [f"{self.path / CONFIG_FILE} multiplies the adapter of {adapter.layer} by {scale:g} (alpha "
                        f"{scale / adapter.scale * adapter.alpha:g} at rank {adapter.rank}), but this run by "
                        f"{adapter.scale:g}; give the same --lora-alpha, --lora-alpha-pattern and --lora-use-rslora"]
        return []


def adapter_targets(
    model: ModelConfig, dtypes: Mapping[str, torch.dtype], base_crc32: int | None
) -> tuple[list[View], TargetFile]:
    """Views and layout of ``adapter_model.safetensors``; ``dtypes`` are the source's, by published name."""
    weights = {PREFIX + live_name(name): (name, weight, shape) for weight in saved_weights(model)
               for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True)}
    described = [(peft_name, dtypes[name], shape) for peft_name, (name, _, shape) in sorted(weights.items())]
    stated = {} if base_crc32 is None else {BASE_KEY: str(base_crc32)}
    file = safetensors_file(WEIGHTS_FILE, described, stated)
    return [whole_view(stored, *weights[stored.name][:2]) for stored in file.tensors], file


def config_text(model: ModelConfig, base: str | None) -> str:
    """Text of ``adapter_config.json``.  It has full layer names, so that PEFT matches exactly these layers."""
    lora, found = model.lora, model_adapters(model)
    whole = {live_name(name).rpartition(".")[0] for weight in saved_weights(model)
             if not weight.is_adapter for name in weight.hf_names}
    content = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.r, "lora_alpha": _plain(lora.alpha), "lora_dropout": lora.dropout, "use_rslora": lora.use_rslora,
        "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
        "target_modules": sorted(live_name(one.layer) for one in found),
        "modules_to_save": sorted(whole) or None,
        "rank_pattern": {live_name(one.layer): one.rank for one in found if one.rank != lora.r},
        "alpha_pattern": {live_name(one.layer): _plain(one.alpha) for one in found
                          if not math.isclose(one.alpha, lora.alpha)},
    }  # fmt: skip
    return json.dumps(content, indent=2) + "\n"


def _plain(number: float) -> float | int:
    """Return 8 for 8.0, as PEFT writes it."""
    rounded = round(number, 9)
    return int(rounded) if rounded == int(rounded) else rounded
