"""Where weights can come from: a Hugging Face directory, MindSpeed-MM's layout, or a training checkpoint of ours.

Whatever the kind, a source is a set of views that cover the model; nobody who reads one asks which kind it is.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.formats.files import read_stored
from checkpoint.formats.hf import HFDirectory
from checkpoint.formats.hf_views import fingerprint, hf_sources
from checkpoint.formats.known_models import recognize
from checkpoint.formats.language_source import language_views, only
from checkpoint.formats.layout import Layout
from checkpoint.formats.manifest import model_from_json
from checkpoint.formats.mindspeed import MMDirectory
from checkpoint.formats.slots import Kind
from checkpoint.formats.training import DTYPES, MANIFEST_FILE, USE_ANOTHER, find_checkpoint, find_load_kind
from checkpoint.formats.training import Manifest as TrainingManifest
from checkpoint.formats.training import read_manifest as read_training_manifest
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.weights.table import Weight, local_shape, model_weights
from mm.weights.views import Stored, View, shard_view


@dataclass(frozen=True)
class Source:
    """A complete set of weights on the disk; only headers were read."""

    path: Path
    """What the files of the views are relative to."""
    kind: str
    """"hf", "mm" or "training"."""
    model: ModelConfig
    """On the layout of the directory."""
    tp_size: int
    kept: Kind | None
    """Of a directory in MindSpeed-MM's layout."""
    views: tuple[View, ...]
    files: tuple[Path, ...]
    """All weight files, and config.json of a Hugging Face directory."""

    @property
    def is_vit_only(self) -> bool:
        """Whether there is no LLM in it (``save_vit_only``)."""
        return self.kept is not None and self.kept.vit_only

    @property
    def layout(self) -> Layout:
        return Layout.of(self.model, self.tp_size)

    @property
    def fingerprint(self) -> str:
        """Tells two versions of the same directory apart."""
        return fingerprint(self.path, self.files)


def open_source(
    path: str | Path, path_flag: str, given: Layout | None, flag: str, model: ModelConfig | None = None
) -> Source:
    """A directory of any kind.

    ``path_flag`` gives the directory.  ``given`` is the layout that the user states with ``flag``, and ``model`` says
    what model it is, where a directory in MindSpeed-MM's layout has no manifest.

    Raises:
        UserError: it is of no kind, or incomplete, damaged, or not on the given layout.
    """
    path = Path(path)
    match find_load_kind(path, path_flag):
        case "hf":
            return open_hf(path)
        case "mm":
            return _open_mm(path, given, flag, model)
    source = _open_training(path)
    if given is not None and given != source.layout:
        raise UserError(
            f"{flag} says {given}, but the training checkpoint {source.path} was saved with {source.layout}; leave "
            f"{flag} out, or give the right directory."
        )
    return source


def open_hf(path: str | Path, language_path: str | Path | None = None) -> Source:
    """A Hugging Face directory; with ``language_path``, ViT and projector of it and the LLM of another one."""
    directory = HFDirectory.open(path)
    model = directory.model_config()
    views, files = hf_sources(directory, model), sorted({tensor.file for tensor in directory.tensors.values()})
    if language_path is not None:
        language, more = language_views(language_path, directory.config, model)
        views, files = [*only(views, model, "vision", "projector"), *language], [*files, *more]
    return Source(directory.path, "hf", model, 1, None, tuple(views), (directory.path / "config.json", *files))


def _open_mm(path: Path, given: Layout | None, flag: str, model: ModelConfig | None) -> Source:
    directory = MMDirectory.open(path)
    if directory.manifest is None and model is None:
        model = recognize(directory)
    placed, tp_size = directory.placed_model(given, flag, model)
    views = directory.views(placed, tp_size)
    return Source(path, "mm", placed, tp_size, directory.kind, tuple(views), tuple(directory.files()))


def _open_training(path: Path) -> Source:
    """The weights of a training checkpoint, as they were trained with; optimizer state has no place elsewhere."""
    folder, notes = find_checkpoint(path)
    for note in notes:
        print(f"note: {note}")
    manifest = read_training_manifest(folder)
    model = model_from_json(json.loads(json.dumps(manifest.model)))
    weights = {weight.name: weight for weight in model_weights(model)}
    stored = _training_tensors(folder, manifest)
    views, problems = [], []
    for weight in weights.values():
        for tp_rank in range(manifest.tp_size if weight.tp_dim is not None else 1):
            view = _training_view(weight, stored.get((weight.name, tp_rank)), manifest.tp_size, tp_rank)
            if view is None:
                problems.append(f"{folder} lacks {weight.name} of tensor-parallel rank {tp_rank}; use another one.")
            else:
                views.append(view)
    if problems:
        raise UserError(problems)
    files = sorted({folder / view.stored.file for view in views})
    return Source(folder, "training", model, manifest.tp_size, None, tuple(views), (folder / MANIFEST_FILE, *files))


def _training_tensors(folder: Path, manifest: TrainingManifest) -> Mapping[tuple[str, int], Stored]:
    """By weight and tensor-parallel rank; what the manifest says and the files hold must agree."""
    pieces = [piece for piece in manifest.pieces if piece.part == "weight"]
    headers = {file: read_stored(folder / file, file) for file in {piece.file for piece in pieces}}
    found, problems = {}, []
    for piece in pieces:
        stored = headers[piece.file].get(piece.key)
        if stored is None or (stored.shape, stored.dtype) != (piece.shape, DTYPES[piece.dtype]):
            problems.append(f"{folder / piece.file}: {piece.key} is not as {MANIFEST_FILE} says; {USE_ANOTHER}.")
        else:
            found[piece.name, piece.tp_rank] = stored
    if problems:
        raise UserError(problems)
    return found


def _training_view(weight: Weight, stored: Stored | None, tp_size: int, tp_rank: int) -> View | None:
    """Parameters may have another shape than the weight, such as a flattened patch embedding, of the same bytes."""
    if stored is None:
        return None
    shaped = replace(stored, shape=local_shape(weight, tp_size))
    assert shaped.num_bytes == stored.num_bytes, (stored, shaped)
    return shard_view(shaped, weight, tp_size, tp_rank)
