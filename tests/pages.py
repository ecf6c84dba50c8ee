"""Code blocks of the documentation: collected, checked by the real parser, and run in a folder like a reader's.

A comment before a block says what is not done with it by default:

    <!-- slow: trains on two processes -->      run by `make test-all`
    <!-- not run: needs several machines -->    only its commands and flags are checked

Files that a page names but does not make are put there when they are first named, see `STAND_INS`.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from packaging.requirements import Requirement
from PIL import Image, ImageOps

import haav
from haav.cli.main import VERBS, main, parse
from haav.config import Config, override
from haav.config.load import find_recipe, flags_from
from haav.model.build import load_config
from haav.pretrained import SHIPPED
from haav.studies.grid import load_grid
from haav.studies.plan import Session
from helpers import ROOT, SAMPLES

PAGES = [
    "README.md",
    *(
        path.relative_to(ROOT).as_posix()
        for folder in ("", "how-to", "explanation", "reference")
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
]
"""`docs/experiments` is left out: its pages keep the commands of their day"""

LANGUAGES = {"console", "bash", "python", "toml", "text", "json", ""}
"""of fences; what is not among them would not be looked at"""

FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[\w ]+): (?P<reason>.+?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```", re.M | re.S
)

SHORTER = {
    "bridge": ["--epochs 1", "--folds 2"],
    "train": ["--train.epochs 1", "--train.epoch_steps 1"],
    "train, from nothing": ["--model.d_model 32", "--model.d_ff 64", "--model.heads 4", "--data.min_count 1"],
}
"""flags that commands get unless they have them: stand-ins for hours"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page"""

    page: str
    line: int
    language: str
    code: str
    mark: str
    reason: str

    @property
    def commands(self) -> list[str]:
        """Lines that a reader types"""
        if self.language == "console":
            return [line[2:] for line in self.code.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
        lines = self.code.replace("\\\n", " ").splitlines() if self.language == "bash" else []
        return [line for line in lines if line.strip() and not line.startswith("#")]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text[: match.start("code")].count("\n") + 1, match["language"], match["code"], mark, reason)
        for match in FENCE.finditer(text)
        for mark, reason in [(match["mark"] or "", match["reason"] or "")]
    ]


def haav_words(command: str) -> list[str] | None:
    """The arguments of a command that is nothing but `haav …`"""
    words = shlex.split(command, comments=True)
    plain = not re.search(r"[|<>&;]", re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", command))
    return words[1:] if plain and Path(words[0]).name == "haav" else None


# Checked, not run


def check(command: str) -> None:
    """Every program, module, flag, setting, recipe and extra that a command names must be there."""
    for part in re.split(r" \| ", command):
        program, *words = shlex.split(part, comments=True)
        name = Path(program).name
        if name == "haav":
            check_haav(words)
        elif name == "torchrun":
            check_haav(words[words.index("haav") + 1 :])
        elif name == "python":
            assert words[0] == "-m", command
            check_module(words[1])
        elif name == "make":
            subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)
        elif name == "pip":
            check_pip(words)
        else:
            assert name in {"cat", "curl", "docker"}, f"{name}: what is it, and how is it checked?"


def check_haav(words: list[str]) -> None:
    """Parse as the command line does; a setting and a recipe must be real ones."""
    function, values = parse(words)
    flags = flags_from(values.get("overrides") or [])
    if function is VERBS["train"] and values["recipe"]:
        load_config(file=find_recipe(values["recipe"]), flags=flags)
    elif function is VERBS["describe"]:
        load_config(values["preset"], values["config"], flags)
    elif function is VERBS["reproduce"]:
        (table, *_) = Session(Path("."), full=values["full"]).tables(values["table"] or "all")
        load_config(file=find_recipe(load_grid(table).recipe), flags=flags)
    elif flags:
        assert {section for section, *_ in flags} == {"decode"}, words
        override(Config(), "decode", {".".join(rest): setting.value for (_, *rest), setting in flags.items()})


def check_python(code: str) -> None:
    """Names of `haav` and the arguments of its classes and functions must be there."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "haav":
            getattr(haav, node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("haav."):
            named = dict.fromkeys(keyword.arg for keyword in node.keywords if keyword.arg)
            function = getattr(haav, ast.unparse(node.func).removeprefix("haav."))
            inspect.signature(function).bind_partial(*node.args, **named)


def check_module(module: str) -> None:
    if module.split(".")[0] == "benchmarks":
        assert (ROOT / Path(*module.split("."))).exists() or (ROOT / Path(*module.split("."))).with_suffix(
            ".py"
        ).exists()
    else:
        assert importlib.util.find_spec(module), module


def check_pip(words: list[str]) -> None:
    assert words[0] in {"install", "download"}, words
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    for word in words[1:]:
        if re.match(r"[A-Za-z]", word) and word != "wheels":
            wanted = Requirement(word)
            assert wanted.name != "haav" or wanted.extras <= set(extras), word


def inline_commands(page: str) -> Iterator[str]:
    """`haav …` in running text"""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for span in re.findall(r"`(haav [a-z][^`]*)`", text):
        yield re.sub(r"\s+", " ", span)


def check_inline(command: str) -> None:
    """Running text leaves out arguments: only the verb and the flags are checked."""
    _, verb, *words = command.split()
    assert verb in VERBS, command
    parameters = {name.replace("_", "-") for name in VERBS[verb].__annotations__}
    for word in words:
        flag = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and "." in flag:
            assert flag.split(".")[0] in Config.__dataclass_fields__, command
        elif word.startswith("--") and flag != "help":
            assert flag in parameters, command


# Run


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    port: int

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


@dataclass
class Reader:
    """Somebody who types a page's blocks in a folder of their own"""

    folder: Path
    shared: Path
    """what takes long to make and is copied from there"""
    servers: dict[tuple[str, ...], Server]
    """that run, by their words; pages share those that name no file"""
    ports: dict[str, int] = field(default_factory=dict)
    """what pages call a port, and the one that was free"""

    def run(self, block: Block) -> None:
        if block.language == "python":
            self._run_python(block)
        elif block.language == "toml":
            self._install(block)
        for command in block.commands:
            try:
                self._run_command(command)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{block.place}: {command}\n{error}") from error

    def _run_python(self, block: Block) -> None:
        file = re.match(r"# (\w+\.py)\n", block.code)
        if file:
            (self.folder / file[1]).write_text(block.code, encoding="utf-8")
        tree = ast.parse(block.code)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._provide(node.value)
        code = compile(tree, block.place, "exec")
        exec(code, {"__name__": file[1].removesuffix(".py") if file else "__main__"})

    def _install(self, block: Block) -> None:
        """What pip would make of a package with these entry points"""
        packages = self.folder / "page-1.0.dist-info"
        packages.mkdir()
        (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: page\nVersion: 1.0\n")
        lines = re.sub(r'^\[project\.entry-points\."(.+)"\]', r"[\1]", block.code, flags=re.M).replace('"', "")
        (packages / "entry_points.txt").write_text(lines)

    def _run_command(self, command: str) -> None:
        print(f"$ {command}", flush=True)
        words = haav_words(command)
        if words is None:
            self._shell(command)
            return
        function, values = parse(words)
        made = {"out", "explain"} | ({"store"} if words[0] in {"extract", "import"} else set())
        for name, value in values.items():
            for text in _texts(value) if name not in made else []:
                self._provide(text)
        if function is VERBS["serve"]:
            self._serve(words)
            return
        code = main([*words, *_shorter(*words)])
        assert code == 0, f"exit code {code}"
        for name in made & values.keys():
            assert values[name] is None or Path(values[name]).exists(), f"{values[name]} was not made"

    def _shell(self, command: str) -> None:
        for word in re.findall(r"[\w./-]+", command):
            self._provide(word)
        for named, port in self.ports.items():
            command = command.replace(f":{named}", f":{port}")
        if command.startswith("torchrun"):
            words = shlex.split(command)
            command = shlex.join([*words, *_shorter(*words[words.index("haav") + 1 :])])
        done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout.strip(), "said nothing"

    def _serve(self, words: list[str]) -> None:
        """Leave it running for the commands behind it. Somebody else may have its port."""
        named = words[words.index("--port") + 1] if "--port" in words else "8000"
        key = tuple(words) if words == ["serve"] else (*words, str(self.folder))
        if key not in self.servers:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, "-m", "haav", *words, "--port", str(port)]
            self.servers[key] = Server(subprocess.Popen(command, stdout=subprocess.PIPE, text=True), port)
            line = self.servers[key].process.stdout.readline()
            assert f":{port}" in line, line
        self.ports[named] = self.servers[key].port

    def _provide(self, name: str) -> None:
        """Make what a page names as the reader's own, unless it is there."""
        name = name.partition(":")[0]  # without the role of a data set
        name = re.sub(r"/[^/]*\*.*", "", name).rstrip("/")  # the folder of a pattern
        path = self.folder / name
        if path.exists() or not path.is_relative_to(self.folder):
            return
        for pattern, make in STAND_INS.items():
            if fnmatch(name, pattern):
                path.parent.mkdir(parents=True, exist_ok=True)
                make(path, self.shared)
                return


def _texts(value: Any) -> Iterator[str]:
    """The words in an argument: in lists, in settings, between commas"""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, str):
        yield from value.split(",")


def _shorter(verb: str, *words: str) -> list[str]:
    """`SHORTER` for a command"""
    flags = [*SHORTER.get(verb, [])]
    if verb == "train" and not {"--init", "toy"} & set(words):
        flags += SHORTER["train, from nothing"]
    if "--resume" in words:
        flags = []
    return [word for flag in flags if flag.split()[0] not in words for word in flag.split()]


# What readers have


SAID = {
    "astronaut.jpg": ("train", "a woman in an orange suit"),
    "cat.jpg": ("train", "a cat looking at the camera"),
    "coffee.jpg": ("train", "a cup of coffee on a table"),
    "mirrored.jpg": ("train", "a cup of coffee on a wooden table"),
    "motorcycles.jpg": ("val", "a motorcycle in a garage"),
    "rocket.jpg": ("val", "a rocket takes off"),
}
"""photos, their splits and captions"""


def _photo(path: Path, shared: Path) -> None:
    shutil.copy(SAMPLES / "cat.jpg", path)


def _photos(path: Path, shared: Path) -> None:
    path.mkdir(parents=True)
    for name in SAID.keys() - {"mirrored.jpg"}:
        shutil.copy(SAMPLES / name, path)
    with Image.open(SAMPLES / "coffee.jpg") as photo:
        ImageOps.mirror(photo).save(path / "mirrored.jpg")


def _holiday(path: Path, shared: Path) -> None:
    path.mkdir()
    _photo(path / "me.jpg", shared)


def _tar(path: Path, shared: Path) -> None:
    with tarfile.open(path, "w") as file:
        file.add(SAMPLES / "rocket.jpg", "rocket.jpg")


def _list(path: Path, shared: Path) -> None:
    path.write_text(f"{SAMPLES / 'cat.jpg'}\n")


def _dataset(path: Path, shared: Path) -> None:
    """As Karpathy's"""
    images = [
        {"filename": name, "split": split, "sentences": [{"raw": caption}]} for name, (split, caption) in SAID.items()
    ]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"images": images}, file)


def _table(path: Path, shared: Path) -> None:
    rows = [f"{name},{caption},{split}" for name, (split, caption) in SAID.items()]
    path.write_text("\n".join(["image,caption,split", *rows]) + "\n")


def _captions(path: Path, shared: Path) -> None:
    path.write_text(
        json.dumps({name: f"there is {caption}" for name, (split, caption) in SAID.items() if split == "val"})
    )


def _references(path: Path, shared: Path) -> None:
    path.write_text(json.dumps({name: [caption] for name, (split, caption) in SAID.items() if split == "val"}))


def _sentences(path: Path, shared: Path) -> None:
    """More than a text view takes"""
    things, places = (
        ("a dog", "two boats", "a child", "some birds", "a bus"),
        ("a beach", "a lake", "a street", "a hill"),
    )
    path.write_text("".join(f"{thing} near {place}\n" for thing in things for place in places))


def _store(path: Path, shared: Path) -> None:
    """The views that the shipped model reads"""
    if not (shared / "views").exists():
        _photos(shared / "photos", shared)
        assert (
            main(["extract", "--images", str(shared / "photos"), "--store", str(shared / "views"), "--model", "best"])
            == 0
        )
    shutil.copytree(shared / "views", path)


def _model(path: Path, shared: Path) -> None:
    shutil.copytree(SHIPPED / "best", path)


def _hdf5(path: Path, shared: Path) -> None:
    """Both of the layouts that a page imports"""
    import h5py

    draw = np.random.default_rng(0)
    shapes = {"whole": (128,), "five": (5, 32), "nine": (9, 16)}
    with h5py.File(path, "w") as file:
        if path.name.startswith("oscar"):
            file["1/obj_features"] = draw.normal(size=(3, 2054)).astype(np.float32)
        for part, shape in shapes.items() if path.name.startswith("txt_ctx") else ():
            file[f"1/{part}/features"] = draw.normal(size=(*shape, 768)).astype(np.float32)
            file[f"1/{part}/scores"] = draw.normal(size=shape).astype(np.float32)
            file[f"1/{part}/texts"] = np.full(shape, "a sentence", object).tolist()


STAND_INS: dict[str, Callable[[Path, Path], None]] = {
    "*.jpg": _photo,
    "photos": _photos,
    "holiday": _holiday,
    "*.tar": _tar,
    "list.txt": _list,
    "*.json.gz": _dataset,
    "captions.csv": _table,
    "captions.json": _captions,
    "others.json": _captions,
    "references.json": _references,
    "more-sentences.txt": _sentences,
    "views": _store,
    "my-model": _model,
    "one": _model,
    "two": _model,
    "three": _model,
    "runs/*/best": _model,
    "*.hdf5": _hdf5,
    "wheels": lambda path, shared: path.mkdir(),
}
"""by the pattern of a name; of two that fit, the first"""


def own_cache(folder: Path) -> Path:
    """The weights of this machine in another cache: pages remove some."""
    from haav.weights.cache import cache_folder

    shutil.copytree(cache_folder() / "weights", folder / "weights", copy_function=_link)
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def clone(folder: Path) -> None:
    """What pages read of a clone that is set up; `make` has nothing to install in it"""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("src/haav/samples", "tests/golden"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.prefix) / "bin")
    (folder / ".venv" / ".installed").touch()
