"""How the weight-streaming linear kernel (``streamed_linear.cuh``) is cut and launched. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skuda.kernels.launch import Constant, Launch, Leading, Parameter, Pointer, Step, TensorMap
from skuda.kernels.quantize import _cuda_linear, _warpgroup
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.dispatch.device import Device
    from skuda.kernels.quantize.quantized_linear import QuantizedLinearDescriptor
    from skuda.kernels.quantize.smoothquant_linear import SmoothQuantLinearDescriptor

_ATOM = 1024
_CHUNK = 128
_MOST_SHARED = 232_448
_MOST_STAGES = 64
_TOKENS = (8, 16, 32, 64)
_IN_FLIGHT = 64 << 10
_FEWEST_STAGES = 4
_MAKERS = 512
_DEEP = 4096
_SHARED_BY_TWO = 115_712


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: what the copy engine can read, and no more tokens than it is the fastest for.

    Parameters
    ----------
    weight : ElementKind
        s8 or u8; the activation may be either.
    """
    return (Between(field="m", maximum=_TOKENS[-1]), *_warpgroup.constraints(weight))


@dataclass(frozen=True, slots=True)
class Streamed:
    """One way to cut a product for few tokens.

    Attributes
    ----------
    tokens, groups, tall, chunks, cluster : int
        Compile-time flags of the same names: tokens of a tile; multiplying warpgroups, and products of 64 rows for
        each; chunks of 128 bytes of k in a stage; blocks that share a tile's k.
    atoms : int
        Eights of rows of the weight in a tile, and rows of its tensor map's box / 8.
    stages : int
        Depth of the ring.
    shared : int
        Dynamic shared memory, in bytes.
    promotion : int
        Bytes of second-level cache that a read of the weight's tensor map asks for.
    grid, block : (int, int, int)
        Launch geometry.
    """

    tokens: int
    groups: int
    tall: int
    chunks: int
    cluster: int
    atoms: int
    stages: int
    shared: int
    promotion: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


def rows_of(m: int, k: int) -> int:
    """Return ROWS, the flag of the kernel that makes its codes itself, or 0 where a kernel of their own is faster.

    Every block quantizes all tokens: that pays while it ends before the first weights have arrived.
    """
    return 0 if m > 4 or m * k > 16_384 else 1 << (m - 1).bit_length()


def streamed(m: int, n: int, k: int, sm_count: int, output_bytes: int = 2, *, fused: bool = False) -> Streamed | None:
    """Return the cut for a product of [m, k] by [n, k] codes, or None where another kernel must serve.

    Parameters
    ----------
    m, n, k : int
        The problem, none 0; k a multiple of 16.
    sm_count : int
        Multiprocessors of the device.
    output_bytes : int
        Bytes of an output element.
    fused : bool
        Whether the kernel makes the codes itself; then m is 8 at most.
    """
    if m > _TOKENS[-1] or (fused and m > 8) or k % 16 != 0:
        return None
    # With few rows for its way along k, a block is late: four share the way of four times the rows.
    few = k >= _DEEP and -(-n // 8) <= sm_count * min(2, k // _DEEP)
    cut = _cut(m, n, k, sm_count, output_bytes, 4, fused=fused) if few else None
    return cut or _cut(m, n, k, sm_count, output_bytes, 1, fused=fused)


def _cut(m: int, n: int, k: int, sm_count: int, output_bytes: int, cluster: int, *, fused: bool) -> Streamed | None:
    tokens = next(t for t in _TOKENS if t >= m)
    eights = -(-n // 8)
    if cluster == 1 and 2 * eights <= sm_count:  # too few rows for all: shorter tiles of tokens make more blocks
        tokens = min(tokens, 32)
    # At most 128 rows a tile: more of them leave fewer stages, fewer make codes the larger part of the traffic.
    clusters = sm_count // cluster
    atoms = -(-eights // (clusters * -(-eights // (16 * clusters))))
    groups = 2 if atoms > 8 else 1
    # Not every four multiprocessors can hold a cluster: with room for two blocks in each, all clusters run at once.
    room = _SHARED_BY_TWO if cluster > 1 else _MOST_SHARED
    tiles = -(-eights // atoms)
    width = min(tiles, clusters)
    for chunks in (4, 2, 1):
        if chunks * atoms > 8 and chunks > 2:
            continue
        steps = -(-k // (_CHUNK * chunks * cluster))
        fixed, stage = _bytes(tokens, groups, chunks, cluster, atoms, output_bytes)
        if fused:
            codes = chunks * tokens * _CHUNK
            fixed, stage = fixed + steps * codes, stage - codes
        fitting = min((room - fixed) // (stage + 16), _MOST_STAGES)
        if fitting >= _FEWEST_STAGES or chunks == 1:
            break
    used = steps * -(-tiles // width)
    wanted = max(_IN_FLIGHT, 8 * atoms * _ATOM) // (chunks * atoms * _ATOM)
    stages = min(used, fitting, max(_FEWEST_STAGES, wanted))
    # The last product of 64 rows may read beyond the tile's own: into what follows, which must be there.
    reach = 1024 + stages * chunks * atoms * _ATOM + (64 * groups - 8 * atoms) * _CHUNK
    shared = max(fixed + stages * (stage + 16), reach)
    if stages < min(2, used) or shared > _MOST_SHARED:
        return None
    return Streamed(
        tokens=tokens,
        groups=groups,
        tall=1,
        chunks=chunks,
        cluster=cluster,
        atoms=atoms,
        stages=stages,
        shared=shared,
        promotion=256 if atoms <= 8 else 128,
        grid=(width * cluster, -(-m // tokens), 1),
        block=(_MAKERS + 32 if fused else 128 * groups + 64, 1, 1),
    )


def _bytes(tokens: int, groups: int, chunks: int, cluster: int, atoms: int, output_bytes: int) -> tuple[int, int]:
    """Return the shared memory apart from the stages, and that of a stage; each stage has two barriers besides."""
    slab = 8 if tokens == 8 or output_bytes == 4 else 16
    staging = 4 * groups * slab * (16 * output_bytes + 16)
    sums = -(-(tokens // slab) // cluster) * cluster * (slab // 8) * groups * 2048 if cluster > 1 else 0
    return 1024 + staging + sums + 4 * tokens + 8, chunks * (atoms * _ATOM + tokens * _CHUNK)


def smoothquant(problem: SmoothQuantLinearDescriptor, device: Device) -> Launch:
    """Launch the product with a static activation scale: one kernel, no scratch.

    Parameters
    ----------
    problem : SmoothQuantLinearDescriptor
        The problem.
    device : Device
        Where it runs.
    """
    m, n, k = problem.m, problem.n, problem.k
    cut = _planned((m, n, k), device, problem.output_element)
    own = (Constant(ElementKind.F32, problem.act_scale), Pointer("act_scale_scratch"))
    maps = (TensorMap("act_q", m, k, cut.tokens), _weight(cut, n, k))
    step = _step("smoothquant_linear_streamed", cut, (*maps, *own, *_cuda_linear.epilogue(problem, m, n)))
    flags = _flags(cut, problem.activation_element, problem.output_element, problem.epilogue.name)
    return Launch(steps=(step,), flags=flags, notes=_notes(cut))


def quantized(problem: QuantizedLinearDescriptor, device: Device) -> Launch:
    """Launch the dynamic quantization and the product, as one kernel where that is faster.

    Parameters
    ----------
    problem : QuantizedLinearDescriptor
        The problem.
    device : Device
        Where it runs.
    """
    m, n, k = problem.m, problem.c_out, problem.k
    rows = rows_of(m, k) if m and n else 0
    cut = _planned((m, n, k), device, problem.output, fused=rows > 0)
    flags = _flags(cut, problem.code_element, problem.output, problem.epilogue.name)
    tail = _cuda_linear.epilogue(problem, m, n)
    entry = "quantized_linear_streamed"
    if rows:
        own: tuple[Parameter, ...] = (
            Pointer("activation"),
            Leading("activation"),
            Pointer("act_q_scratch"),
            Pointer("act_scale_scratch"),
            Constant(ElementKind.S32, problem.q_min),
            Constant(ElementKind.S32, problem.q_max),
        )
        step = _step(entry, cut, (_weight(cut, n, k), *own, *tail))
        notes = ("every block quantizes the activation itself: one launch", *_notes(cut))
        return Launch(steps=(step,), aligned=("activation",), flags=(*flags, f"-DROWS={rows}"), notes=notes)
    maps = (TensorMap("act_q_scratch", m, k, cut.tokens, otherwise="codes"), _weight(cut, n, k))
    product = _step(entry, cut, (*maps, *_cuda_linear.SCALES, *tail), overlaps=True)
    return _cuda_linear.behind_codes(problem, product, flags=flags, notes=_notes(cut))


def _planned(sizes: tuple[int, int, int], device: Device, output: ElementKind, *, fused: bool = False) -> Streamed:
    m, n, k = sizes
    sm_count = device.sm_count or _warpgroup.H200
    found = streamed(max(1, m), max(1, n), k, sm_count, output.bits // 8, fused=fused)
    if found is None:
        raise ValueError(f"m must be at most {_TOKENS[-1]} and k a multiple of 16; had m, n, k = {sizes}")
    return found if m and n else replace(found, grid=(0, 1, 1))


def _weight(cut: Streamed, n: int, k: int) -> TensorMap:
    return TensorMap("weight_q", n, k, 8 * cut.atoms, promotion=cut.promotion)


def _step(entry: str, cut: Streamed, parameters: tuple[Parameter, ...], *, overlaps: bool = False) -> Step:
    more = (Constant(ElementKind.S32, cut.atoms), Constant(ElementKind.S32, cut.stages))
    return Step(entry, cut.grid, cut.block, (*parameters, *more), shared=cut.shared, overlaps=overlaps)


def _notes(cut: Streamed) -> tuple[str, ...]:
    split = f", k shared by clusters of {cut.cluster}" if cut.cluster > 1 else ""
    tile = f"{8 * cut.atoms} rows of the weight by {cut.tokens} tokens"
    return (f"a block streams {tile}, {cut.stages} stages of {128 * cut.chunks} bytes of k{split}", _warpgroup.ALIGNED)


def _flags(cut: Streamed, code: ElementKind, output: ElementKind, epilogue: str) -> tuple[str, ...]:
    return (
        f"-DTOKENS={cut.tokens}",
        f"-DGROUPS={cut.groups}",
        f"-DTALL={cut.tall}",
        f"-DCHUNKS={cut.chunks}",
        f"-DCLUSTER={cut.cluster}",
        f"-DSKUDA_CODE={code}",
        f"-DSKUDA_OUT={output}",
        f"-DSKUDA_EPILOGUE={epilogue}",
    )
