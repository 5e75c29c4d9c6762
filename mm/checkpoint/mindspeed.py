"""Directories in MindSpeed-MM's layout: conversions by this project, and conversions and checkpoints by MindSpeed-MM.

Without a manifest, the layout is inferred from file and tensor names, and the model must be given.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mm import environment
from mm.checkpoint.directories import LATEST_FILE, iteration_name, named_iteration
from mm.checkpoint.manifest import MANIFEST_FILE, manifest_text, read_manifest, stated_tensor, tensor_json, validated
from mm.checkpoint.mindspeed_layout import (
    RELEASE,
    TORCH_FILE,
    Format,
    Layout,
    Storage,
    Structure,
    check_layout,
    encoder_of,
    is_canonical_name,
    num_layers,
    rank_files,
    rank_of,
)
from mm.checkpoint.safetensors import read_header
from mm.checkpoint.torch_file import read_consumed_samples, read_torch_file
from mm.config.model import ModelConfig
from mm.errors import UserError, collected, nearest, refuse
from mm.placement import layout_problems
from mm.weights.fuse import local_shape
from mm.weights.views import Stored, View, dtype_name, shard_view

FORMAT, VERSION = "mm weights", 2
TOOL = f"mm-convert {environment.VERSION}"
_CONVERT_AGAIN = "convert the source again"
_SAFETENSORS_FILE = re.compile(r"model\d{0,4}\.safetensors")
"""More digits, as in a file by someone else, would mean millions of virtual chunks."""
_ITERATION_NAME = re.compile(r"iter_(\d+)")
_CHUNK = re.compile(r"model(\d*)[./]")
_NO_WEIGHTS = re.compile(r"distrib_optim\.pt|optim\.pt|rng.*\.pt|param_state.*\.pt")
"""Files that Megatron's training writes beside the weights: optimizer and random states."""


@dataclass(frozen=True)
class ConvertedManifest:
    """Metadata of a converted directory."""

    tool: str
    model: ModelConfig
    """With the pipeline lists of the directory."""
    tp_size: int
    storage: Storage
    source: Mapping[str, Any]
    """"kind" and "fingerprint" of the converted source; for people, and to distinguish sources."""
    tensors: tuple[Stored, ...]
    """With checksums; file names are relative to the directory of the manifest."""

    @property
    def layout(self) -> Layout:
        return Layout.of(self.model, self.tp_size)

    @classmethod
    def read(cls, directory: Path) -> "ConvertedManifest | None":
        """The manifest of ``directory``, or None; raises UserError if it is damaged or of another version."""
        if not (directory / MANIFEST_FILE).is_file():
            return None
        content = read_manifest(directory, FORMAT, VERSION, _CONVERT_AGAIN)
        storage = Storage(Format(content["save_format"]), Structure(content["structure"]), content["vit_only"],
                          adapters_only=content.get("adapters_only", False))
        layout, towers = content["layout"], content["model"]
        towers["vision"]["pipeline_num_layers"] = layout["vit_pp_layers"]
        towers["language"]["pipeline_num_layers"] = layout["llm_pp_layers"]
        model = validated(ModelConfig, towers, directory, "model", _CONVERT_AGAIN)
        tensors = tuple(map(stated_tensor, content["tensors"]))
        return cls(content["tool"], model, layout["tp_size"], storage, content["source"], tensors)

    def text(self) -> str:
        model = dataclasses.asdict(self.model)
        layout = {"vit_pp_layers": model["vision"].pop("pipeline_num_layers"),
                  "llm_pp_layers": model["language"].pop("pipeline_num_layers"), "tp_size": self.tp_size}
        content = {"format": FORMAT, "version": VERSION, "tool": self.tool, "source": dict(self.source),
                   "save_format": self.storage.format.value, "structure": self.storage.structure.value,
                   "vit_only": self.storage.vit_only, "adapters_only": self.storage.adapters_only, "layout": layout,
                   "model": model}
        return manifest_text(content, "tensors", [tensor_json(tensor) for tensor in self.tensors])


@dataclass(frozen=True)
class MindSpeedDirectory:
    """A directory whose files are complete, as far as their headers show."""

    path: Path
    folder: str
    """The subdirectory of ``path`` with the ranks: ``release`` or ``iter_0000010``."""
    manifest: ConvertedManifest | None
    storage: Storage
    num_chunks: int
    contents: Mapping[str, Mapping[str, Stored]]
    """Tensors by file (relative to ``path``) and name."""

    @classmethod
    def open(cls, path: str | Path) -> "MindSpeedDirectory":
        """Find the ranks, the manifest and the offset of every tensor; no weights are read."""
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path} is not a directory; expected a directory that hf_to_mm wrote.")
        folder, manifest = _folder(path), ConvertedManifest.read(path)
        contents, chunk_keys, problems = {}, set(), []
        for file in (f"{folder}/{file}" for file in _weight_files(path / folder)):
            with collected(problems):
                if file.endswith(".pt"):
                    contents[file], keys = read_torch_file(path / file, file)
                else:
                    contents[file], keys = read_header(path / file, file), (Path(file).stem,)
                chunk_keys.update(keys)
        refuse(problems)
        num_chunks = 1 + max(_chunk(f"{key}/") for key in chunk_keys)
        return cls(path, folder, manifest, _storage(path, contents), num_chunks, contents)

    @property
    def iteration(self) -> int | None:
        """Iteration at which MindSpeed-MM's training wrote it; None for a conversion."""
        match = _ITERATION_NAME.fullmatch(self.folder)
        return match and int(match[1])

    @property
    def consumed_samples(self) -> int | None:
        """Samples that the training had consumed; None for a conversion, or if its files do not say."""
        file = next((file for file in self.files if file.suffix == ".pt"), None)
        return read_consumed_samples(file) if file is not None and self.iteration is not None else None

    @property
    def layout(self) -> Layout:
        """The layout inferred from file and tensor names, and from the shapes of the ViT's tensors."""
        names: dict[tuple[int, int], list[str]] = {}  # by chunk and stage, of the first tensor-parallel rank
        ranks = {file: rank_of(Path(file).parent.name) or (0, 0) for file in self.contents}
        last_tp_rank, last_stage = (max(rank[axis] for rank in ranks.values()) for axis in range(2))
        for file, (tp_rank, stage) in ranks.items():
            for name in self.contents[file] if tp_rank == 0 else ():
                chunk = _chunk(name if self.storage.format is Format.TORCH else Path(file).name)
                names.setdefault((chunk, stage), []).append(name)
        counts = [[num_layers(names.get((chunk, stage), ())) for stage in range(last_stage + 1)]
                  for chunk in range(self.num_chunks)]
        vision, language = (tuple(tuple(slot[tower] for slot in chunk) for chunk in counts) for tower in range(2))
        shapes = ((name, one.shape) for file in self.contents.values() for name, one in file.items())
        return Layout(vision, language, last_tp_rank + 1, encoder_of(shapes) if last_tp_rank else "cut")

    def placed_model(
        self, given: Layout | None, flag: str, model: ModelConfig | None = None
    ) -> tuple[ModelConfig, int]:
        """The model on the layout of this directory, and its tensor-parallel size.

        Both come from the manifest; without one, the model is ``model``, and the layout is inferred from the files.  A
        layout ``given`` by ``flag`` must match.
        """
        adapters_only = self.storage.adapters_only  # adapter files may omit layers, so they do not show the layout
        found = self.manifest.layout if self.manifest else given if given and adapters_only else self.layout
        if given is not None and given != found:
            how = "was written with" if self.manifest else "holds files of"
            raise UserError(f"{flag} says {given}, but {self.path} {how} {found}; leave {flag} out, or give the right "
                            f"directory.")
        if self.manifest is not None:
            return self.manifest.model, self.manifest.tp_size
        if model is None:
            raise UserError(f"{self.path} has no manifest that describes its model; give --cfg.hf_config.hf_dir, the "
                            f"Hugging Face directory that it was converted from.")
        if self.storage.vit_only:
            raise UserError(f"{self.path} has neither an LLM nor a manifest, so its number of stages is unknown; "
                            f"convert from the Hugging Face directory instead.")
        where = f"{self.path / self.folder}: "
        problems = layout_problems(found.vision, found.language, model.vision.num_layers, model.language.num_layers,
                                   f"{where}vit_pp_layers", f"{where}llm_pp_layers")
        if problems:
            stages = [count for chunk in found.vision for count in chunk]
            is_hetero = len(stages) > 1 and set(stages) == {model.vision.num_layers}
            cause = ("every stage holds the whole ViT, as with MindSpeed-MM's --hetero-parallel: give the input of "
                     "convert_base_to_hetero, or the Hugging Face directory." if is_hetero else
                     "files are missing, or of another model (MindSpeed-MM's converter loses the last LLM layers since "
                     "26.0.0 if the list of LLM layers begins with 0).")
            raise UserError([*problems, f"{where}this layout is what the files hold; {cause}"])
        check_layout(found, model, where.rstrip(": "))
        return found.place(model), found.tp_size

    def views(self, model: ModelConfig, tp_size: int) -> tuple[list[View], list[str]]:
        """Views of all weights, with the checksums of the manifest, and problems; ``model`` is on the layout found."""
        if self.manifest is not None and self.manifest.storage != self.storage:
            raise UserError(f"{self.path} was written with {self.manifest.storage}, but holds {self.storage}; convert "
                            f"again.")
        views: list[View] = []
        problems: list[str] = []
        known: dict[str, set[str]] = {}
        for rank_file in rank_files(model, tp_size, self.storage):
            file = f"{self.folder}/{rank_file.file}"
            known.setdefault(file, set()).update(rank_file.weights)
            if rank_file.weights and file not in self.contents:
                problems.append(f"{self.path / file} is missing; copy the directory again, or correct the layout.")
                continue
            for name, weight in rank_file.weights.items():
                if problem := self._problem(file, name, local_shape(weight, tp_size)):
                    problems.append(problem)
                else:
                    crc32 = self._stated[file, name].crc32 if self.manifest else None
                    stored = dataclasses.replace(self.contents[file][name], crc32=crc32)
                    views.append(shard_view(stored, weight, tp_size, rank_file.tp_rank))
        return views, list(dict.fromkeys(problems)) + self._left_over(known)

    def _problem(self, file: str, name: str, shape: tuple[int, ...]) -> str | None:
        """How a stored tensor differs from what is expected; None if it does not."""
        path, stored = self.path / file, self.contents[file].get(name)
        if stored is None:
            return f"{path} lacks the tensor {name} of shape {list(shape)}."
        if stored.shape != shape:
            return (f"{path}: {name} has shape {list(stored.shape)}; expected {list(shape)}. Was it cut for another TP "
                    f"size?")
        if not stored.dtype.is_floating_point:
            return f"{path}: {name} is {dtype_name(stored.dtype)}; expected floating-point numbers."
        stated = self._stated.get((file, name))
        if self.manifest is not None and (stated is None or stated.dtype != stored.dtype):
            listed = "does not list it" if stated is None else f"says {dtype_name(stated.dtype)}"
            return f"{path}: {name} is {dtype_name(stored.dtype)}, but {MANIFEST_FILE} {listed}; convert again."
        return None

    def _left_over(self, known: Mapping[str, set[str]]) -> list[str]:
        problems = []
        for file, contents in sorted(self.contents.items()):
            if file not in known:
                problems.append(f"{self.path / file} does not belong to any rank of the layout; remove it.")
                continue
            problems += [f"{self.path / file} holds {name}, which does not belong on this rank"
                         f"{nearest(name, known[file])}."
                         for name in sorted(contents.keys() - known[file])]
        return problems

    @cached_property
    def _stated(self) -> Mapping[tuple[str, str], Stored]:
        return {(one.file, one.name): one for one in self.stated or ()}

    @property
    def stated(self) -> Sequence[Stored] | None:
        """The tensors that the manifest lists; None without a manifest."""
        return None if self.manifest is None else self.manifest.tensors

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.path / file for file in sorted(self.contents))

    def describe(self) -> list[str]:
        lines = [f"{self.path}: MindSpeed-MM's layout, {self.folder}, {self.storage}"]
        if self.manifest is None:
            return [*lines, f"layout: {self.layout} (no {MANIFEST_FILE}; inferred from the files)"]
        return [*lines, f"layout: {self.manifest.layout}",
                f"source: {self.manifest.source['kind']}, written by {self.manifest.tool}"]


def _chunk(name: str) -> int:
    """The number in ``model0.safetensors`` or ``model0/NAME``; 0 without virtual chunks."""
    match = _CHUNK.match(name)
    return int(match[1] or 0) if match else 0


def _folder(path: Path) -> str:
    latest = path / LATEST_FILE
    if not latest.is_file():
        raise UserError(f"{path} has no {LATEST_FILE}; expected the directory that holds it beside {RELEASE}/.")
    text = latest.read_text(encoding="utf-8", errors="replace").strip()
    folder = text if (iteration := named_iteration(text)) is None else iteration_name(iteration)
    if not folder or Path(folder).name != folder or not (path / folder).is_dir():
        raise UserError(f"{latest} contains {text[:40]!r}, but {path} has no such directory; write the name of the "
                        f"directory to use into that file.")
    if not any((path / folder).glob("mp_rank_*")):
        raise UserError(f"{path / folder} holds no mp_rank_* directories; expected one for every rank.")
    return folder


def _weight_files(folder: Path) -> list[str]:
    """All weight files of all ranks; raises UserError for unexpected files."""
    found, problems = [], []
    for rank in sorted(folder.iterdir()):
        if rank.is_dir() and rank_of(rank.name) is None and rank.name.startswith("mp_rank_"):
            problems.append(f"{rank} is not named mp_rank_TT or mp_rank_TT_PPP; this model has no expert ranks.")
        if not rank.is_dir() or rank_of(rank.name) is None:
            continue
        for file in sorted(rank.iterdir()):
            if file.name == TORCH_FILE or _SAFETENSORS_FILE.fullmatch(file.name):
                found.append(f"{rank.name}/{file.name}")
            elif not _NO_WEIGHTS.fullmatch(file.name):
                problems.append(f"{file} is not a weight file (model.safetensors or {TORCH_FILE}); remove it.")
    if not found:
        problems.append(f"{folder} holds no weights; expected model.safetensors or {TORCH_FILE} in every mp_rank_*.")
    refuse(problems)
    return found


def _storage(path: Path, contents: Mapping[str, Mapping[str, Stored]]) -> Storage:
    formats = {Format.TORCH if file.endswith(".pt") else Format.SAFETENSORS: file for file in contents}
    if len(formats) > 1:
        raise UserError(f"{path} mixes {' and '.join(sorted(formats.values()))}; remove the outdated files.")
    names = [name for stored in contents.values() for name in stored]
    if names and all(".lora_" in name for name in names):
        return Storage(next(iter(formats)), Structure.CANONICAL, adapters_only=True)
    vit_only = not any("text_decoder." in name for name in names)
    structure = Structure.CANONICAL if any(map(is_canonical_name, names)) else Structure.FUSED
    return Storage(next(iter(formats)), structure, vit_only)


