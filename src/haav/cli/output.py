"""Terminal output: progress bars, captions and tables."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from haav.config import changed_settings
from haav.errors import printable
from haav.palette import TERMINAL, colours_of
from haav.types import Caption

if TYPE_CHECKING:  # commands without torch, such as haav weights, must not import it
    from haav.data.annotations import Check
    from haav.evaluate.scores import Difference, Report
    from haav.inference.stream import CaptionedPhoto
    from haav.studies.describe import Description
    from haav.train.loop import Status

MOST_SHOWN = 100
"""errors that are shown as they occur; the others are only counted"""
MOST_NAMED = 10
"""photos that failed, named at the end"""


@contextmanager
def progress(unit: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, or a line now and then if it is not a terminal. Call it with (done, todo).

    The first call tells what was done before.
    """
    if quiet:
        yield lambda done, todo: None
        return
    if not sys.stderr.isatty():
        yield _log_lines(unit)
        return
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}"))
    pace = _Pace()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(unit, total=None, pace="")
        yield lambda done, todo: bar.update(task, completed=done, total=todo, pace=pace(done, todo))


@contextmanager
def captions(
    todo: int, kept: int, views: Sequence[str], form: str, quiet: bool
) -> Iterator[Callable[[CaptionedPhoto], None]]:
    """Shows captions as they arrive, and failures on standard error. `kept`: those that were there before.

    `form`: "colours" (with a legend), "text", "csv", "json", or "file" for a progress bar only.
    """
    console, errors = Console(), Console(stderr=True)
    colours = colours_of(views, TERMINAL)
    table = csv.writer(sys.stdout, lineterminator="\n")
    done, weighed, failures = kept, set[str](), _Failures()
    if form == "csv":
        table.writerow(("image", "caption", "confidence"))
    with progress("photos", quiet or form != "file") as bar:
        bar(done, todo)

        def show(photo: CaptionedPhoto) -> None:
            nonlocal done
            done += 1
            name = printable(photo.name)
            if photo.caption is None:
                failures.add(name)
            if form == "json":
                print(json.dumps(photo.to_json()), flush=True)
            elif photo.caption is None:
                if failures.count <= MOST_SHOWN:
                    errors.print(Text(failure(photo), style="red"), soft_wrap=True)
            elif form == "colours":
                weighed.update(_views_of(photo.caption))
                _print_caption(console, name, photo.caption, colours)
            elif form != "file":
                for candidate in (photo.caption, *photo.caption.n_best):
                    if form == "csv":
                        table.writerow((name, candidate.text, f"{candidate.confidence:.4f}"))
                    else:
                        print(f"{name}\t{candidate.text}")
                sys.stdout.flush()
            bar(done, todo)

        yield show
    if weighed and console.color_system and not console.no_color and not quiet:
        legend = Text("words by the view that each trusts most:", style="dim")
        for view, colour in colours.items():
            if view in weighed:
                legend.append(f" {view}", style=colour)
        console.print(legend)
    if failures.count and todo > 1 and not quiet:
        errors.print(Text(f"{failures.count:,} of {todo:,} failed: {failures}", style="red"), soft_wrap=True)


def note(text: str) -> None:
    """A remark for people, apart from the results"""
    Console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)


def failure(photo: CaptionedPhoto) -> str:
    """What is said about a photo that failed. Its name comes first, once."""
    name, error = printable(photo.name), printable(str(photo.error), lines=True)
    return error if error.startswith((f"{name} ", f"cannot read {name}:")) else f"{name}: {error}"


class _Failures:
    """Counts photos that failed, and keeps the names of the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, name: str) -> None:
        self.count += 1
        if self.count <= MOST_NAMED:
            self.first.append(name)

    def __str__(self) -> str:
        more = self.count - len(self.first)
        return ", ".join(self.first) + (f" and {more:,} more" if more else "") + "."


def _views_of(caption: Caption) -> set[str]:
    """Views that have a weight for a word"""
    return {name for word in caption.words for name, weight in (word.views or {}).items() if weight > 0}


def _print_caption(console: Console, name: str, caption: Caption, colours: Mapping[str, str]) -> None:
    console.print(Text(name, style="dim"), soft_wrap=True)
    for rank, candidate in enumerate((caption, *caption.n_best)):
        line = Text("  ")
        for word in candidate.words:
            weights = word.views or {}
            strongest = max(weights, key=weights.__getitem__, default="")
            line.append(word.text, style=f"{'bold ' if not rank else ''}{colours.get(strongest, '')}".strip())
            line.append(" ")
        line.append(f" {100 * candidate.confidence:.0f} % sure", style="dim")
        if candidate.unfamiliar and not rank:
            line.append("; I may not know this kind of picture", style="dim")
        console.print(line, soft_wrap=True)


def first_process() -> bool:
    """Whether this is the first process of torchrun, the only one that prints."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """A line on standard error, from the first process only"""
    if first_process():
        print(line, file=sys.stderr, flush=True)


@contextmanager
def training() -> Iterator[Callable[[Status], None]]:
    """A progress bar with losses and captions per second on standard error, or log lines if it is not a terminal"""
    if not first_process():
        yield lambda status: None
        return
    if not sys.stderr.isatty():
        lines = _log_lines("steps")
        yield lambda status: lines(status.step, status.steps, _losses(status))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda status: bar.update(
            task, completed=status.step, total=status.steps, description=f"epoch {status.epoch + 1} {_losses(status)}"
        )


def _losses(status: Status) -> str:
    shown = ", ".join(f"{name} {value:.3f}" for name, value in status.losses.items() if name != "gradient norm")
    best = f", best CIDEr {100 * status.best:.1f}" if status.best > float("-inf") else ""
    return f"{shown}, {status.captions_per_second:.0f} captions/s{best}"


def _log_lines(unit: str, every: float = 30.0) -> Callable[..., None]:
    spoken = time.monotonic()
    pace = _Pace()

    def update(done: int, todo: int, note: str = "") -> None:
        nonlocal spoken
        now = time.monotonic()
        rate = pace(done, todo, now)
        if now - spoken >= every or (done == todo and todo):
            spoken = now
            tail = f": {note}" if note else ""
            print(f"{done:,} of {todo:,} {unit}{', ' if rate else ''}{rate}{tail}", file=sys.stderr, flush=True)

    return update


class _Pace:
    """Rate and remaining time, as a text. Both count what was done since the first call.

    Results of a batch arrive at once, so nothing is said in the first second.
    """

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None

    def __call__(self, done: int, todo: int, now: float | None = None) -> str:
        now = time.monotonic() if now is None else now
        behind, started = self.first = self.first or (done, now)
        if done == behind or now - started < 1:
            return ""
        rate = (done - behind) / (now - started)
        left = f", {(todo - done) / rate / 60:.0f} min left" if done < todo else ""
        return f"{rate:.1f}/s{left}"


def print_store(path: str, info: dict[str, Any]) -> None:
    table = _table("view", "photos", "lack it", "tokens", "width", "kB per photo", "made by", title=printable(path))
    for name, view in info["views"].items():
        table.add_row(
            name,
            f"{view['photos']:,}",
            f"{view['empty']:,}",
            f"≤ {view['max_tokens']}",
            str(view["dim"]),
            f"{view['bytes_per_photo'] / 1000:.1f}",
            view["fingerprint"][:24],
        )
    Console().print(table)


def print_weights(rows: Sequence[Mapping[str, Any]], cache: str) -> None:
    table = _table("weights", "here", "MB")
    for column in ("licence", "what"):
        table.add_column(column)
    for row in rows:
        here = "yes" if row["present"] else "–"
        table.add_row(row["name"], here, f"{row['bytes'] / 1e6:.0f}", row["licence"], row["about"])
    console = Console()
    console.print(table)
    console.print(f"in {cache}", style="dim", soft_wrap=True, markup=False, highlight=False)


def print_check(check: Check) -> None:
    table = _table("split", "photos", "captions")
    for split, photos in check.photos.items():
        table.add_row(split, f"{photos:,}", f"{check.captions.get(split, 0):,}")
    console = Console()
    console.print(table)
    counts = ", ".join(f"{photos:,} with {captions}" for captions, photos in check.captions_per_photo.items())
    console.print(f"captions per photo: {counts}")
    if check.machine_captions:
        console.print(f"{check.machine_captions:,} further captions by captioning systems")
    if check.surplus:
        console.print(f"{check.surplus:,} pictures that no annotation names")
    if check.duplicates:
        console.print(Text(f"{len(check.duplicates):,} pictures are there twice, first: {_pair(check.duplicates[0])}"))
    if check.missing:
        missing = f"{len(check.missing):,} photos are missing, first: {printable(check.missing[0])}"
        console.print(Text(missing, style="red"))
    if check.shared:
        shared = f"{len(check.shared):,} photos are shared between splits: {_pair(check.shared[0])}"
        console.print(Text(shared, style="red"))


def _pair(names: tuple[str, str]) -> str:
    return " = ".join(map(printable, names))


def print_report(
    report: Report, other: Report | None = None, differences: Mapping[str, Difference] | None = None
) -> None:
    """Print scores × 100, as in papers."""
    from haav.evaluate.scores import METRICS

    console = Console()
    columns = ("score", "95 % interval", *(("other", "difference", "95 % interval", "p") if other else ()))
    table = _table("", *columns)
    for name in METRICS:
        if name not in report.scores:
            table.add_row(name, "–")
            continue
        score = report.scores[name]
        row = [f"{100 * score.value:.1f}", f"{100 * score.low:.1f} … {100 * score.high:.1f}"]
        if other and differences:
            difference = differences[name]
            row += [f"{100 * other.scores[name].value:.1f}", f"{100 * difference.value:+.1f}"]
            row += [f"{100 * difference.low:+.1f} … {100 * difference.high:+.1f}", f"{difference.p:.3f}"]
        table.add_row(name, *row)
    console.print(table)
    for name, reason in report.reasons.items():
        console.print(f"{name}: – ({reason})", highlight=False, markup=False, soft_wrap=True)
    words = _table("", "captions", *(("other",) if other else ()))
    for name, value in report.wording.items():
        values = [value, *([other.wording[name]] if other else [])]
        counted = name in ("words a caption", "vocabulary used")
        words.add_row(name, *(f"{entry:,.1f}" if counted else f"{100 * entry:.1f} %" for entry in values))
    console.print(words)
    console.print(report.signature, style="dim", highlight=False, soft_wrap=True)


def print_control(study: str, changes: Mapping[str, Any]) -> None:
    """Print how the weight of a view changes when it is disturbed, with 95 % intervals."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fits into 80 columns with every name in full
    table.add_column("view", no_wrap=True)
    columns = ("weight", "then", "change", "95 % interval", "effect", "photos that drop", "steps that drop")
    for column in ("photos", *columns):
        table.add_column(column, justify="right", min_width=max(map(len, column.split())))
    for name, view in changes.items():
        table.add_row(name, style="bold")
        if study == "noise":
            rows = {f"{100 * float(share):.0f} %": row for share, row in view["shares"].items()}
        else:
            rows = {key: view[key] for key in ("at the word", "at other words") if view[key]}
        for spoilt, row in rows.items():
            table.add_row(
                f"  {spoilt}",
                f"{row['photos']:,}",
                *(f"{100 * row[key]:.1f}" for key in ("clean", "disturbed")),
                f"{100 * row['mean']:+.1f}",
                f"{100 * row['low']:+.1f} … {100 * row['high']:+.1f}",
                f"{row['effect']:+.2f}",
                *(f"{100 * row[key]:.0f} %" for key in ("photos_that_drop", "steps_that_drop")),
            )
    Console().print(table)


def print_description(description: Description) -> None:
    console = Console()
    contrastive = "with" if description.contrastive else "without"
    console.print(
        f"[bold]{description.encoding}[/] encoding, [bold]{description.decoder}[/] decoder, "
        f"[bold]{description.aggregator}[/] aggregator, {contrastive} contrastive loss"
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

    costs = _table("equal views", "encoding", "of it attention", "memory, once per photo", "one word", title="MFLOP")
    for count, cost in description.growth.items():
        costs.add_row(str(count), *_millions(cost.encoding, cost.encoding_attention, cost.memory, cost.step))
    costs.add_section()
    powers = description.exponents
    costs.add_row("grows as", *(f"V^{powers[name]:g}" for name in ("encoding", "encoding_attention", "memory", "step")))
    flops = description.flops
    costs.add_row(
        "this model", *_millions(flops.encoding, flops.encoding_attention, flops.memory, flops.step), style="bold"
    )
    console.print(costs)


def print_settings(section: str, settings: Any) -> None:
    """Print the settings of a section that differ from the defaults."""
    changed = [f"{name} {value}" for name, value in changed_settings(settings).items()]
    Console().print(f"{section}: {', '.join(changed) or 'default settings'}", highlight=False, soft_wrap=True)


def _table(first: str, *columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)  # names stay whole; the other columns give way
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _millions(*counts: int) -> list[str]:
    return [f"{count / 1e6:,.1f}" for count in counts]
