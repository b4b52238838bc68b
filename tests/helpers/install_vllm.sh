#!/usr/bin/env bash
# Installs vLLM's Python, the torch that it demands, and a transformers that it admits, into a virtual environment that
# has the packages of another one with torch, for tests/serving.
#   tests/helpers/install_vllm.sh VERSION .venv/vllm-VERSION
# It leaves out vLLM's kernel libraries, which need a GPU, and packages that only a server needs. PyPI has torch for CUDA
# only. So torch's wheel is installed without NVIDIA's, which are 3 GB more, and stub_cuda.py makes up their libraries.
# What is large are the wheels of vLLM (300 MB) and torch (530 MB). An environment has 1.5 GB. It takes about 80 s of a
# processor, and two minutes where nothing else runs.
set -euo pipefail
version=$1; python=$(realpath -s "$2")/bin/python; here=$(cd "$(dirname "$0")" && pwd)
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
text = metadata.read_text()
needs = re.findall(r"\nRequires-Dist: ((?:torch|transformers)[<>=!~][^;\n]*)", text)
pathlib.Path(sys.argv[1], "needs").write_text("\n".join(needs))
# By this suffix vLLM knows that it runs on a CPU.
metadata.write_text(re.sub(r"\n(Version: .*)", r"\n\1+cpu", text, count=1))
END
rm "$work"/vllm-*.whl
"${pip[@]}" install "$(grep ^transformers "$work/needs")"
"${pip[@]}" install --no-deps --ignore-installed --no-compile "$(grep ^torch "$work/needs")"
"$python" "$here/stub_cuda.py"
