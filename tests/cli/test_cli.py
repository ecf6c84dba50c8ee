"""The commands as a user types them."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from haav import Captioner, __version__
from haav.cli import output
from haav.cli.main import VERBS, main
from haav.config import DecodeConfig, load
from haav.generate.backends import OnnxModel
from haav.inference.convert import convert
from haav.text import SPECIAL
from helpers import ROOT, SAMPLES, save_model

GOLDEN = ROOT / "tests" / "golden" / "release.safetensors"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("flags", "parameters"),
    [
        ([], 15_361_036),
        (["--contrastive", "false"], 13_520_396),
        (["--encoding", "unshared", "--contrastive", "false"], 20_812_556),
        (["--encoding", "unshared"], 22_653_196),
        (["--encoding", "concat_views"], 13_120_268),
        (["--encoding", "model_per_view"], 49_104_908),
    ],
)
def test_release_has_the_papers_parameter_counts(
    capsys: pytest.CaptureFixture[str], flags: list[str], parameters: int
) -> None:
    code, out, _ = run(capsys, "describe", "--preset", "release", "--json", *flags)
    assert code == 0
    assert json.loads(out)["parameters"] == parameters
    assert f'"parameters": {parameters}' in out


def test_fidelity_page_has_the_counts_of_the_preset_paper(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(run(capsys, "describe", "--preset", "paper", "--json")[1])
    page = (ROOT / "docs" / "explanation" / "fidelity.md").read_text(encoding="utf-8")
    assert f"{data['parameters']:,} parameters ({data['inference_parameters']:,} for inference)" in page


def test_describe_prints_parts_views_and_growth(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "describe", "--preset", "release", "--encoding", "concat_views")
    assert code == 0
    for text in ("13,120,268", "text_five", "crop < 5, rank < 16", "V^1.9", "one word"):
        assert text in out


def test_describe_json_has_costs(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "describe", "--preset", "release", "--json")
    data = json.loads(out)
    assert data["inference_parameters"] == 13_520_396
    assert data["exponents"] == {"encoding": 1, "encoding_attention": 1, "memory": 1, "step": 1}
    assert set(data["flops"]) == {"encoding", "encoding_attention", "memory", "step"}
    assert set(data["growth"]) == {"1", "2", "4", "8", "16"}


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_an_imperative_and_a_noun_phrase_per_argument(verb: str) -> None:
    first, _, rest = (inspect.getdoc(VERBS[verb]) or "").partition("\n")
    assert re.fullmatch(r"(?!The |An? |One |What |How )[A-Z][a-z].{10,100}[.?]", first), first
    assert not rest or rest.startswith("\n")
    hints = typing.get_type_hints(VERBS[verb], include_extras=True)
    for name, hint in hints.items():
        if name in ("overrides", "return"):
            continue
        doc = next(arg for arg in (hint, *typing.get_args(hint)) if hasattr(arg, "__metadata__")).__metadata__[0]
        assert re.fullmatch(r"[^\n]{4,100}[^.\n]", doc), (name, doc)
        assert not re.match(r"(?i)(the|of|which|where|how|so many|at most) ", doc), (name, doc)


def test_settings_can_be_given_with_dots_and_equals_signs(capsys: pytest.CaptureFixture[str]) -> None:
    _, small, _ = run(capsys, "describe", "--json", "--model.d_model", "64", "--model.vocabulary_size=100")
    assert json.loads(small)["parameters"] < 3_000_000


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["descrbe"], 2, "unknown command 'descrbe'. Did you mean 'describe'?"),
        (["describe", "--presett", "x"], 2, "unknown flag '--presett'. Did you mean '--preset'?"),
        (["describe", "--preset", "papr"], 2, "unknown preset 'papr'. Did you mean 'paper'?"),
        (
            ["describe", "--aggregator", "hierarchal"],
            2,
            "Did you mean 'hierarchical'?\n  Available: auto, concat_tokens,",
        ),
        (["describe", "--encoding", "concat_views", "--contrastive", "true"], 2, "nothing to contrast"),
        (["describe", "--model.d_model"], 2, "--model.d_model needs a value"),
        (["convert", "a.safetensors", "out", "--model.d_model", "3"], 2, "takes no settings"),
        (["convert", "a.safetensors"], 2, "required: out"),
        (["convert", "none.safetensors", "out"], 1, "none.safetensors is missing"),
        (["convert", "none.pth", "out"], 1, "none.pth is missing"),
        (["--model.d_model", "5"], 2, "required: VERB"),
        (["convert", str(GOLDEN), "out", "--heads", "0"], 2, "--heads must be at least 1, not 0"),
        ([], 2, ""),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str) -> None:
    try:
        found = main(words)
        err = capsys.readouterr().err
    except SystemExit as stop:
        err = capsys.readouterr().err
        found, err = (stop.code, err) if isinstance(stop.code, int) else (1, str(stop.code))
    assert says in err
    assert found == code
    assert "Traceback" not in err


def test_convert_writes_a_model_that_captions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "convert", str(GOLDEN), str(tmp_path / "m"))
    assert (code, "4 views, width 32, 61 words" in out) == (0, True)
    assert "Without --vocabulary, words are named by id" in err
    assert {"contrast.safetensors", "model.safetensors"} <= {file.name for file in (tmp_path / "m").iterdir()}
    again = Captioner.from_pretrained(tmp_path / "m")
    assert again.vocabulary.words[:5] == (*SPECIAL, "word4")
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            again.model.state_dict().values(), convert(GOLDEN).captioner.model.state_dict().values(), strict=True
        )
    )


def test_convert_reads_pth_without_running_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = {k.removeprefix("weights."): v for k, v in load_file(GOLDEN).items() if k.startswith("weights.")}
    words = [*SPECIAL, *(f"v{index}" for index in range(4, 61))]
    (tmp_path / "words.json").write_text(json.dumps(words))
    torch.save({"state_dict": {f"module.{k}": v for k, v in tensors.items()}, "epoch": 3}, tmp_path / "c.pth")
    code, _, err = run(
        capsys, "convert", str(tmp_path / "c.pth"), str(tmp_path / "m"), "--vocabulary", str(tmp_path / "words.json")
    )
    assert (code, err) == (0, "")
    assert Captioner.from_pretrained(tmp_path / "m").vocabulary.words[4] == "v4"

    class Evil:
        def __reduce__(self) -> object:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": tensors, "extra": Evil()}, tmp_path / "evil.pth")
    code, _, err = run(capsys, "convert", str(tmp_path / "evil.pth"), str(tmp_path / "m2"))
    assert (code, "could run code" in err) == (1, True)
    assert not (tmp_path / "ran").exists()


def test_convert_says_what_is_wrong_with_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def complaint(*words: str) -> str:
        code, _, err = run(capsys, "convert", *words, str(tmp_path / "m"))
        assert code in (1, 2)
        return err

    (tmp_path / "text.pth").write_text("hello")
    assert "text.pth" in complaint(str(tmp_path / "text.pth"))
    torch.save([1, 2], tmp_path / "list.pth")
    assert "holds a list, not named tensors" in complaint(str(tmp_path / "list.pth"))
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert "does not look like a checkpoint of the released code" in complaint(str(tmp_path / "other.safetensors"))
    tensors = {k.removeprefix("weights."): v for k, v in load_file(GOLDEN).items() if k.startswith("weights.")}
    del tensors["view_gen.vis_mlp.0.weight"]
    save_file(tensors, tmp_path / "partial.safetensors")
    assert "'view_gen.vis_mlp.0.weight' is missing or misshapen" in complaint(str(tmp_path / "partial.safetensors"))
    assert "--heads 7 does not divide the width 32" in complaint(str(GOLDEN), "--heads", "7")
    (tmp_path / "few.txt").write_text("\n".join(SPECIAL))
    assert "has 4 words, the checkpoint 61" in complaint(str(GOLDEN), "--vocabulary", str(tmp_path / "few.txt"))


def test_help_and_version_do_not_wait_for_torch() -> None:
    script = (
        "import sys, haav.cli.main\n"
        "for flag in sys.argv[1:]:\n"
        "    try: haav.cli.main.main([flag])\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    words = [sys.executable, "-c", script, "--help", "--version"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("usage: haav")
    assert lines[-1] == f"haav {__version__}"


@pytest.mark.parametrize("words", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help_reads_as_it_was_written(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "%%" not in capsys.readouterr().out


def test_a_log_tells_the_rate_of_what_was_done_since_it_began(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0, 40.0, 70.0])
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with output.progress("steps") as bar:
        bar(401, 1000)  # a run that goes on after 400
        bar(431, 1000)
        bar(521, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["431 of 1,000 steps, 1.0/s, 9 min left", "521 of 1,000 steps, 2.0/s, 4 min left"]


def test_a_log_tells_no_rate_that_means_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(*updates: tuple[float, int]) -> list[str]:
        clock = iter([0.0, *(now for now, _ in updates)])
        monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        with output.progress("photos") as bar:
            for _, done in updates:
                bar(done, 5)
        return capsys.readouterr().err.splitlines()

    assert lines((0.0, 5)) == ["5 of 5 photos"], "all of them were there"
    assert lines((0.0, 0), (0.002, 5)) == ["5 of 5 photos"], "all of them failed"
    assert lines((0.0, 3), (4.0, 4), (4.0, 5)) == ["5 of 5 photos, 0.5/s"], "a batch arrives at once"


def test_names_of_views_are_whole_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    numbers = ("clean", "disturbed", "mean", "low", "high", "effect", "photos_that_drop", "steps_that_drop")
    row = {"photos": 1000, **dict.fromkeys(numbers, -0.123)}
    views = ("text_whole", "text_five", "patch_objects")
    for study, changes in (
        ("noise", {name: {"shares": {"0.5": row}} for name in views}),
        ("mask", {name: {"at the word": row, "at other words": row} for name in views}),
    ):
        output.print_control(study, changes)
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 80
        assert all(name in shown for name in views)
        assert "-12.3" in shown
        assert "…" not in shown.replace("-12.3 …", "")


def test_a_photo_without_a_command_is_told_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = tmp_path / "cat.jpg"
    photo.touch()
    with pytest.raises(SystemExit, match="2"):
        main([str(photo)])
    assert f"Did you mean: haav caption {photo}" in capsys.readouterr().err


def test_help_lists_every_command_once_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for verb in VERBS:
        assert sum(line.startswith(f"  {verb} ") for line in lines) == 1
    assert lines.index("captions:") < lines.index("data:") < lines.index("training:")


def help_of(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    return capsys.readouterr().out


def test_help_lists_recipes_presets_grids_and_decode_settings(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, names in (
        ("train", load.recipe_names()),
        ("describe", load.preset_names()),
        ("ablate", load.grid_names()),
    ):
        lines = help_of(verb, capsys).splitlines()
        for name in names:
            assert sum(re.match(rf"  {name} +\w", line) is not None for line in lines) == 1, (verb, name)
    for verb in ("caption", "explain", "predict", "serve", "bench"):
        shown = help_of(verb, capsys)
        for field in fields(DecodeConfig):
            default = str(field.default).lower() if isinstance(field.default, bool) else field.default
            assert f"  --decode.{field.name} {default}" in shown, verb
            assert field.metadata["doc"] in " ".join(shown.split()), verb
    assert "--decode" not in help_of("train", capsys)
    assert max(map(len, help_of("caption", capsys).splitlines())) <= 80


def test_a_saved_model_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    home = save_model(tmp_path / "model")
    code, out, _ = run(capsys, "describe", str(home), "--json")
    data = json.loads(out)
    parameters = sum(tensor.numel() for tensor in Captioner.from_pretrained(home).model.parameters())
    assert (code, data["inference_parameters"]) == (0, parameters)
    assert list(data["views"]) == ["cells", "objects"]
    assert data["decode"]["max_words"] == 8
    code, out, _ = run(capsys, "describe", str(home))
    assert "decode: max_words 8" in out
    for flags in (["--preset", "paper"], ["--model.d_model", "12"]):
        code, _, err = run(capsys, "describe", str(home), *flags)
        assert (code, "give either a model or settings" in err) == (2, True)


def test_what_is_there_is_not_overwritten_unless_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    home = tmp_path / "m"
    assert run(capsys, "convert", str(GOLDEN), str(home))[0] == 0
    (home / "config.json").write_text("mine")
    code, _, err = run(capsys, "convert", str(GOLDEN), str(home))
    assert (code, f"{home}/config.json exists" in err, "--overwrite" in err) == (1, True, True)
    assert (home / "config.json").read_text() == "mine"
    assert run(capsys, "convert", str(GOLDEN), str(home), "--overwrite")[0] == 0
    assert (home / "config.json").read_text() != "mine"
    (home / "manifest.json").write_text("mine")
    code, _, err = run(capsys, "textdb", "--out", str(home), "--text", "nowhere.txt")
    assert (code, f"{home}/manifest.json exists" in err) == (1, True)
    code, _, err = run(capsys, "textdb", "--out", str(home), "--text", "nowhere.txt", "--overwrite")
    assert (code, "nowhere.txt" in err) == (1, True)


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    _, _, rest = capsys.readouterr().out.partition("exit codes:\n")
    codes = [line.split()[0] for line in rest.partition("\n\n")[0].splitlines()]
    assert codes == ["0", "1", "2", "3", "130"]


def test_a_command_is_called_by_its_own_name_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["pack", "model"])
    assert capsys.readouterr().err.startswith("haav pack: the following arguments are required: --out")


def test_captions_import_no_more_than_they_need() -> None:
    """What a process imports is what a newcomer waits for."""
    needless = (
        "haav.evaluate",
        "haav.studies",
        "haav.train",
        "haav.jobs",
        "haav.web",
        "jinja2",
        "matplotlib",
        "fsspec",
        "torch.onnx",
        "PIL.PdfImagePlugin",
    )
    code = (
        "import sys; from haav.cli.main import main; "
        f"assert main(['caption', {str(SAMPLES / 'cat.jpg')!r}, '--quiet']) == 0; "
        f"print([name for name in sys.modules if name.startswith({needless!r})], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_a_process_neither_starts_nor_ends_with_searches_for_garbage() -> None:
    code = (
        "import atexit, gc, sys\n"
        "from haav.__main__ import run\n"
        "atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 0))  # after those of run\n"
        "sys.argv = ['haav', '--version']\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"haav {__version__}", "10000 True"]


def test_the_backend_is_a_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    searches = 0

    def decode(model: OnnxModel, *arguments: Any) -> Any:
        nonlocal searches
        searches += 1
        return model.model.decode(*arguments)

    monkeypatch.setattr(OnnxModel, "decode", decode)
    words = ["caption", str(SAMPLES / "cat.jpg"), "--beam", "1", "--format", "text"]
    plain = run(capsys, *words, "--backend", "torch")
    assert searches == 0
    assert plain[0] == 0
    assert run(capsys, *words, "--backend", "onnxruntime") == plain
    assert searches > 1
    code, _, err = run(capsys, *words, "--backend", "onyx")
    assert code == 2
    assert "unknown backend 'onyx'" in err
