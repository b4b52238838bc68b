"""What each rank of `test_parallel_ranks` does."""

from __future__ import annotations

import itertools

import torch
from torch import distributed

from skuda.dispatch.shard import Shards
from skuda.dispatch.shard.shards import own
from skuda.kernels.linear.packed import UNITS
from skuda.torch import ColumnLinear, DynamicLinear, RowLinear, StaticLinear, TorchGroup
from skuda.torch.int4 import int4_linear

KINDS = ("dynamic", "static", "shifted and smooth", "4 bits")
CUTS = (
    *(("n", given, output) for given in ("whole", "rows", "columns") for output in ("whole", "columns")),
    *(("k", "columns", output) for output in ("whole", "rows")),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXACT = {"fullgraph": True, "dynamic": False, "options": {"emulate_precision_casts": True}}


class Worker:
    """All cases on one rank; every rank draws the same."""

    def __init__(self, rank: int, seed: int, *, on_gpu: bool) -> None:
        self.place = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        self.group, self.on_gpu = TorchGroup(), on_gpu
        self.host = torch.Generator().manual_seed(seed)
        self.generator = torch.Generator(self.place).manual_seed(seed)
        self.wrong: list[str] = []
        self.done = 0

    def number(self, low: int, high: int) -> int:
        """Draw an integer from `low` to `high`, without it."""
        return int(torch.randint(low, high, (), generator=self.host))

    def cut(self, total: int, unit: int = 1) -> tuple[int, ...]:
        """Draw sizes that are uneven, and may be 0. Parts begin at multiples of a unit."""
        ends = sorted(unit * self.number(0, total // unit + 1) for _ in range(self.group.count - 1))
        return tuple(b - a for a, b in itertools.pairwise((0, *ends, total)))

    def uniform(self, size: int, low: float, high: float) -> torch.Tensor:
        """Draw f32 numbers."""
        return torch.empty(size, device=self.place).uniform_(low, high, generator=self.generator)

    def layer(self, kind: str, n: int, k: int) -> DynamicLinear | StaticLinear:
        """Draw a whole layer."""
        if kind == "4 bits":
            linear = torch.nn.Linear(k, n, device=self.place)
            for parameter in linear.parameters():
                parameter.normal_(generator=self.generator)
            return int4_linear(linear, (0, 32, 64, 128)[self.number(0, 4)])
        weight = torch.empty(n, k, dtype=torch.int8, device=self.place).random_(-127, 128, generator=self.generator)
        scale = self.uniform(n, 0.001, 0.01)
        bias = self.uniform(n, -1, 1)
        if kind == "dynamic":
            return DynamicLinear(weight, scale, bias)
        shifted = kind != "static"
        zero = torch.tensor([self.number(-20, 20)], dtype=torch.int32, device=self.place)
        return StaticLinear(
            weight,
            scale,
            bias,
            input_scale=torch.tensor([0.02], device=self.place),
            input_zero_point=zero if shifted else None,
            smooth=self.uniform(k, 0.5, 2) if shifted else None,
        )

    def data(self, m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
        """Draw rows, a NaN and an infinity among them."""
        x = torch.empty(m, k, device=self.place).normal_(generator=self.generator).to(dtype)
        if m:
            for value in (torch.nan, torch.inf):
                x[self.number(0, m), self.number(0, k)] = value
        return x

    def compare(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Note whether the bits are the same; any NaN equals any other."""
        self.done += 1
        bits = {2: torch.int16, 4: torch.int32}[want.dtype.itemsize]
        if got.shape != want.shape or got.dtype is not want.dtype:
            self.wrong.append(f"{name}: {list(got.shape)} {got.dtype}, not {list(want.shape)} {want.dtype}")
            return
        different = got.contiguous().view(bits) != want.contiguous().view(bits)
        different &= ~(got.isnan() & want.isnan())
        if bool(different.any()):
            self.wrong.append(f"{name}: {int(different.sum())} of {want.numel()} elements differ")

    def case(self, number: int, kind: str, cut: tuple[str, str, str], n: int, k: int, rows: tuple[int, ...]) -> None:
        """Compare a split layer with the whole one: eager, captured, compiled, and with NumPy."""
        axis, given, output = cut
        whole = self.layer(kind, n, k)
        rank, split = self.group.rank, (n if axis == "n" else k)
        sizes = self.cut(split, UNITS[axis] if kind == "4 bits" else 1) if number % 2 else None
        of_input = self.cut(k) if (axis, given) == ("n", "columns") else None
        shards = Shards(
            axis=axis, count=self.group.count, sizes=sizes, input=given, output=output, input_sizes=of_input
        )
        if shards.divisible:
            shards = shards.model_copy(update={"chunks": self.number(1, 6)})
        shared = (ColumnLinear if axis == "n" else RowLinear)(whole, self.group, shards)
        shards = shared.shards  # with sizes for 4-bit weights

        def part(array: torch.Tensor, of: str, columns: tuple[int, ...]) -> torch.Tensor:
            """Return what this rank has of an array of all rows and columns."""
            if of == "whole":
                return array
            return own(array, int(of == "columns"), columns if of == "columns" else shards.rows(len(array)), rank)

        def mine(x: torch.Tensor) -> torch.Tensor:
            return part(x, given, shards.columns(k) if given == "columns" else ()).contiguous()

        def expected(y: torch.Tensor) -> torch.Tensor:
            return part(y, output, shards.parts(n, k))

        # Rows that the ranks have are counted on the host, so that graphs cannot hold them.
        held = given != "rows"
        for place, m in enumerate(rows):
            dtype = DTYPES[(number + place) % 3]
            x = self.data(m, k, dtype)
            name = f"{kind}, {axis} {given} {output}, {m}x{n}x{k} {dtype}, sizes {sizes}, {shards.chunks} chunks"
            self.compare(name, shared(mine(x)), expected(whole(x)))
            if m <= 2 and n * k < 1 << 23:
                self.compare(f"{name}, NumPy", shared(mine(x)).cpu(), expected(self.on_host(whole, x)))
            if held and (m == 16 or (m == 2048 and self.on_gpu)):
                self.replayed(name, shared, x, mine, lambda x: expected(whole(x)))
            if held and m == 3 and self.compiles(number, k):
                torch._dynamo.reset()
                self.compare(f"{name}, compiled", torch.compile(shared, **EXACT)(mine(x)), expected(whole(x)))

    def compiles(self, number: int, k: int) -> bool:
        """Whether a case is compiled, which takes seconds."""
        return k == 4097 if self.on_gpu else k == 72 and number % 8 == 0

    def on_host(self, whole: DynamicLinear | StaticLinear, x: torch.Tensor) -> torch.Tensor:
        """Return the output of a layer's copy on the CPU, which is NumPy's."""
        parts = {name: buffer.cpu() for name, buffer in whole.named_buffers()}
        kept = {name: parts.get(name) for name in ("weight", "weight_scale", "bias")}
        more = {name: parts.get(name) for name in ("input_scale", "input_zero_point", "smooth")}
        if isinstance(whole, DynamicLinear):
            more = {"in_features": whole.in_features}
        made = type(whole)(*kept.values(), **more)
        return made(x.cpu())

    def replayed(self, name, shared, x, mine, wanted) -> None:
        """Compare a captured run again and again, with changing inputs; on the CPU a replay is a call."""
        given = mine(x).clone()
        if self.on_gpu:
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                shared(given)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                held = shared(given)
        for number in range((100 if len(x) < 100 else 5) if self.on_gpu else 2):
            x.normal_(generator=self.generator)
            given.copy_(mine(x))
            if self.on_gpu:
                graph.replay()
                got = held
            else:
                got = shared(given)
            self.compare(f"{name}, replay {number}", got, wanted(x))

    def all(self) -> None:
        """Do all cases."""
        rows, sizes = (0, 1, 2, 3, 16, 128), ((40, 72), (33, 17))
        for number, (kind, cut) in enumerate(itertools.product(KINDS, CUTS)):
            for n, k in (*sizes, *(((40, 300),) if kind == "4 bits" else ())):
                self.case(number, kind, cut, n, k, rows)
            if self.on_gpu:
                self.case(number, kind, cut, 1536, 4097, (*rows, 2048))
                self.case(number, kind, cut, *((57344, 8192) if cut[0] == "n" else (8192, 28672)), (*rows, 2048, 8192))
                torch.cuda.empty_cache()
            else:
                self.case(number, kind, cut, 24, 16, (2048,))


def every(seed: int) -> tuple[int, list[str]]:
    """Do all cases; return how many results were compared, and what was wrong."""
    with torch.no_grad():
        worker = Worker(distributed.get_rank(), seed, on_gpu=distributed.get_backend() == "nccl")
        worker.all()
    distributed.barrier()
    return worker.done, worker.wrong
