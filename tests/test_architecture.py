"""Imports go one way; a newcomer can rely on the drawing in docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

from haav.views import extractors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "haav"

# Each module may import from its own layer's earlier lines and from all layers above it.
LAYERS = (
    ("errors", "types", "registry", "config"),
    (
        "provenance",
        "machine",
        "text",
        "model",
        "losses",
        "images",
        "files",
        "weights",
        "plots",
        "lanes",
        "page",
        "sources",
        "store",
        "sentences",
        "textdb",
        "bridge",
        "views",
        "evaluate",
        "calibrate",
        "consensus",
        "portable",
    ),
    ("presets", "recipes", "generate", "pretrained", "data", "extract", "importers", "shards", "predictions"),
    ("retrieval", "look"),
    ("captioner",),
    ("convert", "describe", "bench", "export", "predict", "train", "album", "bundle", "explain", "control"),
    ("ablate", "grids", "report"),
    ("terminal", "web"),
    ("verbs",),
    ("cli",),
)
SURFACE = {"__init__", "__main__"}
BASE_ORDER = ("errors", "types", "registry", "config")


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" if node.module == "haav" else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("haav.")}
    return found


def _module(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_one_way() -> None:
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        module = _module(file)
        if module in SURFACE:
            continue
        for other in _imports(file) - {module, "__version__"}:
            if rank[other] > rank[module]:
                wrong.append(f"{file.relative_to(ROOT)} imports haav.{other}")
            if rank[other] == rank[module] == 0 and BASE_ORDER.index(other) > BASE_ORDER.index(module):
                wrong.append(f"{file.relative_to(ROOT)} imports haav.{other}")
    assert not wrong


def test_every_module_has_its_layer() -> None:
    placed = {name for layer in LAYERS for name in layer}
    assert placed == {_module(file) for file in PACKAGE.rglob("*.py")} - SURFACE


NAMES_VIEWS = {
    "views",
    "bridge",  # the view that it is trained on unless another is named
    "data",  # the toy world's own
    "convert",  # the release's
    "importers",  # those of others' files
    "ablate",  # a "grid" of runs
}


def test_no_code_asks_for_a_view_by_its_name() -> None:
    """Who needs a view that can do something asks extractors what they declare."""
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno} '{node.value}'"
        for file in PACKAGE.rglob("*.py")
        if _module(file) not in NAMES_VIEWS
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in list(extractors)
    ]
    assert not wrong


def test_model_never_sees_yaml_data_or_files() -> None:
    for file in (PACKAGE / "model").rglob("*.py"):
        assert _imports(file) <= {"model", "types", "registry", "errors", "config"}, file
        if file.name != "build.py":
            assert "config" not in _imports(file), f"{file}: only build.py meets the config"
        names = {node.names[0].name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import)}
        assert not names & {"yaml", "json", "os", "pathlib"}, file


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


def test_architecture_page_shows_the_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for layer in LAYERS:
        for name in layer:
            assert f"`{name}`" in page, name
