"""The range of torch takes what pip finds installed, NVIDIA's pre-releases too; the lock holds all other packages."""

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.files import ROOT

RANGE = Requirement(*re.findall(r'"(torch>=[^"]+)"', (ROOT / "setup.py").read_text())).specifier

EXTRAS = ("test", "decord", "tensorboard", "wandb", "swanlab", "parquet", "demo", "site")


@pytest.mark.parametrize(("version", "is_taken"), [
    ("2.11.0a0+eb65b36914.nv26.2", True), ("2.12.0a0+5a7b7a1.nv26.5", True), ("2.11.0", True), ("2.13.0+cu130", True),
    ("2.7.1+cpu", True), ("2.15.0a0+x.nv26.10", True), ("2.15.0", True), ("2.7.0", False), ("2.6.0", False),
    ("2.16.0a0+x.nv26.12", False), ("2.16.0", False),
])  # fmt: skip
def test_versions_of_torch(version: str, is_taken: bool) -> None:
    """As pip asks of a package that is installed already."""
    assert RANGE.contains(version, prereleases=True) is is_taken


LOCKED = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE))


def test_the_lock_names_versions_and_hashes_and_no_place() -> None:
    """A place would bind it to one index; torch's files differ between them."""
    entries = (ROOT / "requirements.lock").read_text().replace("\\\n", "").splitlines()
    form = re.compile(
        r"[\w.-]+==[a-z0-9.]+( ; platform_machine == 'x86_64')?( +--hash=sha256:[0-9a-f]{64})+", re.IGNORECASE)
    assert len(entries) == len(LOCKED) and [entry for entry in entries if not form.fullmatch(entry.strip())] == []
    assert not LOCKED.keys() & {"torch", "torchvision", "torchaudio"}


def test_the_lock_holds_what_setup_py_asks_for() -> None:
    asked = map(Requirement, metadata.requires("qwen2_5_vl-3d") or ())
    wanted = [one for one in asked if one.name != "torch" and not one.name.startswith("qwen2")
              and (one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in EXTRAS))]
    locked = {canonicalize_name(name): version for name, version in LOCKED.items()}
    assert len(wanted) > 20
    assert [str(one) for one in wanted if locked.get(canonicalize_name(one.name), "none") not in one.specifier] == []
