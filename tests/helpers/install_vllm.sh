#!/usr/bin/env bash
# Installs vLLM's Python into a virtual environment that has torch, for tests/serving: without vLLM's kernel libraries,
# which need a GPU, and without the packages that only a server needs. The wheel (340 MB) is read and not kept.
#   tests/helpers/install_vllm.sh VERSION .venv/vllm-VERSION
set -euo pipefail
version=$1; python=$(realpath -s "$2")/bin/python
pip=("$python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install aiohttp blake3 cachetools cbor2 cloudpickle depyf diskcache einops 'fastapi<0.137' lark loguru msgspec openai \
    orjson partial-json-parser pillow prometheus_client py-cpuinfo pybase64 python-multipart pyzmq regex setproctitle tiktoken uvloop
"${pip[@]}" install --no-deps apache-tvm-ffi llguidance openai-harmony xgrammar
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"${pip[@]}" download --no-deps --only-binary=:all: -d "$work" "vllm==$version"
"$python" - "$work" <<'END'
import pathlib, re, sys, sysconfig, zipfile

site = pathlib.Path(sysconfig.get_path("purelib"))
(wheel,) = pathlib.Path(sys.argv[1]).glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    skipped = (".so", ".cuh", ".h", ".hpp", ".jpg", "/vllm-rs")
    archive.extractall(site, [name for name in archive.namelist() if not name.endswith(skipped)])
(metadata,) = site.glob("vllm-*.dist-info/METADATA")
# By this suffix vLLM knows that it runs on a CPU.
metadata.write_text(re.sub(r"\n(Version: .*)", r"\n\1+cpu", metadata.read_text(), count=1))
END
