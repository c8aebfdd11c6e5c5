# quantkit in a container.
#
#   docker build -t quantkit .                            CPU
#   docker build -t quantkit:cuda --target cuda .         with CUDA; run it with --gpus all
#   docker build --build-arg EXTRAS=plots,serve,cluster -t quantkit .       other extras
#   docker run --rm -v "$PWD:/models" quantkit quantize model-bf16.gguf model.gguf Q4_K_M
#
# The CUDA libraries come from PyPI, so both variants have the same base; the host has the driver.

FROM python:3.13-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY recipes recipes
COPY quantkit quantkit
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim AS base
# Kernels are compiled on first use. A volume at /cache keeps them, and the files of the Hub.
ENV QUANTKIT_CACHE_DIR=/cache/quantkit HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 quantkit && install -d -m 700 -o quantkit -g quantkit /cache /cache/quantkit
COPY --from=wheel /wheels /wheels
WORKDIR /models
ENTRYPOINT ["quantkit"]
CMD ["--help"]

FROM base AS cuda
ARG EXTRAS=plots,serve,cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]"
USER 1000

FROM base AS cpu
ARG EXTRAS=plots,serve
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]"
USER 1000
