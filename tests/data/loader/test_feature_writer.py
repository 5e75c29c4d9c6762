"""ViT outputs are written completely, once, within limits; a full disk does not stop the run."""

import resource
import subprocess
import sys
from pathlib import Path
from threading import Event

import torch

from mm.data.loader import feature_writer as module
from mm.data.loader.feature_cache import CRC32_BYTES, path_of, read_features, used_bytes
from mm.data.loader.feature_writer import FeatureWriter
from mm.model.stage import MadeFeatures
from tests.files import ROOT

KEYS = [f"{number:032x}" for number in range(1, 5)]
FILE_BYTES = 4 * 8 * 4 + CRC32_BYTES


def made(*keys: str, value: float = 1.0, num_patches: int = 4) -> MadeFeatures:
    rows = torch.full((num_patches * len(keys), 8), value)
    return MadeFeatures(tuple((key, num_patches) for key in keys), lambda: rows, rows.nbytes)


def test_each_image_is_kept_once_and_none_without_a_key(tmp_path: Path) -> None:
    writer = FeatureWriter(str(tmp_path / "new"), 0, None, 1)
    writer.enqueue([made(KEYS[0], "", KEYS[1]), made(KEYS[0], KEYS[2], value=2.0)])
    writer.close()
    rows = [read_features(str(tmp_path / "new"), key, 4, 32).view(torch.float32) for key in KEYS[:3]]
    assert [float(one.unique()) for one in rows] == [1.0, 1.0, 2.0]
    assert len(list((tmp_path / "new").glob("*/*"))) == 3


def test_the_limit_counts_existing_files_and_other_writers(tmp_path: Path, capfd) -> None:
    """Two writers, a limit of 4 files, one of which exists: this writer may add one."""
    writer = FeatureWriter(str(tmp_path), 0, None, 1)
    writer.enqueue([made(KEYS[0])])
    writer.close()
    assert used_bytes(str(tmp_path)) == FILE_BYTES
    bounded = FeatureWriter(str(tmp_path), 3, 4 * FILE_BYTES, 2)
    bounded.enqueue([made(*KEYS), made(KEYS[3])])
    bounded.close()
    assert [path_of(str(tmp_path), key).exists() for key in KEYS] == [True, True, False, False]
    assert capfd.readouterr().err == (f"warning: rank 3: ViT features are no longer kept; training continues "
                                      f"without: {tmp_path} has reached the limit of --vision-feature-cache-gib\n")


FULL_DISK = """
import resource, sys, torch
from tests.data.loader.test_feature_writer import KEYS, made
from mm.data.loader.feature_writer import FeatureWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # bytes of one file: less than one holds
writer = FeatureWriter(sys.argv[1], 2, None, 1)
writer.enqueue([made(KEYS[0]), made(KEYS[1])])
writer.close()
print("went on")
"""


def test_a_full_disk_is_reported_once_and_leaves_no_partial_file(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
                          timeout=200, check=True)
    assert done.stdout == "went on\n"
    reported = [line for line in done.stderr.splitlines() if line.startswith("warning")]
    assert reported == [f"warning: rank 2: ViT features are no longer kept; training continues without: "
                    f"{tmp_path}: File too large"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100


def test_a_slow_disk_does_not_grow_the_queue_without_limit(tmp_path: Path, monkeypatch, capfd) -> None:
    """All features of the first step are kept, none of the second while the disk is busy."""
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 2 * 128)
    writer, is_fast, rows = FeatureWriter(str(tmp_path), 0, None, 1), Event(), torch.ones(12, 8)

    def read() -> torch.Tensor:
        is_fast.wait()
        return rows

    writer.enqueue([MadeFeatures(tuple((key, 4) for key in KEYS[:3]), read, rows.nbytes)])
    writer.enqueue([made(KEYS[3])])
    is_fast.set()
    writer.close()
    assert [path_of(str(tmp_path), key).exists() for key in KEYS] == [True, True, True, False]
    assert "is slower than the ViT: some features are not kept" in capfd.readouterr().err
