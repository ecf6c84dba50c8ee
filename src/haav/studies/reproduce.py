"""`haav reproduce`: run the tables of the paper, one after another, and write the verdicts on its claims.

Everything is read from the folders of the runs, so any session can be cut off, and the next goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from haav.errors import ConfigError, HaavError
from haav.files import make_folder
from haav.studies.ablate import run_grid
from haav.studies.grid import Grid
from haav.studies.plan import Session
from haav.studies.texts import cut_texts
from haav.studies.trained import study_models
from haav.studies.verdicts_page import write_page


def reproduce(session: Session, tables: Sequence[str]) -> None:
    """Run what is left of the tables, in their order. The page and the JSON are written first, and after each."""
    session.check_rows(tables)
    make_folder(session.out)
    write_page(session)  # so that wrong settings and damaged results are told before hours of training
    failed: list[HaavError] = []
    for name in tables:
        grid = session.grid(name)
        reasons = {row.name: session.missing(grid, row) for row in session.chosen(grid)}
        for row, reason in reasons.items():
            if reason:
                session.report(f"{name}: {row} is not run: {reason}")
        rows = [row for row, reason in reasons.items() if not reason]
        try:
            if rows:
                _run(session, name, grid, rows)
        except HaavError as error:  # raised when the other tables are done
            session.report(f"{name}: {error}")
            failed.append(error)
        finally:
            write_page(session)
    if failed:
        raise failed[0]
    if len(tables) == 1 and not rows:
        raise ConfigError(f"no row of '{tables[0]}' can be run: {next(iter(reasons.values()))}.")


def _run(session: Session, name: str, grid: Grid, rows: Sequence[str]) -> None:
    folder = session.folder(name)

    def prepare(settings: Mapping[str, str]) -> Mapping[str, str]:
        if not grid.cut_texts or settings.get("data.dataset") == "toy":
            return settings
        return cut_texts(settings, session.out / "texts", session.bridge, session.textdb, session.report)

    if grid.study == "growth":
        grid = replace(grid, settings={**grid.settings, **session.overrides})
    if grid.is_trained:
        run_grid(grid, folder, session.overrides, session.workers, session.report, session.out, prepare, rows)
    study_models(grid, folder, session.images, session.report)
