"""The files in deploy/, given to the programs that will read them: make deploy-test.

Needs systemd-analyze, kubectl or kustomize, docker compose, and promtool. Nothing is started.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from opencode_a2a.config import VARIABLES
from tests.unit.test_deploy import (
    COMPOSE,
    DEPLOY,
    KUBERNETES,
    MONITORING,
    TOPOLOGIES,
    by_kubernetes,
    rendered,
)

UNITS = ("opencode-a2a.service", "opencode.service")
EXPOSURE = 25
"""Tenths of what systemd calls the exposure of a unit: 0 is best, 100 worst."""


def told(*command: str | Path, **variables: str) -> tuple[int, str]:
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run(  # noqa: S603 - our own
        command, capture_output=True, text=True, check=False, env={**path, **variables}
    )
    return done.returncode, done.stdout + done.stderr


def program(*names: str, probe: str = "--help") -> list[str]:
    """Return the first of these commands that is there: to which the probe is no error."""
    for name in names:
        command = name.split()
        if (found := shutil.which(command[0])) and told(found, *command[1:], probe)[0] == 0:
            return [found, *command[1:]]
    pytest.fail(f"none of these is installed: {', '.join(names)}")


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_units_and_rates_them_as_little_exposed(
    name: str, tmp_path: Path
) -> None:
    (analyze,) = program("systemd-analyze")
    # The program is not installed where it is looked for.
    text = (
        (DEPLOY / "systemd" / name).read_text().replace("/usr/local/bin/opencode-a2a", "/bin/true")
    )
    unit = tmp_path / name
    unit.write_text(text)
    misspelt = tmp_path / f"misspelt-{name}"
    misspelt.write_text(text.replace("RestartSec=", "RestratSec="))

    verified = told(analyze, "verify", unit)
    refused = told(analyze, "verify", misspelt)
    rated = told(analyze, "security", "--offline=true", f"--threshold={EXPOSURE}", unit)

    assert verified == (0, "")
    assert "RestratSec" in refused[1]
    assert rated[0] == 0, rated[1]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_kustomize_makes_of_a_topology_what_the_other_tests_look_at(name: str) -> None:
    build = program("kubectl kustomize", "kustomize build")

    status, output = told(*build, KUBERNETES / name)
    resources: list[dict[str, Any]] = list(yaml.safe_load_all(output))

    def names(of: list[dict[str, Any]]) -> list[tuple[str, str]]:
        return sorted((one["kind"], one["metadata"]["name"]) for one in of)

    assert status == 0
    assert names(resources) == names(rendered(KUBERNETES / name))
    assert [by_kubernetes(one) for one in resources] == [None] * len(resources)


def compose(folder: Path, *files: str, **variables: str) -> tuple[int, str]:
    named = [word for file in files for word in ("--file", str(folder / file))]
    command = program("docker compose", "docker-compose", probe="version")
    return told(*command, *named, "config", "--format", "json", **variables)


def test_compose_accepts_its_files_and_says_what_is_missing(tmp_path: Path) -> None:
    for file in COMPOSE:
        shutil.copy(file, tmp_path)
    names = [file.name for file in COMPOSE]
    workspace = {"WORKSPACE": str(tmp_path)}
    without_files = compose(tmp_path, names[0], **workspace)
    for name, line in {
        "service.env": f"A2A_BEARER_TOKEN={'x' * 32}",
        "opencode.env": "OPENCODE_SERVER_PASSWORD=sesame",
        "postgres.env": "POSTGRES_PASSWORD=sesame",
    }.items():
        (tmp_path / name).write_text(line + "\n")

    without_workspace = compose(tmp_path, names[0])
    one, both = compose(tmp_path, names[0], **workspace), compose(tmp_path, *names, **workspace)
    wrong = (tmp_path / names[0]).read_text().replace("read_only:", "readonly:")
    (tmp_path / "wrong.yaml").write_text(wrong)

    assert ".env not found" in without_files[1]
    assert "set WORKSPACE to the directory" in without_workspace[1]
    assert (one[0], both[0]) == (0, 0), one[1] + both[1]
    assert json.loads(one[1])["services"].keys() == {"agent", "opencode"}
    services = json.loads(both[1])["services"]
    assert services.keys() == {"agent", "agent-two", "opencode", "postgres"}
    for name in ("agent", "agent-two"):
        assert set(services[name]["environment"]) <= set(VARIABLES)
        assert services[name]["environment"]["A2A_BEARER_TOKEN"] == "x" * 32
        assert "OPENCODE_SERVER_PASSWORD" not in services[name]["environment"]
    assert compose(tmp_path, "wrong.yaml", **workspace)[0] != 0


def test_prometheus_fires_each_alert_when_its_test_says_so(tmp_path: Path) -> None:
    (promtool,) = program("promtool")
    for file in MONITORING.glob("*.yml"):
        shutil.copy(file, tmp_path)
    rules, tests = tmp_path / "rules.yml", tmp_path / "rules.test.yml"

    checked, tested = (
        told(promtool, "check", "rules", rules),
        told(promtool, "test", "rules", tests),
    )
    rules.write_text(rules.read_text().replace("for: 2m", "for: 20m"))

    assert checked[0] == 0, checked[1]
    assert tested[0] == 0, tested[1]
    assert told(promtool, "test", "rules", tests)[0] != 0
