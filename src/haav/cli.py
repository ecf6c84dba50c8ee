"""`haav VERB …`: parses, calls, prints. Each verb is a function whose annotations are its flags and help;
what stands before the `*` is given by place.

Flags with a dot, like `--model.d_model 512`, set any setting of the config; they are collected
here and checked together with the config, so that every problem is reported at once.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from haav import __version__
from haav.errors import ConfigError, HaavError, did_you_mean, unknown

if TYPE_CHECKING:
    from haav.captioner import Captioner

Overrides = list[tuple[str, str]]
"""dotted flags as they were typed, with their values"""


def describe(
    *,
    preset: Annotated[str | None, "starting point: paper, release or best (default)"] = None,
    encoding: Annotated[str | None, "how views are encoded: shared, unshared, concat_views, model_per_view"] = None,
    aggregator: Annotated[
        str | None, "how words draw on views: hierarchical, concat_tokens, mean, max, sigmoid, tanh"
    ] = None,
    contrastive: Annotated[str | None, "train with the contrastive loss: true or false"] = None,
    config: Annotated[str | None, "a YAML file of settings on top of the preset"] = None,
    json: Annotated[bool, "print JSON"] = False,
    overrides: Overrides | None = None,
) -> int:
    """What a configuration is made of: parameters by part, views, FLOPs and how they grow."""
    from haav import terminal
    from haav.config import Given
    from haav.describe import describe
    from haav.presets import flags_from, load_config

    flags = flags_from(overrides or [])
    short = {
        ("model", "encoding"): ("--encoding", encoding),
        ("model", "aggregator"): ("--aggregator", aggregator),
        ("contrast", "enabled"): ("--contrastive", contrastive),
    }
    flags |= {path: Given(value, flag) for path, (flag, value) in short.items() if value is not None}
    description = describe(load_config(preset, config, flags))
    if json:
        _print_json(description.to_json())
    else:
        terminal.print_description(description)
    return 0


def convert(
    source: Annotated[str, "a checkpoint of the authors' released code: .safetensors or .pth"],
    out: Annotated[str, "model directory to write"],
    *,
    vocabulary: Annotated[str | None, "its words by id: a JSON list, or one a line"] = None,
    heads: Annotated[int, "attention heads: the file does not say"] = 8,
) -> int:
    """Turn a checkpoint of the authors' released code into a model directory of haav."""
    from haav.convert import convert, save

    converted = convert(source, vocabulary, heads)
    save(converted, out)
    model = converted.captioner.config.model
    print(f"{out}: {len(model.views)} views, width {model.d_model}, {model.vocabulary_size} words.")
    if not converted.named:
        print("No --vocabulary was given, so its words are numbers (word4, word5, …).", file=sys.stderr)
    return 0


def extract(
    *,
    images: Annotated[str, "a folder, a .tar, a .txt list of paths; several with commas"],
    store: Annotated[str, "view store to fill; made when it is not there"],
    views: Annotated[str, "which views, with commas: grid, cells, objects, …"] = "grid,cells,objects,regions",
    bridge: Annotated[str | None, "for text views: a directory made by haav bridge"] = None,
    textdb: Annotated[str | None, "for text views: a directory made by haav textdb"] = None,
    clip_model: Annotated[str | None, "for clip_grid: a hub name or a folder"] = None,
    clip_text_model: Annotated[str | None, "for clip_text views: a hub name or a folder"] = None,
    detr_model: Annotated[str | None, "for detr_objects: a hub name or a folder"] = None,
    workers: Annotated[int | None, "processes (default: one a core)"] = None,
    batch: Annotated[int, "photos a batch"] = 8,
    resume: Annotated[bool, "go on where it stopped; it always does, the flag is for readers"] = False,
) -> int:
    """Turn photos into views and keep them; run it again to finish or to add a view."""
    from haav import extract, sources, terminal

    options = {
        "bridge": bridge,
        "textdb": textdb,
        "clip_model": clip_model,
        "clip_text_model": clip_text_model,
        "detr_model": detr_model,
    }
    refs = sources.find_photos(images.split(","))
    with terminal.progress("photos") as progress:
        summary = extract.extract(refs, store, views.split(","), options, workers, batch, progress)
    print(
        f"{store}: {summary.photos:,} photos extracted, {summary.skipped:,} were there, {len(summary.failures)} failed."
    )
    if summary.failures:
        print(f"{store}/{extract.FAILURES} names them; the first: {summary.failures[0].error}", file=sys.stderr)
    return 1 if summary.failures else 0


def import_features(
    kind: Annotated[str, "bottom_up_tsv, bottom_up_npz, oscar_hdf5, vis_ctx_hdf5 or txt_ctx_hdf5"],
    source: Annotated[str, "the file, or folder of files"],
    *,
    store: Annotated[str, "view store to fill; made when it is not there"],
    view: Annotated[str | None, "name of the view, where the layout leaves a choice"] = None,
    id_template: Annotated[str, "photo's name from the file's id, e.g. {id:012d}.jpg"] = "{id}",
) -> int:
    """Bring features that others extracted into a view store."""
    from haav import importers, terminal

    with terminal.progress("photos") as progress:
        summary = importers.import_features(kind, Path(source), store, view, id_template, progress)
    print(
        f"{store}: {summary.photos:,} photos imported, {summary.skipped:,} were there, {len(summary.failures)} failed."
    )
    for failure in summary.failures[:10]:
        print(f"{failure.image}: {failure.error}", file=sys.stderr)
    return 1 if summary.failures else 0


def store(
    action: Annotated[str, "info, verify, drop or export-webdataset"],
    path: Annotated[str, "the view store"],
    *,
    view: Annotated[str | None, "one view only (drop needs it)"] = None,
    out: Annotated[str | None, "export-webdataset: folder for the shards"] = None,
    shard_size: Annotated[int, "export-webdataset: photos a shard"] = 1000,
    json: Annotated[bool, "print JSON"] = False,
) -> int:
    """Look at a view store, check every record, take a view out, or write it as WebDataset shards."""
    from haav import shards, terminal
    from haav.store import Store

    actions = ("info", "verify", "drop", "export-webdataset")
    if action not in actions:
        raise ConfigError(unknown("action", action, actions))
    with Store(path, write=action == "drop") as opened:
        chosen = [view] if view else sorted(opened.views)
        if action == "info":
            info = opened.info()
            _print_json(info) if json else terminal.print_store(path, info)
        elif action == "drop":
            if not view:
                raise ConfigError("drop needs --view NAME.")
            opened.drop(view)
            print(f"{path}: view '{view}' is gone.")
        elif action == "verify":
            faults = [(name, photo, fault) for name in chosen for photo, fault in opened.verify(name) if fault]
            for name, photo, fault in faults[:20]:
                print(f"{name} {photo}: {fault}")
            print(f"{path}: {sum(opened.count(name) for name in chosen):,} records, {len(faults)} damaged.")
            return 1 if faults else 0
        else:
            written = shards.export(opened, chosen, Path(out or f"{path}-shards"), shard_size)
            print(f"{written} shards in {out or f'{path}-shards'}.")
    return 0


def dataset(
    action: Annotated[str, "check"],
    path: Annotated[str, "Karpathy or COCO JSON, CSV, JSONL (.gz is fine), or a folder with captions.txt"],
    *,
    images: Annotated[str | None, "where the pictures are, to look for missing and duplicate ones"] = None,
    json: Annotated[bool, "print JSON"] = False,
) -> int:
    """Count a data set's photos and captions; photos shared between splits are an error."""
    from dataclasses import asdict

    from haav import sources, terminal
    from haav.data.annotations import check_dataset, load_dataset

    if action != "check":
        raise ConfigError(unknown("action", action, ["check"]))
    pictures = sources.digests(sources.find_photos(images.split(","))) if images else None
    found = check_dataset(load_dataset(path), pictures)
    _print_json(asdict(found)) if json else terminal.print_check(found)
    return 1 if found.shared or found.missing else 0


def textdb(
    action: Annotated[str, "build"],
    *,
    out: Annotated[str, "directory to write"],
    captions: Annotated[str, "data sets whose training captions go in, with commas"] = "",
    text: Annotated[str, "text files, a sentence a line, with commas"] = "",
    visual_genome: Annotated[str, "attributes.json, relationships.json, with commas"] = "",
    exclude: Annotated[str | None, "text file of Visual Genome or COCO image ids to leave out"] = None,
    clip_text_model: Annotated[str | None, "for clip_text views: a hub name or a folder (default: MiniLM)"] = None,
) -> int:
    """Make the text database that photos are described from. Only training captions ever enter."""
    from haav import terminal
    from haav.retrieval import build_textdb

    if action != "build":
        raise ConfigError(unknown("action", action, ["build"]))
    ids = frozenset(Path(exclude).read_text().split()) if exclude else frozenset()
    encoder = None
    if clip_text_model:
        from haav.views.hub_clip import ClipTextEncoder

        encoder = ClipTextEncoder(clip_text_model)
    with terminal.progress("sentences") as progress:
        database = build_textdb(*(_listed(value) for value in (captions, text, visual_genome)), ids, progress, encoder)
    database.save(out)
    print(f"{out}: {len(database):,} sentences.")
    return 0


def bridge(
    *,
    store: Annotated[str, "view store with the view regions"],
    dataset: Annotated[str, "data set with train and val photos of the store"],
    textdb: Annotated[str, "text database with the captions of its training photos"],
    out: Annotated[str, "directory to write"],
    epochs: Annotated[int, "passes over the photos, for each fold"] = 30,
    folds: Annotated[int, "photos of a fold are served by a bridge trained on the other folds"] = 5,
    seed: Annotated[int, "of everything random"] = 0,
) -> int:
    """Learn the way from photos to sentences on training captions; report recall on val."""
    from haav import terminal
    from haav.data.annotations import load_dataset
    from haav.retrieval import build_bridge
    from haav.store import Store
    from haav.textdb import TextDatabase

    with Store(store) as opened, terminal.progress("epochs") as progress:
        found, report = build_bridge(
            opened, load_dataset(dataset), TextDatabase.load(textdb), progress, epochs=epochs, folds=folds, seed=seed
        )
    found.save(out, report)
    _print_json(report)
    return 0


def train(
    recipe: Annotated[str | None, "a recipe by name (toy, coco-xe, …) or a YAML file; not with --resume"] = None,
    *,
    out: Annotated[str | None, "folder for the run"] = None,
    init: Annotated[str | None, "model directory to start from"] = None,
    resume: Annotated[str | None, "folder of a run to go on with"] = None,
    epochs: Annotated[int | None, "with --resume: as many in all instead of the recipe's"] = None,
    overrides: Overrides | None = None,
) -> int:
    """Train a model by a recipe, or go on with a run that was stopped. Ctrl-C saves and stops."""
    from haav import terminal
    from haav.presets import flags_from, load_config
    from haav.recipes import find_recipe
    from haav.train import loop

    if (recipe is None) == (resume is None):
        raise ConfigError("give a recipe to begin, or --resume RUN to go on: one of the two.")
    if resume is not None and (overrides or init or out):
        raise ConfigError("a resumed run keeps its settings; only --epochs can change.")
    if recipe is not None and out is None:
        raise ConfigError("name a folder for the run with --out.")
    folder = str(resume or out)
    with terminal.training() as report:
        if recipe is not None:
            config = load_config(file=find_recipe(recipe), flags=flags_from(overrides or []))
            outcome = loop.train(config, folder, init, report)
        else:
            outcome = loop.resume(folder, epochs, report)
    if not terminal.first_process():
        return 0
    position = outcome.position
    best = f"best CIDEr on val {100 * position.best:.1f} at step {position.best_step}, in {folder}/best."
    skipped = f" {position.skipped} steps were skipped: their loss was not finite." if position.skipped else ""
    if outcome.finished:
        print(f"{folder}: {position.step} steps, {best}{skipped}")
        return 0
    print(f"stopped at step {position.step}.{skipped}\n  Go on with: haav train --resume {folder}", file=sys.stderr)
    return 130


def predict(
    *,
    model: Annotated[str, "model directory; several with commas: an ensemble"],
    store: Annotated[str, "view store with the photos' views"],
    out: Annotated[str, "file to write"],
    dataset: Annotated[str | None, "data set whose photos are captioned; without it, all photos of the store"] = None,
    split: Annotated[str, "of the data set: train, val or test"] = "val",
    format: Annotated[str, "coco: results by file name; coco-server: by COCO's numbers, as its server wants"] = "coco",
    batch: Annotated[int, "photos at once"] = 50,
    seed: Annotated[int, "of captions drawn with --decode.method sample"] = 0,
    device: Annotated[str, "where the model runs: cpu, cuda, …"] = "cpu",
    overrides: Overrides | None = None,
) -> int:
    """Caption the photos of a split from their stored views."""
    from haav import predict, terminal
    from haav.data.annotations import Photo, load_dataset
    from haav.files import check_writable
    from haav.predictions import names_for, save_predictions
    from haav.store import Store

    check_writable(Path(out))  # what cannot end well is said before the work, not after
    captioner = _load_captioner(model, overrides, device)
    with Store(store) as opened, terminal.progress("photos") as progress:
        if dataset:
            photos = load_dataset(dataset, split).split(split)
        else:
            photos = tuple(Photo(name, split) for name in opened.ids(captioner.views[0]))
        if not photos:
            raise ConfigError(f"{dataset or store} has no photos in split '{split}'.")
        names = names_for(format, photos)
        found = predict.predict(captioner, opened, photos, batch, progress, seed)
        captions = {photo: caption.text for photo, caption in found}
    save_predictions(out, captions, names)
    print(f"{out}: {len(captions):,} captions.")
    return 0


def calibrate(
    model: Annotated[str, "model directory; its confidence is fitted and saved"],
    *,
    store: Annotated[str, "view store with the photos' views"],
    dataset: Annotated[str, "data set with references"],
    split: Annotated[str, "split to fit on: val"] = "val",
    overrides: Overrides | None = None,
) -> int:
    """Fit the confidence of words to how often people use them of the same photo; report the calibration error."""
    from dataclasses import replace

    from haav import predict, terminal
    from haav.captioner import Captioner
    from haav.data.annotations import load_dataset
    from haav.store import Store

    if split == "test":
        raise ConfigError("confidence is fitted on val, never on test.")
    if "," in model:
        raise ConfigError("confidence belongs to one model: calibrate each for itself.")
    captioner = _load_captioner(model, overrides)
    photos = load_dataset(dataset, split).split(split)
    with Store(store) as opened, terminal.progress("photos") as progress:
        captions = dict(predict.predict(captioner, opened, photos, progress=progress))
    settings, report = predict.calibrate(captions, photos)
    saved = Captioner.from_pretrained(model)  # as it was: decode settings of this command are not the model's
    Captioner(saved.model, replace(saved.config, confidence=settings), saved.vocabulary).save_pretrained(model)
    _print_json({"offset": settings.offset, "slope": settings.slope, **report})
    return 0


def evaluate(
    *,
    predictions: Annotated[str, "captions: COCO results, JSONL or {id: caption}"],
    references: Annotated[str, "COCO captions JSON, Karpathy JSON, {id: [captions]}, CSV or JSONL"],
    split: Annotated[str | None, "split of the references, where they have several"] = None,
    compare: Annotated[str | None, "another file of captions of the same photos"] = None,
    objects: Annotated[str | None, "for hallucination (CHAIR): JSON {id: [names of what is there]}"] = None,
    skip: Annotated[str, "metrics to leave out: METEOR, SPICE"] = "",
    json: Annotated[bool, "print JSON"] = False,
) -> int:
    """Score captions: BLEU, METEOR, ROUGE-L, CIDEr, SPICE with 95 % intervals; compare two files of them."""
    from dataclasses import asdict

    from haav import terminal
    from haav.evaluate.scores import SLOW
    from haav.evaluate.scores import compare as compare_reports
    from haav.evaluate.scores import evaluate as score
    from haav.predictions import load_objects, load_predictions, load_references, match

    for name in _listed(skip):
        if name not in SLOW:
            raise ConfigError(unknown("metric to leave out", name, SLOW))
    photos = load_references(references, split)
    wanted = {photo.id: photo.captions for photo in photos}
    labels = load_objects(objects, photos) if objects else None
    files = [predictions, *([compare] if compare else [])]
    said = [match(load_predictions(path), photos) for path in files]  # all are read before any is scored
    first, *others = (score(captions, wanted, labels, _listed(skip)) for captions in said)
    second = others[0] if others else None
    differences = compare_reports(first, second) if second else None
    if json:
        data = first.to_json()
        if second and differences:
            data["compare"] = second.to_json()
            data["difference"] = {name: asdict(found) for name, found in differences.items()}
        _print_json(data)
    else:
        terminal.print_report(first, second, differences)
    return 0


def _load_captioner(paths: str, overrides: Overrides | None, device: str = "cpu") -> Captioner:
    from haav.captioner import Captioner
    from haav.config import override
    from haav.presets import flags_from

    captioner = Captioner.ensemble([Captioner.from_pretrained(path, device) for path in _listed(paths)])
    decode = {}
    for (section, *rest), given in flags_from(overrides or []).items():
        if section != "decode":
            raise ConfigError(f"'{given.spelling}' cannot be changed once a model is trained; --decode.… can.")
        decode[".".join(rest)] = given.value
    if decode:
        captioner = Captioner(captioner.model, override(captioner.config, "decode", decode), captioner.vocabulary)
    return captioner


def _listed(value: str) -> list[str]:
    return [part for part in value.split(",") if part]


VERBS: dict[str, Callable[..., int]] = {
    "describe": describe,
    "convert": convert,
    "extract": extract,
    "import": import_features,
    "store": store,
    "dataset": dataset,
    "textdb": textdb,
    "bridge": bridge,
    "train": train,
    "predict": predict,
    "evaluate": evaluate,
    "calibrate": calibrate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a HaavError, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except HaavError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; nothing more to say
        return 1


def _run(arguments: list[str]) -> int:
    parser = _Parser(prog="haav", description="Photos to captions, and where each word came from.")
    parser.add_argument("--version", action="version", version=f"haav {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser, required=True)
    for name, function in VERBS.items():
        doc = (inspect.getdoc(function) or "").replace("%", "%%")
        _add_flags(verbs.add_parser(name, help=doc.splitlines()[0], description=doc), function)
    if not arguments:
        parser.print_help()
        return 2
    if arguments[0] not in VERBS and not arguments[0].startswith("-"):
        parser.error(unknown("command", arguments[0], VERBS))
    plain, overrides = _split_overrides(arguments)
    given = vars(parser.parse_args(plain))
    function = VERBS[given.pop("verb")]
    if "overrides" in inspect.signature(function).parameters:
        given["overrides"] = overrides
    elif overrides:
        parser.error(f"'{arguments[0]}' takes no settings, but was given {overrides[0][0]}.")
    return function(**given)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, extra = super().parse_known_args(args, namespace)
        flags = [word for word in extra if word.startswith("-")]
        if flags and "VERB" not in str(self._actions[-1].metavar):
            known = [option for action in self._actions for option in action.option_strings]
            self.error("\n".join(f"unknown flag '{flag}'.{did_you_mean(flag, known)}" for flag in flags))
        return found, extra

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\n  See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(2)


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], Overrides]:
    """Take `--a.b value` and `--a.b=value` out of the command line."""
    plain: list[str] = []
    overrides: Overrides = []
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or "." not in flag:
            plain.append(word)
        elif equals:
            overrides.append((flag, value))
        else:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                print(f"haav: {flag} needs a value.", file=sys.stderr)
                raise SystemExit(2)
            overrides.append((flag, following))
    return plain, overrides


def _add_flags(parser: argparse.ArgumentParser, function: Callable[..., int]) -> None:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "overrides":
            trained = "model" in inspect.signature(function).parameters  # then only how it writes can be set
            example = "Decode settings can be given, e.g. --decode.beam 1." if trained else ""
            parser.epilog = example or "Any setting can be given with its dotted name, e.g. --model.d_model 512."
            continue
        kind, doc = typing.get_args(hints[name])
        if doc is type(None):  # Python 3.10 wraps what defaults to None once more
            kind, doc = typing.get_args(kind)
        doc = doc.replace("%", "%%")
        if typing.get_origin(kind) is types.UnionType:
            (kind,) = [option for option in typing.get_args(kind) if option is not type(None)]
        flag = f"--{name.replace('_', '-')}"
        required = parameter.default is inspect.Parameter.empty
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            parser.add_argument(name, type=kind, help=doc, nargs=None if required else "?")
        elif kind is bool:
            parser.add_argument(flag, action="store_true", help=doc, dest=name)
        else:
            default = None if required else parameter.default
            parser.add_argument(flag, type=kind, default=default, required=required, help=doc, dest=name)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))
