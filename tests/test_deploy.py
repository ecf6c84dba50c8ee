"""The Dockerfile, the systemd unit and the job for KubeRay: checked here, run nowhere."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from haav.cli.main import parse
from helpers import ROOT

DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "haav.service").read_text(encoding="utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.mark.skipif(not HADOLINT.exists(), reason="needs hadolint of the dev extra")
def test_hadolint_finds_no_fault_in_the_dockerfile() -> None:
    result = subprocess.run([HADOLINT, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "haav.service"
    unit.write_text(UNIT.replace("/opt/haav/bin/haav", sys.executable), encoding="utf-8")  # it must exist
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def test_both_start_a_command_that_exists() -> None:
    [started] = re.findall(r"^ExecStart=/opt/haav/bin/haav (.+)$", UNIT, re.MULTILINE)
    [entry] = re.findall(r'^ENTRYPOINT \["/opt/haav/bin/haav", (.+)\]$', DOCKERFILE, re.MULTILINE)
    assert parse(started.split())[1]["host"] == "127.0.0.1"
    assert parse(entry.replace('"', "").split(", "))[1]["host"] == "0.0.0.0"


def test_everything_that_the_dockerfile_copies_is_there_and_let_through() -> None:
    allowed = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    copied = [file for line in re.findall(r"^COPY ([^-].*) \S+$", DOCKERFILE, re.MULTILINE) for file in line.split()]
    assert sorted(copied) == sorted(allowed)
    for file in copied:
        assert (ROOT / file).exists()


JOB = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text(encoding="utf-8"))


def check_job(job: Any) -> None:
    """Raises what the two validators raise: KubeRay's fields, then each pod template as Kubernetes has it."""
    jsonschema.validate(job, json.loads((ROOT / "tests/schemas/rayjob.json").read_text(encoding="utf-8")))
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_the_job_for_kuberay_follows_its_schema() -> None:
    check_job(JOB)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("entryPoint", "haav"),
        ("backoffLimit", "3"),
        ("rayClusterSpec.workerGroupSpecs.0.minReplicas", -1),
        ("rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", 0),
        ("rayClusterSpec.headGroupSpec.template.spec.containers.0.ressources", {}),
        ("rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0.envFrom", {"secretRef": {"name": "x"}}),
    ],
)
def test_the_schema_refuses_a_job_with_a_mistake(path: str, value: object) -> None:
    job = copy.deepcopy(JOB)
    *way, last = path.split(".")
    place = job["spec"]
    for name in way:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_job(job)


def test_the_job_for_kuberay_starts_a_command_that_exists_on_the_version_that_is_tested() -> None:
    program, *words = JOB["spec"]["entrypoint"].split()
    assert program == "haav"
    parse(words)
    cluster = JOB["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']} " in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"].keys() == container["resources"]["limits"].keys() == {"cpu", "memory"}
