# An image for Ascend NPUs.  In the root of this repository:
#
#     docker build --file docker/ascend.Dockerfile --build-arg BASE=IMAGE --tag vl-trainer:ascend .
#
# x86-64 and aarch64.  IMAGE has CANN with its operators, NNAL and Python 3.10 or later; TORCH is the version of torch and
# torch_npu that fits this CANN (docs/ascend.md).  Driver and firmware are the host's.
ARG BASE
FROM ${BASE}
ARG TORCH=2.12.0
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /workspace
COPY . .
RUN python3 -m pip install torch==${TORCH} --index-url https://download.pytorch.org/whl/cpu
RUN python3 -m pip install torch-npu==${TORCH}
RUN python3 -m pip install --editable '.[npu]'
RUN TORCH_DEVICE_BACKEND_AUTOLOAD=0 mm-train --version
