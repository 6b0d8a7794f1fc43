#!/usr/bin/env bash
# Adds released SGLang and its router to the virtual environment, to serve without a GPU. Their own
# dependency lists are for CUDA alone: what they need on a CPU is listed here, and they are
# installed without the rest. miles_plugins/sglang_cpu makes SGLang run on plain PyTorch.
set -euo pipefail
venv=$1
cd "$(dirname "$0")/.."

needed=(
    IPython apache-tvm-ffi compressed-tensors dill openai orjson partial-json-parser pybase64
    python-multipart pyzmq sentencepiece setproctitle soundfile torchvision uvloop xgrammar
    aiohttp einops fastapi gguf jsonschema msgspec numpy pillow psutil requests starlette torch
    transformers uvicorn
)
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check
    --constraint constraints.txt --constraint constraints-sglang-cpu.txt)

echo "Adding SGLang and its router (a minute)"
"${pip[@]}" "${needed[@]}"
"${pip[@]}" --no-deps sglang sglang-router
# Its entry points, of which SGLang's platform is one.
"${pip[@]}" --no-deps --editable .
