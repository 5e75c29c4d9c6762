"""Directories of MindSpeed-MM's layout, with safetensors files, as the source or the target of a byte plan.

``<dir>/latest_checkpointed_iteration.txt`` says ``release``, and ``<dir>/release/mp_rank_TT[_PPP]/model.safetensors``
(``model0.safetensors``, ``model1.safetensors``... with virtual chunks) holds what one rank owns.  Names in the
files are MindSpeed-MM's, whose layers count from 0 in every slot.  ``manifest.json`` stands at the top.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.layout import Layout, check_layout
from checkpoint.manifest import Manifest, read_manifest
from checkpoint.plan import ModelRun, Stored, View
from checkpoint.safetensors_file import SafetensorsFile, read_stored
from mm.checkpoint_files import LATEST_FILE
from mm.config import ModelConfig
from mm.errors import UserError, nearest
from mm.model.weight_ranges import cut_dim, shard_runs
from mm.model.weights import Weight, local_shape, stage_local_name, stage_weights
from mm.placement import Placement

RELEASE = "release"


@dataclass(frozen=True)
class Shard:
    """What one file holds: the weights of one slot, cut for one tensor-parallel rank."""

    file: str
    """Relative to the directory of the ranks."""
    tp_rank: int
    weights: Mapping[str, Weight]
    """By name in the file."""


def shards(model: ModelConfig, tp_size: int) -> Iterator[Shard]:
    """All files of ``model`` on its layout, in the order of stage, chunk and rank."""
    placement = Placement.from_config(model)
    for stage in range(placement.num_stages):
        for chunk in range(placement.num_chunks):
            spec = placement[stage, chunk]
            owned = {stage_local_name(weight, spec): weight for weight in stage_weights(model, spec, placement)}
            for tp_rank in range(tp_size):
                yield Shard(shard_file(Layout.of(model, tp_size), tp_rank, stage, chunk), tp_rank, owned)


def shard_file(layout: Layout, tp_rank: int, stage: int, chunk: int) -> str:
    """Name of one file, relative to the directory of the ranks."""
    rank = f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if layout.num_stages > 1 else "")
    return f"{rank}/model{chunk if layout.num_chunks > 1 else ''}.safetensors"


def mm_targets(
    model: ModelConfig, tp_size: int, dtypes: Mapping[str, torch.dtype]
) -> tuple[list[View], list[SafetensorsFile]]:
    """Views and files of ``model`` on its layout; ``dtypes`` are the source's, by published Hugging Face name."""
    views, files = [], []
    for shard in shards(model, tp_size):
        described = [
            (name, dtypes[weight.hf_names[0]], local_shape(weight, tp_size)) for name, weight in shard.weights.items()
        ]
        file = SafetensorsFile.new(f"{RELEASE}/{shard.file}", described)
        files.append(file)
        views += [_view(stored, shard.weights[stored.name], tp_size, shard.tp_rank) for stored in file.tensors]
    return views, files


@dataclass(frozen=True)
class MMDirectory:
    """A directory to read."""

    path: Path
    folder: str
    """Holds the ranks, relative to ``path``: ``release`` or ``iter_0000010``."""
    manifest: Manifest | None

    @classmethod
    def open(cls, path: str | Path) -> "MMDirectory":
        """Find the ranks and the manifest; no weights are read.

        Raises:
            UserError: it is no such directory.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path} is not a directory; expected a directory that hf_to_mm wrote.")
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
        return cls(path, folder, read_manifest(path))

    def placed_model(
        self, given: Layout | None, flag: str, model: ModelConfig | None = None
    ) -> tuple[ModelConfig, int]:
        """The model on the layout of this directory, and its tensor parallel size.

        The layout is the manifest's; without a manifest it is the ``given`` one, which ``flag`` gives, and the model
        is the given one.

        Raises:
            UserError: given and manifest differ, or what is needed is not given.
        """
        if self.manifest is not None:
            if given is not None and given != self.manifest.layout:
                raise UserError(
                    f"{flag} says {given}, but {self.path} was written with {self.manifest.layout}; leave {flag} out, "
                    f"or give the right directory."
                )
            return self.manifest.model, self.manifest.tp_size
        if given is None or model is None:
            missing = [name for name, value in ((flag, given), ("--cfg.hf_config.hf_dir", model)) if value is None]
            raise UserError(f"{self.path} has no manifest that says what it holds; give {' and '.join(missing)}.")
        check_layout(given, model, flag)
        return given.place(model), given.tp_size

    def sources(self, model: ModelConfig, tp_size: int) -> list[View]:
        """Views of all weights; ``model`` is on the layout of this directory.

        Raises:
            UserError: naming each file or tensor that is missing, of another shape, or belongs to nothing.
        """
        expected = list(shards(model, tp_size))
        problems = self._file_problems([shard.file for shard in expected])
        if problems:
            raise UserError(problems)
        views = []
        for shard in expected:
            stored = read_stored(self.path / self.folder / shard.file, f"{self.folder}/{shard.file}")
            problems += self._tensor_problems(shard, stored, tp_size)
            views += [(stored[name], weight, shard.tp_rank) for name, weight in shard.weights.items() if name in stored]
        if problems:
            raise UserError(problems)
        return [_view(found, weight, tp_size, tp_rank) for found, weight, tp_rank in views]

    def files(self) -> list[Path]:
        """All weight files."""
        return sorted((self.path / self.folder).glob("mp_rank_*/*.safetensors"))

    def _file_problems(self, expected: list[str]) -> list[str]:
        folder = self.path / self.folder
        found = {str(path.relative_to(folder)) for path in folder.glob("mp_rank_*/*")}
        missing, extra = [name for name in expected if name not in found], sorted(found - set(expected))
        problems = [f"{folder / name} is missing; copy the directory again, or correct the layout." for name in missing]
        return problems + [f"{folder / name} belongs to no rank of the layout; remove it." for name in extra]

    def _tensor_problems(self, shard: Shard, stored: Mapping[str, Stored], tp_size: int) -> list[str]:
        file = self.path / self.folder / shard.file
        problems = []
        for name, weight in shard.weights.items():
            shape = local_shape(weight, tp_size)
            if name not in stored:
                problems.append(f"{file} lacks the tensor {name} of shape {list(shape)}.")
            elif stored[name].shape != shape:
                problems.append(
                    f"{file}: {name} has shape {list(stored[name].shape)}; expected {list(shape)}. Was it cut for "
                    f"another TP size?"
                )
        return problems + [
            f"{file} holds {name}, which has no place on this rank{nearest(name, shard.weights)}."
            for name in stored
            if name not in shard.weights
        ]


def _view(stored: Stored, weight: Weight, tp_size: int, tp_rank: int) -> View:
    runs = tuple(
        ModelRun(None if run.hf_index is None else weight.hf_names[run.hf_index], run.start, run.length)
        for run in shard_runs(weight, tp_size, tp_rank)
    )
    return View(stored, cut_dim(weight), runs)
