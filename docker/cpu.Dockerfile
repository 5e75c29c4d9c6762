# An image for machines without accelerators: demos, tests, conversion, checks of data.  In the root of this repository:
#
#     docker build --file docker/cpu.Dockerfile --tag vl-trainer:cpu .
#
# x86-64 and aarch64.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
WORKDIR /workspace
COPY . .
RUN python3 -m pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
RUN python3 -m pip install --editable .
RUN mm-train --version
