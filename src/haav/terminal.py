"""What the terminal shows."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from haav.describe import Description


def print_description(description: Description) -> None:
    console = Console()
    contrastive = "with" if description.contrastive else "without"
    console.print(
        f"[bold]{description.encoding}[/] encoding, [bold]{description.aggregator}[/] aggregator, "
        f"{contrastive} contrastive loss"
    )

    parts = _table("part", "parameters")
    for name, count in description.parts.items():
        parts.add_row(name, f"{count:,}")
    parts.add_section()
    parts.add_row("trained", f"{description.parameters:,}", style="bold")
    parts.add_row("needed by inference", f"{description.inference_parameters:,}")
    console.print(parts)

    views = _table("view", "tokens", "width", "positions")
    for name, spec in description.views.items():
        positions = [f"{index} < {size}" for index, size in spec.indices.items()] + ["boxes"] * spec.boxes
        views.add_row(name, f"≤ {spec.max_tokens}", str(spec.dim), ", ".join(positions) or "–")
    console.print(views)

    costs = _table("equal views", "encoding", "of it attention", "memory, once a photo", "one word", title="MFLOP")
    for count, cost in description.growth.items():
        costs.add_row(str(count), *_millions(cost.encoding, cost.encoding_attention, cost.memory, cost.step))
    costs.add_section()
    powers = description.exponents
    costs.add_row("grows as", *(f"V^{powers[name]:g}" for name in ("encoding", "encoding_attention", "memory", "step")))
    own = description.flops
    costs.add_row("this model", *_millions(own.encoding, own.encoding_attention, own.memory, own.step), style="bold")
    console.print(costs)


def _table(first: str, *numbers: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _millions(*counts: int) -> list[str]:
    return [f"{count / 1e6:,.1f}" for count in counts]
