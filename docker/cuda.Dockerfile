# An image for CUDA.  In the root of this repository:
#
#     docker build --file docker/cuda.Dockerfile --build-arg BASE=IMAGE --tag vl-trainer:cuda .
#
# IMAGE has Python 3.10 or later, a CUDA build of torch 2.11 to 2.15, which stays as it is, a C compiler and Python.h, with
# which Triton builds kernels at run time.
ARG BASE
FROM ${BASE}
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /workspace
COPY . .
RUN python3 -c "import torch; assert torch.version.cuda, 'BASE has a torch without CUDA'"
RUN command -v cc
RUN python3 -m pip install --editable .
RUN mm-train --version
