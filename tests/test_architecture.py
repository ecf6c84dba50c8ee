"""Imports go one way; a newcomer can rely on the drawing in docs/explanation/architecture.md."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

from haav.views import extractors
from helpers import ROOT

PACKAGE = ROOT / "src" / "haav"
LAYERS = yaml.safe_load((ROOT / "docs" / "layers.yaml").read_text())
ORDER = [part for layer in LAYERS for part in layer["parts"]]
"""parts of the package; each may import those before it"""


def _name(file: Path, package: Path = PACKAGE) -> str:
    """`views.embedded.clip` of src/haav/views/embedded/clip.py"""
    return ".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


def _part(module: str) -> str:
    return module.partition(".")[0]


def _modules(package: Path = PACKAGE) -> dict[str, Path]:
    return {_name(file, package): file for file in package.rglob("*.py")}


def _imports(file: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, also within functions and for types only"""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "haav":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("haav.")}
    known = _modules()
    return {_longest(name.removeprefix("haav."), known) for name in names} - {""}


def _longest(name: str, known: dict[str, Path]) -> str:
    """The module that a dotted name is, or lies in; "" for the package's own names, e.g. __version__"""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def _edges(package: Path = PACKAGE) -> Iterator[tuple[str, str]]:
    for module, file in _modules(package).items():
        if module not in ("__init__", "__main__"):
            yield from ((module, other) for other in sorted(_imports(file)) if other != module)


def _upward(edges: Iterator[tuple[str, str]]) -> list[str]:
    """Imports of a later part, and cycles within a part"""
    wrong: list[str] = []
    inside: dict[str, set[str]] = {}
    for module, other in edges:
        if _part(module) != _part(other):
            if ORDER.index(_part(other)) > ORDER.index(_part(module)):
                wrong.append(f"haav.{module} imports haav.{other}")
        elif not other.startswith(f"{module}.") and not module.startswith(f"{other}."):
            inside.setdefault(module, set()).add(other)  # a package and its own files are one room
    try:
        TopologicalSorter(inside).prepare()
    except CycleError as error:
        wrong.append("in a circle: " + " → ".join(f"haav.{module}" for module in error.args[1]))
    return wrong


def test_imports_go_one_way() -> None:
    assert not _upward(_edges())


@pytest.mark.parametrize(
    ("module", "other"),
    [("model.layers", "train.loop"), ("config.schema", "model.build"), ("store.lmdb", "views.extract")],
)
def test_an_upward_import_is_found(module: str, other: str, tmp_path: Path) -> None:
    planted = tmp_path / "haav" / (module.replace(".", "/") + ".py")
    planted.parent.mkdir(parents=True)
    planted.write_text(f"def late():\n    from haav.{other.rpartition('.')[0]} import {other.rpartition('.')[2]}\n")
    assert _upward(_edges(tmp_path / "haav")) == [f"haav.{module} imports haav.{other}"]


def test_a_circle_within_a_part_is_found() -> None:
    edges = [("views.base", "views.live"), ("views.live", "views.base")]
    assert _upward(iter(edges))[0].startswith("in a circle: haav.views.")


def test_every_part_has_its_layer() -> None:
    assert set(ORDER) == {_part(module) for module in _modules()} - {"", "__init__", "__main__"}


def test_the_drawing_is_what_the_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))["draw"]()
    assert (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8") == drawn, "python docs/draw_architecture.py"


NAMES_VIEWS = (
    "views",
    "data.toy",  # the toy world's own
    "inference.convert",  # the release's
    "config.load",  # a "grid" of runs
)


def test_no_code_asks_for_a_view_by_its_name() -> None:
    """Who needs a view that can do something asks extractors what they declare."""
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno} '{node.value}'"
        for module, file in _modules().items()
        if not module.startswith(NAMES_VIEWS)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in list(extractors)
    ]
    assert not wrong


def test_model_never_sees_yaml_data_or_files() -> None:
    for module, file in _modules().items():
        if _part(module) != "model" or module == "model.build":
            continue  # the one place where settings meet modules
        allowed = {"model", "types", "registry", "errors", "distributed", "tracing", "cpu"} | (
            {"config"} if "contrast" in module else set()
        )
        assert {_part(other) for other in _imports(file)} <= allowed, module
        names = {node.names[0].name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import)}
        assert not names & {"yaml", "json", "os", "pathlib"}, module


def test_metrics_never_import_torch() -> None:
    for file in (PACKAGE / "evaluate").rglob("*.py"):
        assert "torch" not in file.read_text(), file


def test_no_pickle_is_loaded_anywhere() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in {"pickle.load", "pickle.loads", "exec", "eval"}, file
                if name == "torch.load":
                    safe = {word.arg: ast.unparse(word.value) for word in node.keywords}
                    assert safe.get("weights_only") == "True", file


def test_no_file_is_longer_than_a_sitting() -> None:
    long = {name: len(file.read_text().splitlines()) for name, file in _modules().items()}
    assert not {name: lines for name, lines in long.items() if lines > 400}
