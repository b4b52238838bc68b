"""Tiles and launch rule of the weight-streaming linear kernel (``streamed.cuh``). Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from skuda.kernels.launch import Launch, Parameter, Step, TensorMap, pointers, s32, strided
from skuda.kernels.linear import hopper, layer
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.dispatch.device import Device

_ATOM = 1024
_CHUNK = 128
_MOST_STAGES = 64
_TOKENS = (8, 16, 32)
_IN_FLIGHT = 64 << 10
_FEWEST_STAGES = 4
_QUANTIZERS = 512
_DEEP = 4096
_SHARED_BY_TWO = 115_712


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: operands that TMA can read, and no more tokens than it is the fastest for.

    `weight` is s8 or u8; the activation may be either.
    """
    return (Between(field="m", maximum=_TOKENS[-1]), *hopper.constraints(weight))


@dataclass(frozen=True, slots=True)
class Streamed:
    """One tiling of a product for few tokens.

    Attributes
    ----------
    tokens, groups, tall, chunks, cluster : int
        Compile-time flags of the same names: tokens of a tile; multiplying warpgroups, and products of 64 rows for
        each; chunks of 128 bytes of k in a stage; blocks that share a tile's k.
    atoms : int
        Rows of the weight in a tile, and in the box of its tensor map, divided by 8.
    stages : int
        Stages of the ring.
    shared : int
        Dynamic shared memory, in bytes.
    promotion : int
        Bytes of L2 promotion of the weight's tensor map.
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

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags of the tiling."""
        named = ("tokens", "groups", "tall", "chunks", "cluster")
        return tuple(f"-D{name.upper()}={getattr(self, name)}" for name in named)


def rows_of(m: int, k: int) -> int:
    """Return ROWS, the flag of the kernel that quantizes the activation itself, or 0 if a separate kernel is faster.

    Every block quantizes all tokens, which pays while it ends before the first weights have arrived.
    """
    return 0 if m > 2 or m * k > 16_384 else 1 << (m - 1).bit_length()


def cut_for(
    sizes: tuple[int, int, int],
    sm_count: int,
    output_bytes: int,
    *,
    fused: bool,
    zero_points: tuple[bool, bool] = (False, False),
) -> Streamed:
    """Return the tiling for a product of m, n and k.

    `fused` if the kernel quantizes the activation itself; `zero_points` says of activation and weight whether they have
    any.
    """
    m, n, k = max(1, sizes[0]), max(1, sizes[1]), sizes[2]
    # With few rows and a long k a block finishes late: four blocks share the k of a tile of four times the rows.
    # Sums of codes, which zero points need, are those of all of k.
    few = k >= _DEEP and -(-n // 8) <= sm_count * min(2, k // _DEEP) and not any(zero_points)
    served = m <= _TOKENS[-1] and k % 16 == 0
    for cluster in ((4, 1) if few else (1,)) if served else ():
        cut = _cut((m, n, k), sm_count, output_bytes, cluster, fused=fused, zero_points=zero_points)
        if cut is not None:
            return cut if 0 not in sizes[:2] else replace(cut, grid=(0, 1, 1))
    raise ValueError(f"m must be at most {_TOKENS[-1]} and k a multiple of 16; had m, n, k = {sizes}")


def _cut(
    sizes: tuple[int, int, int],
    sm_count: int,
    output_bytes: int,
    cluster: int,
    *,
    fused: bool,
    zero_points: tuple[bool, bool],
) -> Streamed | None:
    m, n, k = sizes
    tokens = next(t for t in _TOKENS if t >= m)
    eights = -(-n // 8)
    if cluster == 1 and 2 * eights <= sm_count:  # too few rows for all: smaller tiles of tokens
        tokens = min(tokens, 32)
    # At most 128 rows a tile: more leave fewer stages, and with fewer rows the codes are most of the traffic.
    clusters = sm_count // cluster
    atoms = -(-eights // (clusters * -(-eights // (16 * clusters))))
    groups = 2 if atoms > 8 else 1
    # Not every group of four multiprocessors can hold a cluster; with two blocks per multiprocessor all clusters run.
    room = _SHARED_BY_TWO if cluster > 1 else hopper.MOST_SHARED
    tiles = -(-eights // atoms)
    width = min(tiles, clusters)
    ones = 8 * _ATOM if zero_points[1] else _ATOM if zero_points[0] else 0
    for chunks in (4, 2, 1):
        if chunks * atoms > 8 and chunks > 2:
            continue
        steps = -(-k // (_CHUNK * chunks * cluster))
        fixed, stage = _bytes(tokens, groups, chunks, cluster, atoms, output_bytes)
        fixed += ones + 4 * tokens * zero_points[0]
        if fused:
            codes = chunks * tokens * _CHUNK
            fixed, stage = fixed + steps * codes, stage - codes
        fitting = min((room - fixed) // (stage + 16), _MOST_STAGES)
        if fitting >= _FEWEST_STAGES or chunks == 1:
            break
    used = steps * -(-tiles // width)
    wanted = max(_IN_FLIGHT, 8 * atoms * _ATOM) // (chunks * atoms * _ATOM)
    stages = min(used, fitting, max(_FEWEST_STAGES, wanted))
    # The last product of 64 rows may read beyond the tile's rows, so shared memory must extend that far.
    reach = 1024 + ones + stages * chunks * atoms * _ATOM + (64 * groups - 8 * atoms) * _CHUNK
    shared = max(fixed + stages * (stage + 16), reach)
    if stages < min(2, used) or shared > hopper.MOST_SHARED:
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
        block=(_QUANTIZERS + 32 if fused else 128 * groups + 64, 1, 1),
    )


def _bytes(tokens: int, groups: int, chunks: int, cluster: int, atoms: int, output_bytes: int) -> tuple[int, int]:
    """Return the bytes of shared memory outside the stages and of a stage; each stage also has two barriers."""
    slab = 8 if tokens == 8 or output_bytes == 4 else 16
    staging = 4 * groups * slab * (16 * output_bytes + 16)
    sums = -(-(tokens // slab) // cluster) * cluster * (slab // 8) * groups * 2048 if cluster > 1 else 0
    return 1024 + staging + sums + 4 * tokens + 8, chunks * (atoms * _ATOM + tokens * _CHUNK)


def launch(problem: LinearProblem, device: Device) -> Launch:
    """Launch the product, after or fused with the quantization of a dynamic activation, whichever is faster."""
    m, n, k = problem.sizes
    rows = rows_of(m, k) if problem.dynamic and m and n else 0
    zero_points = problem.shifts_activation, problem.has_weight_zero_point
    sm_count, width = device.sm_count or hopper.H200, problem.output.bits // 8
    cut = cut_for((m, n, k), sm_count, width, fused=rows > 0, zero_points=zero_points)
    weight = TensorMap("weight_q", n, k, 8 * cut.atoms, promotion=cut.promotion)
    if rows:
        operands: tuple[Parameter, ...] = (weight, *_activation(problem))
    elif problem.dynamic:
        codes = TensorMap("act_q_scratch", m, k, cut.tokens, otherwise="codes")
        operands = (codes, weight, *layer.SCALES)
    else:
        operands = (TensorMap("act_q", m, k, cut.tokens), weight, *layer.given_scales(problem))
    product = Step(
        entry=f"{problem.op_name()}_streamed",
        grid=cut.grid,
        block=cut.block,
        parameters=(*operands, *layer.epilogue_parameters(problem), *s32(cut.atoms, cut.stages)),
        shared=cut.shared,
        overlaps=True,
    )
    flags, notes = (*cut.flags, *layer.epilogue_flags(problem)), _notes(cut)
    if rows:
        notes = ("every block quantizes the activation itself: one launch", *notes)
        return Launch(steps=(product,), aligned=("activation",), flags=(*flags, f"-DROWS={rows}"), notes=notes)
    return layer.launch_product(problem, product, flags=flags, notes=notes)


def _activation(problem: Any) -> tuple[Parameter, ...]:
    """Return the activation parameters of a kernel that quantizes the activation itself."""
    scratch = pointers("act_q_scratch", "act_scale_scratch")
    return (*strided("activation"), *scratch, *s32(problem.q_min, problem.q_max))


def _notes(cut: Streamed) -> tuple[str, ...]:
    split = f", k shared by clusters of {cut.cluster}" if cut.cluster > 1 else ""
    tile = f"{8 * cut.atoms} rows of the weight by {cut.tokens} tokens"
    return (f"a block streams {tile}, {cut.stages} stages of {128 * cut.chunks} bytes of k{split}", hopper.ALIGNED)
