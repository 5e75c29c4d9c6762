"""Packages, dependencies and console scripts.

torch and megatron-core are capped to the releases that were tested (docs/install.md has the table); the Makefile
installs the CPU build first, so that this range never pulls a CUDA build onto a machine that has none.  The lower end
of torch is that of Ascend's images; CUDA needs a later one, as ``mm.device.cuda`` checks.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

_ROOT = Path(__file__).parent
_FILE = _ROOT / "mm/environment.py"
_VERSION = re.search(r'^VERSION = "(.+)"$', _FILE.read_text(encoding="utf-8"), re.MULTILINE)
assert _VERSION is not None, f"{_FILE} has the version"

setup(
    name="qwen2_5_vl-3d",
    version=_VERSION[1],
    description="3D-parallel trainer for Qwen2.5-VL on Ascend NPU, CUDA and CPU",
    long_description=(_ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["mm", "mm.*", "checkpoint", "checkpoint.*", "demo"]),
    package_data={"mm": ["py.typed", "templates/*"], "checkpoint": ["py.typed"], "demo": ["golden_losses.json"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.7.1,<2.16",
        "megatron-core>=0.16,<0.20",
        "transformers>=5.20.1,<6",
        "safetensors>=0.8",
        "numpy>=1.26",
        "pillow>=11.3",
        "simplejpeg>=1.8",
        "av>=17",
        "pydantic>=2.10,<3",
        "annotated-types",
        "typing_extensions",
        "psutil",
        "packaging",
        "tqdm",
        "jinja2",
        "pyyaml",
        "openpyxl",
    ],
    entry_points={"console_scripts": ["mm-convert = checkpoint.cli:main", "mm-data = mm.data_tool.cli:main",
                                      "mm-doctor = mm.doctor.cli:main", "mm-evaluate = mm.evaluate:main",
                                      "mm-generate = mm.generate:main", "mm-page = mm.page:main",
                                      "mm-plan = mm.plan.cli:main", "mm-train = mm.train:main"]},
    extras_require={
        "cpu": ["torch==2.13.0"],
        "decord": ["decord>=0.6; platform_machine == 'x86_64'"],
        "torchcodec": ["torchcodec>=0.12"],
        "npu": ["torch_npu>=2.7.1,<2.16"],
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb>=0.20"],
        "swanlab": ["swanlab>=0.10"],
        "parquet": ["pyarrow"],
        "demo": ["scikit-learn", "matplotlib"],
        "site": ["mkdocs-material>=9.7,<10", "pymdown-extensions<13", "jieba"],  # 13 needs Python 3.11.5
        "test": [
            "qwen2_5_vl-3d[decord,tensorboard,wandb,swanlab,parquet,demo,site]",
            "pytest>=9", "pytest-xdist>=3.6", "hypothesis>=6", "ruff", "basedpyright", "peft>=0.21",
            "ruamel.yaml>=0.18",
        ],
    },
)
