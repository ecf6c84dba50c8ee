"""What surrounds the package: metadata, hooks, CI for a public host, templates, changelog, citation."""

from __future__ import annotations

import ast
import re
import sys
from datetime import date
from importlib.metadata import packages_distributions
from typing import Any

import pytest
import yaml

import haav
from helpers import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
YAML_FILES = [
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
    *sorted((ROOT / ".github").rglob("*.yml")),
]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile"""
    rule = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert rule is not None, target
    return [line.strip().replace("$(VENV)", ".venv") for line in rule[1].splitlines()]


def distribution_name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


# CI and hooks


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_files_for_hosts_and_tools_are_yaml_tables(path: Any) -> None:
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    assert all(value is not None for key, value in tree.items() if key is not True)  # `on:` is read as True


VERSIONS = ["3.10", "3.11", "3.12", "3.13"]


def test_the_workflow_runs_on_pushes_and_pull_requests_and_may_only_read() -> None:
    workflow = read(".github/workflows/ci.yml")
    events = workflow[True]  # YAML 1.1 reads `on` as a truth value; hosts do not
    assert events == {"push": {"branches": ["main"]}, "pull_request": None}
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow.keys() == {"name", True, "permissions", "concurrency", "jobs"}
    assert list(workflow["jobs"]) == ["test"]


def test_the_workflow_runs_what_ci_runs_and_nothing_else() -> None:
    job = read(".github/workflows/ci.yml")["jobs"]["test"]
    checkout, python, run = job["steps"]
    assert re.fullmatch(r"actions/checkout@v\d+", checkout["uses"])
    assert re.fullmatch(r"actions/setup-python@v\d+", python["uses"])
    assert python["with"]["python-version"] == "${{ matrix.python }}"
    for file in python["with"]["cache-dependency-path"].split():
        assert (ROOT / file).is_file()
    assert run.keys() == {"name", "run"}
    assert run["run"] == "bash .ci/run"
    assert not {"if", "continue-on-error", "container"} & {key for part in (job, *job["steps"]) for key in part}


def test_ci_runs_targets_of_make_and_stops_at_the_first_that_fails() -> None:
    shell, options, folder, *commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert (shell, options) == ("#!/usr/bin/env bash", "set -euo pipefail")
    assert folder.startswith("cd ")
    assert [command.split()[0] for command in commands] == ["make"] * len(commands)
    targets = [command.removeprefix("make ") for command in commands]
    assert {"lint", "docs", "audit", "caption", "test"} <= set(targets)
    for target in targets:
        assert recipe(target)


def test_the_workflow_tests_the_python_versions_of_the_classifiers() -> None:
    strategy = read(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]
    assert strategy == {"fail-fast": False, "matrix": {"python": VERSIONS}}  # as text: the number 3.10 is 3.1
    assert re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE) == VERSIONS
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"


def test_hooks_run_the_commands_of_make_lint_and_download_nothing() -> None:
    repositories = read(".pre-commit-config.yaml")["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    ours = [hook["entry"].replace(" --force-exclude", "") for hook in hooks]
    assert ours == [command.removesuffix(" .") for command in recipe("lint")]
    assert [hook.get("pass_filenames", True) for hook in hooks] == [True, True, False]  # mypy reads the whole package


def test_issue_forms_ask_for_something() -> None:
    for form in ("bug", "feature"):
        tree = read(f".github/ISSUE_TEMPLATE/{form}.yml")
        assert {"name", "description", "body"} <= tree.keys()
        names = [field["id"] for field in tree["body"]]
        assert len(names) == len(set(names))
        assert any(field.get("validations", {}).get("required") for field in tree["body"])


# Metadata


def test_every_imported_package_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    shipped = [*PROJECT["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])]
    declared = {distribution_name(line) for line in shipped}
    owners = packages_distributions()
    undeclared = set()
    for file in sorted((ROOT / "src" / "haav").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"haav"}:
                if not {distribution_name(owner) for owner in owners.get(name, [name])} & declared:
                    undeclared.add((file.relative_to(ROOT).as_posix(), name))
    assert undeclared == set()


def test_the_extra_all_holds_every_extra_and_dev_holds_all() -> None:
    extras = PROJECT["optional-dependencies"]
    [everything] = extras["all"]
    assert set(re.search(r"\[(.+)\]", everything)[1].split(",")) == extras.keys() - {"all", "dev", "docs"}
    assert "haav[all,docs]" in extras["dev"]


def test_type_checkers_are_told_that_the_package_has_types() -> None:
    assert (ROOT / "src" / "haav" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


# Versions


def test_changelog_and_citation_are_of_this_version() -> None:
    unreleased, (version, day), *older = re.findall(r"^## \[(.+?)\](?: - (.+))?$", CHANGELOG, re.MULTILINE)
    assert unreleased == ("Unreleased", "")
    assert version == haav.__version__
    citation = read("CITATION.cff")
    assert (str(citation["version"]), citation["date-released"]) == (version, date.fromisoformat(day))
    days = [date.fromisoformat(text) for _, text in [(version, day), *older]]
    assert days == sorted(days, reverse=True)


def test_the_changelog_is_kept_as_keep_a_changelog_says() -> None:
    headings = set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    links = dict(re.findall(r"^\[(.+?)\]: (\S+)$", CHANGELOG, re.MULTILINE))
    assert links.keys() == set(re.findall(r"^## \[(.+?)\]", CHANGELOG, re.MULTILINE))
    assert [line for line in CHANGELOG.splitlines() if len(line) > 100 and not line.startswith("[")] == []


def test_the_citation_names_the_paper() -> None:
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    paper = citation["preferred-citation"]
    assert paper["title"] == "HAAV: Hierarchical Aggregation of Augmented Views for Image Captioning"
    assert [author["family-names"] for author in paper["authors"]] == ["Kuo", "Kira"]
    assert paper["year"] == 2023
