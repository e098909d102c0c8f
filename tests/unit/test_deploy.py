"""The files in deploy/ and .github/: accepted by their validators, and true to this program."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import check_jsonschema  # pyright: ignore[reportMissingTypeStubs] - has none
import kubernetes_validate  # pyright: ignore[reportMissingTypeStubs] - has none
import promql_parser as promql
import pytest
import yaml
from click.testing import CliRunner

from opencode_a2a import __version__
from opencode_a2a.config import VARIABLES, load
from opencode_a2a.metrics import REGISTRY
from tests.chaos.cluster import DATABASE_FAULTS, OPENCODE_FAULTS, REPLICA_FAULTS
from tools import dashboard, release

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
CONTAINERFILE = DEPLOY / "Containerfile"
COMPOSE = (DEPLOY / "compose.yaml", DEPLOY / "compose.postgres.yaml")
MONITORING = DEPLOY / "monitoring"
FORGE = ROOT / ".github"
WORKFLOWS = sorted(FORGE.glob("workflows/*.yml"))
KUBERNETES = DEPLOY / "kubernetes"
TOPOLOGIES = ("single", "sidecar", "pool")
PASSWORD = "OPENCODE_SERVER_PASSWORD"  # noqa: S105 - the name of a variable

Refusal = str | None
"""What a validator says against a file; None if it accepts it."""


def by_schema(name: str, path: Path) -> Refusal:
    # In this process: to import it takes longer than to run it.
    done = CliRunner().invoke(
        check_jsonschema.main, ["--builtin-schema", f"vendor.{name}", str(path)]
    )
    return done.output if done.exit_code else None


def by_kubernetes(resource: dict[str, Any]) -> Refusal:
    try:
        kubernetes_validate.validate(resource, "1.37", strict=True)
    except kubernetes_validate.ValidationError as error:
        return error.message
    return None


def by_hadolint(path: Path) -> Refusal:
    program = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([program, path], capture_output=True, text=True, check=False)  # noqa: S603 - our own
    return done.stdout + done.stderr if done.returncode else None


@pytest.mark.parametrize(
    ("right", "wrong"), [("restart:", "restrat:"), ("condition:", "conditon:")], ids=lambda x: x
)
def test_a_misspelt_key_of_a_compose_file_is_refused(
    right: str, wrong: str, tmp_path: Path
) -> None:
    file = COMPOSE[1]
    misspelt = tmp_path / file.name
    misspelt.write_text(file.read_text().replace(right, wrong))

    assert wrong.rstrip(":") in (by_schema("compose-spec", misspelt) or "")


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_compose_files_are_accepted(file: Path) -> None:
    assert by_schema("compose-spec", file) is None


def test_the_recipe_of_the_image_is_accepted_and_a_misspelt_one_refused(tmp_path: Path) -> None:
    misspelt = tmp_path / "Containerfile"
    misspelt.write_text(CONTAINERFILE.read_text().replace("WORKDIR", "WORKDRI"))

    assert by_hadolint(CONTAINERFILE) is None
    assert "expecting" in (by_hadolint(misspelt) or "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(DEPLOY).as_posix())
def test_variables_are_settings_of_this_program(file: Path) -> None:
    named = set(re.findall(r"\b(?:A2A|OPENCODE)_[A-Z_]+\b", file.read_text()))

    assert named - set(VARIABLES) <= {PASSWORD}


def image_environment() -> dict[str, str]:
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", CONTAINERFILE.read_text(), re.MULTILINE)
    return dict(re.findall(r"(\w+)=(\S+)", block))


def compose_services() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in COMPOSE:
        yield from yaml.safe_load(file.read_text())["services"].items()


def test_the_service_of_the_compose_file_starts_with_its_settings() -> None:
    agent = dict(compose_services())["agent-two"]
    given = {
        name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value)
        for name, value in agent["environment"].items()
    }
    secrets = {"A2A_BEARER_TOKEN": "x" * 32, "OPENCODE_AUTH_PASSWORD": "secret"}

    settings = load({}, image_environment() | given | secrets)

    assert settings.warnings == ()
    assert settings.opencode.managed_server is False
    assert str(settings.a2a.state_dir) == "/state/service"


def test_containers_are_not_root_and_cannot_change_their_image() -> None:
    ours = [one for _, one in compose_services() if one.get("image", "").startswith("${IMAGE")]

    assert len(ours) == 3
    for one in ours:
        assert one["read_only"] is True
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
        assert not one["user"].startswith(("0", "root"))
    assert re.findall(r"^USER (.*)$", CONTAINERFILE.read_text(), re.MULTILINE) == ["10001:10001"]


def test_no_process_beside_opencode_has_its_password() -> None:
    """A health check is such a process: it gets the environment of its container."""
    opencode = next(one for name, one in compose_services() if name == "opencode")

    assert opencode["entrypoint"] == ["opencode-a2a"]
    assert opencode["command"][:2] == ["opencode", "--"]
    assert opencode["healthcheck"] == {"disable": True}
    assert "init" not in opencode
    assert "secrets" not in opencode


def rendered(folder: Path) -> list[dict[str, Any]]:
    """Return the resources of a kustomization.

    Kustomize may not be here; ``make deploy-test`` runs it. The kustomizations do nothing that
    would change a label, a selector or a variable, which is what these tests are about.
    """
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "resources", "components", "replicas", "images"}
    assert set(kustomization) <= known
    found: list[dict[str, Any]] = []
    for name in (*kustomization["resources"], *kustomization.get("components", ())):
        place = folder / name
        if place.is_dir():
            found += rendered(place)
        else:
            found += yaml.safe_load_all(place.read_text())
    return found


@pytest.fixture(scope="module", params=TOPOLOGIES)
def resources(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(KUBERNETES / request.param)


def test_kubernetes_accepts_every_resource(resources: list[dict[str, Any]]) -> None:
    assert [by_kubernetes(one) for one in resources] == [None] * len(resources)


def test_a_misspelt_key_of_a_kubernetes_resource_is_refused() -> None:
    text = (KUBERNETES / "pool" / "agent.yaml").read_text()

    refused = by_kubernetes(yaml.safe_load(text.replace("readinessProbe", "readynessProbe")))

    assert "readynessProbe" in (refused or "")


def pod_labels(resources: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the labels of each pod template, by the component that it is."""
    templates = [one["spec"]["template"] for one in resources if "template" in one.get("spec", {})]
    by_component = "app.kubernetes.io/component"
    return {
        template["metadata"]["labels"][by_component]: template["metadata"]["labels"]
        for template in templates
    }


def selectors(value: object) -> Iterator[dict[str, str]]:
    """Yield every selector of pods within a resource; an empty one selects everything."""
    if isinstance(value, dict):
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType] - parsed YAML
            if key in ("selector", "podSelector", "labelSelector"):
                yield inner.get("matchLabels", inner)  # pyright: ignore[reportUnknownMemberType]
            else:
                yield from selectors(inner)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, list):
        for inner in value:  # pyright: ignore[reportUnknownVariableType]
            yield from selectors(inner)  # pyright: ignore[reportUnknownArgumentType]


def test_every_selector_matches_exactly_the_pods_of_its_component(
    resources: list[dict[str, Any]],
) -> None:
    pods = pod_labels(resources)

    for resource in resources:
        for selector in selectors(resource):
            matched = [name for name, labels in pods.items() if selector.items() <= labels.items()]
            assert matched == [selector["app.kubernetes.io/component"]], resource["metadata"]
    named = {(one["kind"], one["metadata"]["name"]) for one in resources}
    assert {("Service", "agent"), ("NetworkPolicy", "agent")} <= named


def containers(resources: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for resource in resources:
        yield from (
            resource.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ())
        )


def test_containers_of_a_cluster_are_restricted_and_mount_what_there_is(
    resources: list[dict[str, Any]],
) -> None:
    for resource in resources:
        pod = resource.get("spec", {}).get("template", {}).get("spec")
        if not pod:
            continue
        claimed = resource["spec"].get("volumeClaimTemplates", ())
        volumes = {one["name"] for one in pod["volumes"]}
        volumes |= {one["metadata"]["name"] for one in claimed}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        used: set[str] = set()
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            used |= {mount["name"] for mount in container["volumeMounts"]}
        assert used == volumes


def test_no_probe_in_a_cluster_shows_the_password_of_opencode(
    resources: list[dict[str, Any]],
) -> None:
    (opencode,) = [one for one in containers(resources) if one["name"] == "opencode"]
    (agent,) = [one for one in containers(resources) if one["name"] == "agent"]

    assert opencode["command"] == ["opencode-a2a"]
    assert [one["name"] for one in opencode["env"]] == [PASSWORD]
    assert "exec" not in json.dumps(opencode)
    assert PASSWORD not in json.dumps(agent)
    mounted = [{mount["name"] for mount in one["volumeMounts"]} for one in (opencode, agent)]
    assert not {"state", "tmp", "home"} <= mounted[0] & mounted[1]


def test_a_replica_starts_with_the_settings_of_its_manifests(
    resources: list[dict[str, Any]],
) -> None:
    (agent,) = [one for one in containers(resources) if one["name"] == "agent"]
    maps = {one["metadata"]["name"]: one["data"] for one in resources if one["kind"] == "ConfigMap"}
    environ = image_environment() | {"A2A_BEARER_TOKEN": "x" * 32}
    for source in agent["envFrom"]:
        environ |= maps.get(source.get("configMapRef", {}).get("name"), {})
    for one in agent["env"]:
        environ[one["name"]] = one.get("value", "name")

    settings = load({}, environ)

    assert settings.warnings == ()
    assert settings.opencode.managed_server is False or settings.opencode.upstreams
    (grace,) = [
        one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for one in resources
        if one["metadata"]["name"] == "agent" and "template" in one.get("spec", {})
    ]
    assert grace >= 2 * settings.a2a.shutdown_grace_seconds


def test_the_pool_has_as_many_opencodes_as_its_replicas_know() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "pool" / "kustomization.yaml").read_text())
    upstreams = yaml.safe_load((KUBERNETES / "pool" / "upstreams.yaml").read_text())
    listed = json.loads(upstreams["data"]["OPENCODE_UPSTREAMS"])

    assert kustomization["replicas"] == [{"name": "opencode", "count": len(listed)}]
    assert [one["url"] for one in listed] == [
        f"http://opencode-{number}.opencode:4096" for number in range(len(listed))
    ]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_manifests_run_the_image_of_this_version(name: str) -> None:
    kustomization = yaml.safe_load((KUBERNETES / name / "kustomization.yaml").read_text())

    assert kustomization["images"] == [{"name": "opencode-a2a", "newTag": __version__}]
    assert {one["image"] for one in containers(rendered(KUBERNETES / name))} == {"opencode-a2a"}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


QUERIES = [
    *((rule["alert"], rule["expr"]) for rule in alerts()),
    *((panel.title, query) for panel in dashboard.PANELS for query in panel.queries.values()),
]


def exported() -> dict[str, set[str]]:
    """Return the labels of every series that the service can export, by its name."""
    found = {"up": {"job", "instance"}}
    for metric in REGISTRY.collect():
        own = {name for sample in metric.samples for name in sample.labels}
        collector = REGISTRY._names_to_collectors.get(metric.name)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - labels of what was not counted yet
        own |= set(getattr(collector, "_labelnames", ()))
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
        for ending in endings.get(metric.type, ("",)):
            le = {"le"} if ending == "_bucket" else set[str]()
            found[metric.name + ending] = own | le | {"job", "instance"}
    return found


@pytest.mark.parametrize(("name", "query"), QUERIES, ids=[name for name, _ in QUERIES])
def test_a_query_names_metrics_and_labels_that_the_service_exports(name: str, query: str) -> None:
    series = exported()
    named: list[tuple[str, set[str]]] = []

    def visit(expression: promql.Expr) -> None:
        if isinstance(expression, promql.VectorSelector):
            labels = {matcher.name for matcher in expression.matchers.matchers}
            named.append((expression.name or "", labels))

    promql.walk(promql.parse(query.replace("$__rate_interval", "5m")), visit)

    assert named
    for metric, labels in named:
        assert labels <= series[metric]


def test_every_alert_is_explained_and_tested_both_ways() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    names = [rule["alert"] for rule in alerts()]
    tests = yaml.safe_load((MONITORING / "rules.test.yml").read_text())["tests"]

    assert headings == ["Set it up", "Which alert for which failure", *names]
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["annotations"]["runbook_url"].endswith(
            f"/docs/runbook.md#{rule['alert'].lower()}"
        )
    fires = [
        (one["alertname"], "exp_alerts" in one) for test in tests for one in test["alert_rule_test"]
    ]
    assert fires == [(name, fire) for name in names for fire in (True, False)]


def test_every_failure_of_the_chaos_run_has_its_alert_or_says_why_not() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    table = page.partition("## Which alert for which failure")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| [^|]*\(`([a-z ]+)`\) \| ([^|]*) \|", table, re.MULTILINE))
    named = {fault: set(re.findall(r"\[(\w+)\]\(#", answer)) for fault, answer in rows.items()}

    assert set(rows) == {*REPLICA_FAULTS, *OPENCODE_FAULTS, *DATABASE_FAULTS}
    assert {*chain.from_iterable(named.values())} <= {rule["alert"] for rule in alerts()}
    assert {fault for fault, answer in rows.items() if answer.startswith("none")} == {
        "term",
        "clock",
    }
    assert all(named[fault] for fault in rows if fault != "clock")


def test_the_dashboard_is_made_from_its_list() -> None:
    text = (MONITORING / "dashboard.json").read_text()
    panels = json.loads(text)["panels"]

    assert text == dashboard.dashboard()
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize(
    ("schema", "name", "right", "wrong"),
    [
        ("github-workflows", "workflows/ci.yml", "runs-on:", "run-on:"),
        ("github-workflows", "workflows/release.yml", "needs:", "neds:"),
        ("github-workflows", "workflows/docs.yml", "runs-on:", "run-on:"),
        ("dependabot", "dependabot.yml", "schedule:", "scedule:"),
        ("github-issue-forms", "ISSUE_TEMPLATE/bug.yml", "attributes:", "atributes:"),
        ("github-issue-forms", "ISSUE_TEMPLATE/idea.yml", "validations:", "validation:"),
    ],
)
def test_files_for_the_forge_are_accepted_and_a_misspelt_key_is_refused(
    schema: str, name: str, right: str, wrong: str, tmp_path: Path
) -> None:
    file = FORGE / name
    misspelt = tmp_path / file.name
    misspelt.write_text(file.read_text().replace(right, wrong))

    assert by_schema(schema, file) is None
    assert by_schema(schema, misspelt) is not None


def by_zizmor(path: Path) -> Refusal:
    program = Path(sys.executable).parent / "zizmor"
    command = [program, "--offline", "--no-progress", "--quiet", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    return done.stdout + done.stderr if done.returncode else None


def test_an_auditor_finds_nothing_in_the_workflows_and_something_in_a_careless_one(
    tmp_path: Path,
) -> None:
    careless = tmp_path / "ci.yml"
    text = (FORGE / "workflows" / "ci.yml").read_text()
    careless.write_text(
        text.replace("with: {persist-credentials: false}", "").replace("@3d3c", "@")
    )

    assert [by_zizmor(file) for file in (*WORKFLOWS, FORGE / "dependabot.yml")] == [None] * 4
    assert "artipacked" in (by_zizmor(careless) or "")


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_has_few_rights_and_runs_what_anybody_can_run(file: Path) -> None:
    text = file.read_text()
    workflow = yaml.safe_load(text)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert workflow["permissions"] == {}
    assert all(
        "permissions" in job and "timeout-minutes" in job for job in workflow["jobs"].values()
    )
    assert all(
        re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used)
        for used in re.findall(r"uses: (.+)$", text, re.MULTILINE)
    )
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")


def test_the_notes_of_a_release_are_the_newest_section_of_the_changelog() -> None:
    changelog = "# Changelog\n\n## 2.1.0\n\n- [This](docs/a.md).\n\n## 2.0.0\n\n- That.\n"

    assert (
        release.notes(changelog, "2.1.0") == f"- [This]({release.SOURCE}/blob/v2.1.0/docs/a.md).\n"
    )
    with pytest.raises(ValueError, match=r"begins with '2\.1\.0'"):
        release.notes(changelog, "2.0.0")
