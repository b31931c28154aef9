"""deploy/: dashboards and alerts name metrics that exist, and Prometheus itself accepts and tries the alerts."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tests.source_tree import ROOT

from prime_node.cli.coordinator import ServeOrCommand
from prime_node.cli.main import Commands
from prime_node.coordinator.api.routes import HEALTH_PATH, READY_PATH
from prime_node.coordinator.metrics import HOST_METRICS, METRICS
from prime_node.ports.metrics import MetricKind

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
ROWS = ROOT / "node" / "prime_node" / "coordinator" / "measure" / "observer.py"


def known_metrics() -> set[str]:
    """Return the names that /metrics may have: the declared ones, and the gauges of a step's row."""
    names = set()
    for one in (*METRICS, *HOST_METRICS):
        suffixes = ("_bucket", "_sum", "_count") if one.kind is MetricKind.HISTOGRAM else ("",)
        names |= {one.name + suffix for suffix in suffixes}
    keys = [node.value for node in ast.walk(ast.parse(ROWS.read_text())) if isinstance(node, ast.Constant)]
    rows = {f"prime_coordinator_{key}" for key in keys if isinstance(key, str) and re.fullmatch(r"[a-z_]+", key)}
    return names | rows


def expressions() -> list[str]:
    rules = re.findall(r"^ +expr: (.*)$", RULES.read_text(), re.MULTILINE)
    panels = [panel for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]]
    return [*rules, *(target["expr"] for panel in panels for target in panel["targets"])]


def test_dashboards_and_alerts_name_metrics_that_exist() -> None:
    names = {name for one in expressions() for name in re.findall(r"\bprime_\w+", one)}
    assert len(names) > 20
    assert names - known_metrics() == set()


def test_the_alerts_are_those_of_the_operators_guide() -> None:
    guide = (ROOT / "docs" / "operating.md").read_text()
    table = re.findall(r"^\| (.*?) \| `(prime_.*|sum.*|histogram_.*)` \|$", guide, re.MULTILINE)
    rules = re.findall(r"expr: (.*?)\n.*?summary: (.*?)\n", RULES.read_text(), re.DOTALL)
    assert [(what, expression) for expression, what in rules] == table


def test_the_dashboards_are_as_the_script_writes_them() -> None:
    assert [path.stem for path in DASHBOARDS] == ["contributors", "run", "swarm", "validators"]
    subprocess.run([sys.executable, str(ROOT / "scripts" / "make_dashboards.py"), "--check"], check=True)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)
def test_prometheus_accepts_the_alerts_and_its_tests_of_them_pass(tmp_path: Path) -> None:
    folder = DEPLOY / "prometheus"
    for command in (("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")):
        ran = subprocess.run(["promtool", *command], cwd=folder, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [f"{{expr: {json.dumps(one)}, alert: A{number}}}" for number, one in enumerate(expressions())]
    panels = tmp_path / "panels.yml"
    panels.write_text("groups: [{name: panels, rules: [" + ", ".join(lines) + "]}]")
    ran = subprocess.run(["promtool", "check", "rules", str(panels)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


CHART = DEPLOY
PLAIN = [one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one]
PODS = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in PLAIN if one["kind"] == "Deployment"}
needs_helm = pytest.mark.skipif(
    shutil.which("helm") is None, reason="helm is not installed; deploy/kubernetes.yaml is checked in its place"
)


def rendered(*settings: str) -> subprocess.CompletedProcess[str]:
    options = [word for one in settings for word in ("--set", one)]
    return subprocess.run(["helm", "template", "mine", str(CHART), *options], capture_output=True, text=True)


@needs_helm
def test_helm_accepts_the_chart_and_writes_the_plain_manifest() -> None:
    linted = subprocess.run(["helm", "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    off = "prometheus.enabled=false,grafana.enabled=false"
    assert (DEPLOY / "kubernetes.yaml").read_text().split("\n", 1)[1] == rendered(off).stdout
    assert [one for one in yaml.safe_load_all(rendered(off).stdout) if one] == PLAIN
    whole = [one for one in yaml.safe_load_all(rendered().stdout) if one]
    maps = {one["metadata"]["name"]: one["data"] for one in whole if one["kind"] == "ConfigMap"}
    assert maps["grafana-dashboards"].keys() == {path.name for path in DASHBOARDS}
    assert maps["prometheus-config"]["rules.yml"] == RULES.read_text()


@needs_helm
def test_helm_refuses_values_that_the_chart_does_not_have() -> None:
    for wrong in ("nonsense=1", "newRun.url=host", "storage.accessMode=Any", "coordinator.set={host}"):
        assert rendered(wrong).returncode != 0, wrong
    many = rendered("storage.accessMode=ReadWriteMany", "coordinator.set={coordinator.blobs=s3://b/p}")
    assert "podAffinity" not in many.stdout
    assert "coordinator.blobs=s3://b/p" in many.stdout


def test_the_manifest_has_the_roles_of_the_compose_file_with_few_rights() -> None:
    commands = Commands()
    roles = {name: one for name, one in COMPOSE["services"].items() if "command" in one}
    assert PODS.keys() == roles.keys()
    for name, pod in PODS.items():
        (container,) = pod["containers"]
        assert container["args"] == roles[name]["command"] == [name, *container["args"][1:]]
        role = commands[name]
        role = role.commands[role.default_command] if isinstance(role, ServeOrCommand) else role
        assert role.make_context(name, list(container["args"][1:])).params["run"]
        assert pod["terminationGracePeriodSeconds"] >= int(roles[name]["stop_grace_period"][:-1])
        assert pod["automountServiceAccountToken"] is False
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
        for one in (container, *pod["initContainers"]):
            rights = one["securityContext"]
            assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
            assert rights["capabilities"] == {"drop": ["ALL"]}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in ("prometheus", "grafana"):
        assert values[name]["image"] == COMPOSE["services"][name]["image"]


def test_the_probes_of_the_manifest_are_endpoints() -> None:
    (coordinator,) = PODS["coordinator"]["containers"]
    paths = {coordinator[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {HEALTH_PATH, READY_PATH}


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.mark.skipif(
    find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed: pip install '.[dev]'"
)
def test_the_compose_file_is_valid_by_its_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    ran = subprocess.run([*command, str(DEPLOY / "compose.yaml")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_roles_of_the_compose_file_are_commands_with_valid_arguments_and_few_rights() -> None:
    commands = Commands()
    roles = {name: one for name, one in COMPOSE["services"].items() if "command" in one}
    assert set(roles) == {"coordinator", "trainer", "validator"}
    for name, one in roles.items():
        command, *arguments = one["command"]
        role = commands[command]
        if isinstance(role, ServeOrCommand):
            assert arguments[0] not in role.commands
            role = role.commands[role.default_command]
        assert role.make_context(command, list(arguments)).params["run"], name
        assert (one["read_only"], one["cap_drop"], one["security_opt"]) == (True, ["ALL"], ["no-new-privileges:true"])


def test_the_compose_file_mounts_folders_that_exist() -> None:
    volumes = [volume for one in COMPOSE["services"].values() for volume in one.get("volumes", [])]
    local = [volume.split(":")[0] for volume in volumes if volume.startswith("./")]
    assert len(local) == 3
    assert [path for path in local if not (DEPLOY / path).is_dir()] == []


def test_the_image_runs_as_a_user_without_rights_and_copies_what_the_build_has() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    (user,) = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert int(user) > 0
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {word for line in lines if line.startswith("COPY c") for word in line.split()[1:-1]} == allowed
