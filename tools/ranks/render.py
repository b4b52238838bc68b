"""The table of hashes on a terminal, 80 columns wide; plain text when piped."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skuda.tools.ranks.result import HashResult
from skuda.tools.ranks.work import WAYS

_ABOUT = """\
int8         skuda: linear layers split by Shards; ranks add up integers.
sliced int8  as serving engines split them: for o and down, each rank scales its
             own slice of K and rounds its part of the sum to bf16.
bf16         the same weights, exactly; each rank rounds its part to bf16, too.
Rounded parts are added in the order of the ranks. All else is the same in all
columns, and each operation of it is rounded in one order everywhere: norms and
gated activations are ops of skuda; attention is causal, head by head, in f32,
and written for this demo. Attention kernels of serving engines promise no such
order. There are no rotary positions, no cache and no head; nothing is sampled."""


def render(result: HashResult, console: Console) -> None:
    """Print the whole report."""
    sizes = result.sizes
    blocks = f"{sizes.blocks} block{'s' if sizes.blocks > 1 else ''}"
    _say(console, f"A transformer stack with random weights of seed {result.seed}, {blocks}:")
    _say(
        console,
        f"hidden size {sizes.hidden}, {sizes.heads} heads of queries, {sizes.kv_heads} of keys and values, MLP "
        f"{sizes.intermediate}.",
    )
    _say(
        console,
        "A hash is the first 12 hex digits of the sha256 of the output for the same\n"
        f"{sizes.positions} tokens, alone or in a batch of {result.sequences} sequences.",
    )
    console.print(table_of(result))
    _say(console, _ABOUT)
    against = ", ".join(f"{way} {figure:.1f} dB" for way, figure in result.sqnr_db.items())
    _say(console, f"Signal to noise against bf16, without ranks: {against}.")
    _say(console, f"Everything took {result.seconds:.1f} s.")
    console.print(verdict(result))


def table_of(result: HashResult) -> Table:
    """Return one row per line; a hash that differs from the first of its column is marked."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("ranks", justify="right")
    for heading in ("by", "on", "batch", *WAYS):
        table.add_column(heading, no_wrap=heading in WAYS)
    first, before = result.lines[0], None
    for line in result.lines:
        about = (str(line.ranks), _carried(line.carrier, line.framework), line.device)
        cells = [_cell(line.hashes[way], first.hashes[way][0]) for way in WAYS]
        table.add_row(*(about if about != before else ("", "", "")), line.batch, *cells)
        before = about
    counts = (f"{count} hash{'es' if count > 1 else ''}" for count in result.distinct.values())
    table.add_section()
    table.add_row("", "", "", "different", *counts, style="bold")
    return table


def verdict(result: HashResult) -> Text:
    """Return a line that says whether int8 gave one hash."""
    count, runs = result.distinct["int8"], sum(line.ranks for line in result.lines)
    if result.passed:
        return Text(f"PASS  int8: one hash in {runs} outputs", style="green")
    return Text(f"FAIL  int8: {count} hashes in {runs} outputs", style="bold red")


def _carried(carrier: str, framework: str) -> str:
    return framework if carrier == "none" else carrier


def _cell(hashes: tuple[str, ...], first: str) -> Text:
    """Return the hashes of the ranks, one below the other."""
    cell = Text()
    for number, one in enumerate(hashes):
        cell.append("\n" if number else "").append(one, style="" if one == first else "yellow")
    return cell


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
