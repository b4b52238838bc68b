#!/usr/bin/env bash
# Builds what `skuda bench linear --cutlass FOLDER` compares with: build.sh FOLDER [NAME ...]
# One shared object per configuration of cutlass_rival.cu, for compute capability 9.0 (sm_90a); all of them, or those named.
# Needs nvcc 12.3 or newer, and pip, which fetches NVIDIA's nvidia-cutlass wheel (headers only) from PyPI once.
# CUTLASS_HEADERS names a folder where that wheel is unpacked already; else it is unpacked into FOLDER/headers.
# One compile at a time, a minute or so each; FOLDER/NAME.log has what nvcc said.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 1 ]; then
  sed -n '2,6s/^# //p' "$0" >&2
  exit 2
fi
out=$1
shift
headers=${CUTLASS_HEADERS:-$out/headers}
mkdir -p "$out"

# kernel: 0 plain, 1 pingpong, 2 cooperative, 3 cooperative with the stream-K scheduler, which also splits K
#        name                  M   N   K  CM CN kernel swap
table='
s64x16x256                     64  16 256  1  1  0  1
t64x64x256                     64  64 256  1  1  0  0
t64x128x128_pp_c2x1            64 128 128  2  1  1  0
t128x128x128_pp_c2x1          128 128 128  2  1  1  0
t128x128x128_pp_c1x2          128 128 128  1  2  1  0
t128x256x128_co_c2x1          128 256 128  2  1  2  0
t256x128x128_co_c1x2          256 128 128  1  2  2  0
t64x256x128_pp                 64 256 128  1  1  1  0
t128x128x128_sk               128 128 128  1  1  3  0
t128x128x128_sk_c2x1          128 128 128  2  1  3  0
t128x256x128_sk_c2x1          128 256 128  2  1  3  0
s128x64x256_sk                128  64 256  1  1  3  1
'
for name in "$@"; do
  if ! grep -q "^$name " <<< "$table"; then
    echo "no configuration $name; there are:$(awk 'NF {printf " %s", $1}' <<< "$table")" >&2
    exit 2
  fi
done
command -v nvcc > /dev/null || { echo "nvcc is not on PATH: install NVIDIA's CUDA toolkit" >&2; exit 1; }

if [ ! -d "$headers/cutlass_library/source/include/cutlass" ]; then
  mkdir -p "$headers"
  "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps -d "$headers" nvidia-cutlass==4.2.0.0
  "${PYTHON:-python3}" -m zipfile -e "$headers"/nvidia_cutlass-*.whl "$headers"
fi
include=$headers/cutlass_library/source

failed=0
while read -r name m n k cm cn kernel swap; do
  [ -n "$name" ] || continue
  if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
  begin=$(date +%s)
  # Whole or not at all: a bench loads every object that it finds.
  if ! nice -n 15 nvcc -shared -o "$out/.$name.part" "$here/cutlass_rival.cu" \
    -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 --expt-relaxed-constexpr -DNDEBUG \
    -I "$include/include" -I "$include/tools/util/include" \
    -DRIVAL_NAME="\"$name\"" -DRIVAL_M="$m" -DRIVAL_N="$n" -DRIVAL_K="$k" -DRIVAL_CM="$cm" -DRIVAL_CN="$cn" \
    -DRIVAL_KERNEL="$kernel" -DRIVAL_SWAP="$swap" \
    -cudart static -Xptxas -v -diag-suppress 177 \
    -Xcompiler -fPIC,-fvisibility=hidden \
    -Xlinker --exclude-libs=ALL -Xlinker -s -Xcompiler -static-libstdc++,-static-libgcc \
    < /dev/null > "$out/$name.log" 2>&1; then
    echo "$name: failed, see $out/$name.log" >&2
    tail -5 "$out/$name.log" >&2
    failed=1
    continue
  fi
  mv "$out/.$name.part" "$out/$name.so"
  if grep -q -e C7510 -e C7508 "$out/$name.log"; then echo "$name: wgmma serialized or setmaxnreg ignored" >&2; fi
  echo "$name: $(($(date +%s) - begin)) s"
done <<< "$table"
exit $failed
