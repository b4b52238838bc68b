"""Makes the ordinary wheel of torch import without NVIDIA's libraries, 4 GB, of which a CPU runs nothing.

`python stub_cuda.py` writes one library beside those of the interpreter's torch, and links for the names of all that it
stands for. Every function of it returns "no device", which torch takes for a machine without a GPU.
"""

import re
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

_ABSENT = "lib(cu|nccl|nvrtc|nvshmem)(?!da.so)"  # the tests have a driver of their own
_NO_DEVICE = 100

folder = Path(sysconfig.get_path("purelib"), "torch", "lib")
files, wanted, defined = set(), set(), set()
for library in folder.glob("*.so*"):
    if re.match(_ABSENT, library.name):  # of an earlier run
        library.unlink()
        continue
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", library]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files |= {name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", text) if re.match(_ABSENT, name)}
    for section, name in re.findall(r"GLOBAL +DEFAULT +(\w+) (\S+)", text):
        (wanted if section == "UND" else defined).add(name)
versions = defaultdict(set)
for name, _, version in (name.partition("@") for name in wanted - defined):
    if re.match(_ABSENT, version) or re.match(_ABSENT, f"lib{name}"):
        versions[version].add(name)
names = sorted(set().union(*versions.values()))
script = "".join(f"{version} {{ global: {'; '.join(each)}; }};\n" for version, each in versions.items() if version)
with tempfile.TemporaryDirectory() as work:
    source, exports, first = Path(work, "stub.c"), Path(work, "stub.map"), min(files)
    source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names))
    exports.write_text(script)
    command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,--version-script={exports}", "-o", folder / first, source]
    subprocess.run(command, check=True)
for file in files - {first}:
    folder.joinpath(file).symlink_to(first)
