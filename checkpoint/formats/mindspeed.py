"""Directories in MindSpeed-MM's layout, as a source of weights for any other layout.

Reads what this project converts and what MindSpeed-MM converts or trains.  Without a manifest, files and names tell the
layout; what model it is must be given.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoint.formats.files import read_file
from checkpoint.formats.layout import Layout, check_layout
from checkpoint.formats.manifest import Manifest, read_manifest
from checkpoint.formats.slots import RELEASE, TORCH_FILE, Format, Kind, Shard, num_layers, rank_of, shards
from checkpoint.formats.structure import Structure, is_canonical_name
from checkpoint.formats.training import LATEST_FILE
from mm.config.model import ModelConfig
from mm.errors import UserError, nearest
from mm.placement import layout_problems
from mm.weights.table import local_shape
from mm.weights.views import Stored, View, shard_view

_SAFETENSORS_FILE = re.compile(r"model\d*\.safetensors")
_CHUNK = re.compile(r"model(\d*)[./]")
_NO_WEIGHTS = re.compile(r"distrib_optim\.pt|optim\.pt|rng.*\.pt|param_state.*\.pt")
"""What Megatron's training writes beside the weights: optimizer and random states."""


@dataclass(frozen=True)
class MMDirectory:
    """A directory whose files were found whole; only headers were read."""

    path: Path
    folder: str
    """Holds the ranks, relative to ``path``: ``release`` or ``iter_0000010``."""
    manifest: Manifest | None
    kind: Kind
    num_chunks: int
    """Virtual chunks per stage."""
    contents: Mapping[str, Mapping[str, Stored]]
    """Tensors by file, relative to ``folder``, and name."""

    @classmethod
    def open(cls, path: str | Path) -> "MMDirectory":
        """Find the ranks, the manifest and every tensor's place; no weights are read.

        Raises:
            UserError: it is no such directory, or naming each file that is damaged.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path} is not a directory; expected a directory that hf_to_mm wrote.")
        folder, manifest = _folder(path), read_manifest(path)
        files = _weight_files(path / folder)
        contents, chunk_keys, problems = {}, set(), []
        for file in files:
            try:
                found = read_file(path / folder / file, f"{folder}/{file}")
                contents[file] = found.tensors
                chunk_keys.update(found.chunk_keys)
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(problems)
        num_chunks = 1 + max(_chunk(f"{key}/") for key in chunk_keys)
        return cls(path, folder, manifest, _kind(path / folder, contents), num_chunks, contents)

    @property
    def is_trained(self) -> bool:
        """Whether training wrote it, and not a conversion."""
        return self.folder != RELEASE

    @property
    def layout(self) -> Layout:
        """Of the files, as their names and tensors tell it."""
        names: dict[tuple[int, int], list[str]] = {}  # by chunk and stage, of the first tensor-parallel rank
        last_tp_rank = last_stage = 0
        for file, stored in self.contents.items():
            tp_rank, stage = rank_of(Path(file).parent.name)
            last_tp_rank, last_stage = max(last_tp_rank, tp_rank), max(last_stage, stage)
            for name in stored if tp_rank == 0 else ():
                chunk = _chunk(name if self.kind.format is Format.TORCH else Path(file).name)
                names.setdefault((chunk, stage), []).append(name)
        counts = [[num_layers(names.get((chunk, stage), ())) for stage in range(last_stage + 1)]
                  for chunk in range(self.num_chunks)]
        vision, language = (tuple(tuple(slot[tower] for slot in chunk) for chunk in counts) for tower in range(2))
        return Layout(vision, language, last_tp_rank + 1)

    def placed_model(
        self, given: Layout | None, flag: str, model: ModelConfig | None = None
    ) -> tuple[ModelConfig, int]:
        """The model on the layout of this directory, and its tensor parallel size.

        Model and layout are the manifest's; without a manifest the model is the given one, and the layout the one that
        the files show.  A ``given`` layout, which ``flag`` gives, must be the same.

        Raises:
            UserError: given and found layout differ, the model is not given, or the files do not hold all of it.
        """
        if self.manifest is None and model is None:
            raise UserError(
                f"{self.path} has no manifest that says what model it is; give --cfg.hf_config.hf_dir, the Hugging "
                f"Face directory that it was converted from."
            )
        found = self.manifest.layout if self.manifest else self.layout
        if given is not None and given != found:
            how = "was written with" if self.manifest else "holds files of"
            raise UserError(
                f"{flag} says {given}, but {self.path} {how} {found}; leave {flag} out, or give the right directory."
            )
        if self.manifest is not None:
            return self.manifest.model, self.manifest.tp_size
        if self.kind.vit_only:
            raise UserError(
                f"{self.path} holds no LLM and no manifest that says on how many stages one would be; convert from the "
                f"Hugging Face directory instead."
            )
        where = f"{self.path / self.folder}: "
        problems = layout_problems(found.vision, found.language, model.vision.num_layers, model.language.num_layers,
                                   f"{where}vit_pp_layers", f"{where}llm_pp_layers")
        if problems:
            raise UserError([*problems, f"{where}this layout is what the files hold; some are missing or incomplete, "
                                        f"or they are of another model."])
        check_layout(found, model, where.rstrip(": "))
        return found.place(model), found.tp_size

    def views(self, model: ModelConfig, tp_size: int) -> list[View]:
        """Views of all weights; ``model`` is on the layout of this directory.

        Raises:
            UserError: naming each file or tensor that is missing, of another shape, or belongs to nothing.
        """
        if self.manifest is not None and self.manifest.kind != self.kind:
            raise UserError(f"{self.path} was written with {self.manifest.kind}, but holds {self.kind}; convert again.")
        expected: dict[str, list[Shard]] = {}
        for shard in shards(model, tp_size, self.kind):
            expected.setdefault(shard.file, []).append(shard)
        problems = self._file_problems(expected)
        if problems:
            raise UserError(problems)
        views = []
        for file, parts in expected.items():
            stored = self.contents[file]
            weights = {name: (weight, shard.tp_rank) for shard in parts for name, weight in shard.weights.items()}
            for name, (weight, tp_rank) in weights.items():
                problem = self._tensor_problem(file, name, local_shape(weight, tp_size))
                if problem is None:
                    views.append((stored[name], weight, tp_rank))
                else:
                    problems.append(problem)
            problems += [
                f"{self.path / self.folder / file} holds {name}, which has no place on this rank"
                f"{nearest(name, weights)}."
                for name in stored.keys() - weights.keys()
            ]
        if problems:
            raise UserError(problems)
        return [shard_view(found, weight, tp_size, tp_rank) for found, weight, tp_rank in views]

    def files(self) -> list[Path]:
        """All weight files."""
        return [self.path / self.folder / file for file in sorted(self.contents)]

    def _file_problems(self, expected: Iterable[str]) -> list[str]:
        folder = self.path / self.folder
        missing = [name for name in expected if name not in self.contents]
        extra = sorted(self.contents.keys() - set(expected))
        problems = [f"{folder / name} is missing; copy the directory again, or correct the layout." for name in missing]
        return problems + [f"{folder / name} belongs to no rank of the layout; remove it." for name in extra]

    def _tensor_problem(self, file: str, name: str, shape: tuple[int, ...]) -> str | None:
        path, stored = self.path / self.folder / file, self.contents[file].get(name)
        if stored is None:
            return f"{path} lacks the tensor {name} of shape {list(shape)}."
        if stored.shape != shape:
            return (
                f"{path}: {name} has shape {list(stored.shape)}; expected {list(shape)}. Was it cut for another TP "
                f"size?"
            )
        return None


def _chunk(name: str) -> int:
    """Of ``model0.safetensors`` or ``model0/NAME``."""
    match = _CHUNK.match(name)
    return int(match[1] or 0) if match else 0


def _folder(path: Path) -> str:
    latest = path / LATEST_FILE
    if not latest.is_file():
        raise UserError(f"{path} has no {LATEST_FILE}; expected the directory that holds it beside {RELEASE}/.")
    text = latest.read_text(encoding="utf-8", errors="replace").strip()
    folder = f"iter_{int(text):07d}" if text.isdecimal() else text
    if Path(folder).name != folder or not (path / folder).is_dir():
        raise UserError(
            f"{latest} says {text[:40]!r}, but {path} has no directory {folder[:40]!r}; write the name of the one "
            f"to use there."
        )
    if not any((path / folder).glob("mp_rank_*")):
        raise UserError(f"{path / folder} holds no mp_rank_* directories; expected one for every rank.")
    return folder


def _weight_files(folder: Path) -> list[str]:
    """All weight files of all ranks; anything else that has no business there is a problem."""
    found, problems = [], []
    for rank in sorted(folder.iterdir()):
        if rank.is_dir() and rank_of(rank.name) is None and rank.name.startswith("mp_rank_"):
            problems.append(f"{rank} is no mp_rank_TT or mp_rank_TT_PPP; this model has no expert ranks.")
        if not rank.is_dir() or rank_of(rank.name) is None:
            continue
        for file in sorted(rank.iterdir()):
            if file.name == TORCH_FILE or _SAFETENSORS_FILE.fullmatch(file.name):
                found.append(f"{rank.name}/{file.name}")
            elif not _NO_WEIGHTS.fullmatch(file.name):
                problems.append(f"{file} is no file of weights (model.safetensors or {TORCH_FILE}); remove it.")
    if not found:
        problems.append(f"{folder} holds no weights; expected model.safetensors or {TORCH_FILE} in every mp_rank_*.")
    if problems:
        raise UserError(problems)
    return found


def _kind(folder: Path, contents: Mapping[str, Mapping[str, Stored]]) -> Kind:
    formats = {Format.TORCH if file.endswith(".pt") else Format.SAFETENSORS: file for file in contents}
    if len(formats) > 1:
        raise UserError(
            f"{folder} mixes {' and '.join(sorted(formats.values()))}; remove the files of the format that is out of "
            f"date."
        )
    vit_only = not any("text_decoder." in name for stored in contents.values() for name in stored)
    is_canonical = any(is_canonical_name(name) for stored in contents.values() for name in stored)
    return Kind(next(iter(formats)), Structure.CANONICAL if is_canonical else Structure.FUSED, vit_only)


