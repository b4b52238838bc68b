"""Shared objects with the interface of `cutlass_rival.cu` that compute on the CPU; cc builds them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the stub of CUTLASS with")

_SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
static int tuned[3] = {-1, -1, -1};
const char *name(void) { return NAME; }
void tune(int swizzle, int raster, int split) { tuned[0] = swizzle; tuned[1] = raster; tuned[2] = split; }
int tuned_to(int at) { return tuned[at]; }
size_t workspace(int m, int n, int k) { return tuned[2] ? 128 : 64; }
static uint16_t rounded(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
int run(const int8_t *a, const int8_t *w, const float *sa, const float *sw, uint16_t *d, int m, int n, int k,
        void *space, size_t bytes, void *stream) {
  if (k % 16 || n % 8) return 1;
  if (FAILS) return FAILS;
  if (!space || bytes != workspace(m, n, k)) return 4;
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      int32_t sum = 0;
      for (int at = 0; at < k; ++at) sum += a[(size_t)i * k + at] * w[(size_t)j * k + at];
      volatile float scale = sa[i] * sw[j];
      d[(size_t)i * n + j] = rounded(scale * (float)sum);
    }
  return 0;
}
"""


def build(folder, *names, fails=0):
    """Build one object for each name into a folder; `fails` is what their run returns instead of 0."""
    folder.mkdir(exist_ok=True)
    source = folder / "stub.c"
    source.write_text(_SOURCE)
    for name in names:
        options = ["-O1", "-ffp-contract=off", "-shared", "-fPIC", f'-DNAME="{name}"', f"-DFAILS={fails}"]
        subprocess.run(["cc", *options, "-o", folder / f"{name}.so", source], check=True, capture_output=True)
    return folder
