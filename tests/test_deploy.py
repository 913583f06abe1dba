"""The files in deploy/: made ones are current, compose files fit a schema, and the container drains as it should."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvasir.api.http.auth import OPEN_PATHS
from kvasir.api.http.metric_definitions import BY_NAME, DEFINITIONS, Alert
from kvasir.api.server import CLOSE_SECONDS
from kvasir.client.replica import STOP_SECONDS
from kvasir.config import ServiceConfig
from tools import monitoring

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
# A metric in PromQL, as the samples are named.
NAME = re.compile(r"kvasir:[a-z_]+")

STRINGS = {"type": "array", "items": {"type": "string"}}
DURATION = {"type": "string", "pattern": r"^(\d+(h|m|s|ms))+$"}
MAPPING = {"type": "object", "additionalProperties": {"type": "string"}}
# The parts of the Compose specification that the files use; any other key is a mistake, or belongs in here.
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "image": {"type": "string"},
        "build": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"context": {"type": "string"}, "dockerfile": {"type": "string"}, "args": MAPPING},
        },
        "command": STRINGS,
        "environment": MAPPING,
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^127\.0\.0\.1:\d+:\d+$"}},
        "volumes": {"type": "array", "items": {"type": "string", "pattern": r"^[^:]+:/[^:]+(:ro)?$"}},
        "init": {"type": "boolean"},
        "cap_drop": STRINGS,
        "security_opt": STRINGS,
        "stop_grace_period": DURATION,
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "depends_on": STRINGS,
        "healthcheck": {
            "type": "object",
            "required": ["test"],
            "additionalProperties": False,
            "properties": {
                "test": {**STRINGS, "minItems": 2},
                "interval": DURATION,
                "timeout": DURATION,
                "start_period": DURATION,
                "retries": {"type": "integer", "minimum": 1},
            },
        },
        "deploy": {"type": "object"},
    },
}
COMPOSE = {
    "type": "object",
    "required": ["services"],
    "additionalProperties": False,
    "properties": {
        "services": {"type": "object", "minProperties": 1, "additionalProperties": SERVICE},
        "volumes": {"type": "object", "additionalProperties": {"type": "object"}},
    },
}


def load(name: str) -> dict:
    return yaml.safe_load((DEPLOY / name).read_text())


# ------------------------------------------------------------------------------------------------ dashboard and alerts


@pytest.mark.parametrize("file", list(monitoring.files()), ids=lambda f: f.name)
def test_made_files_are_current(file):
    assert file.read_text() == monitoring.files()[file], "run: python -m tools.monitoring"


def test_the_dashboard_shows_every_metric_once():
    panels = [p for p in monitoring.dashboard()["panels"] if p["type"] != "row"]
    shown = [set(NAME.findall(" ".join(t["expr"] for t in p["targets"]))) for p in panels]
    single = [next(iter(names)) for names in shown if len(names) == 1]
    assert sorted(single) == sorted(d.prometheus for d in DEFINITIONS)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(places) == len(set(places)) and len({p["id"] for p in panels}) == len(panels)


def test_alerts_ask_for_metrics_that_exist():
    served = {d.prometheus for d in DEFINITIONS}
    rules = load("prometheus/alerts.yml")["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 6
    for rule in rules:
        assert set(NAME.findall(rule["expr"])) <= served and "{name}" not in rule["expr"]
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"].endswith(".")


def test_a_changed_definition_is_noticed(monkeypatch):
    """Negative control: the stored files are compared with what the definitions say now."""
    alert = Alert("New", "rate({name}[5m]) > 1", "5m", "warning", "New.")
    changed = tuple(
        d if d.name != "steps" else type(d)(d.name, d.kind, "Other", d.section, d.read, alert=alert)
        for d in DEFINITIONS
    )
    monkeypatch.setattr(monitoring, "DEFINITIONS", changed)
    for file, text in monitoring.files().items():
        assert file.read_text() != text
    assert BY_NAME["steps"].text != "Other"


# -------------------------------------------------------------------------------------------------------------- compose


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_files_fit_the_schema(name):
    jsonschema.validate(load(name), COMPOSE)


def test_the_schema_can_refuse():
    broken = copy.deepcopy(load("compose.yaml"))
    for change in (
        lambda c: c["services"]["kvasir"].update(ports=["8000:8000"]),
        lambda c: c["services"]["kvasir"].update(stop_grace_period="60"),
        lambda c: c["services"]["kvasir"].update(healtcheck={}),
        lambda c: c.update(service={}),
    ):
        changed = copy.deepcopy(broken)
        change(changed)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed, COMPOSE)


def test_the_compose_file_is_whole():
    compose = load("compose.yaml")
    for service in compose["services"].values():
        assert "build" in service or re.search(r":v?\d+\.\d+", service["image"]), "an image without a version"
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (DEPLOY / source).is_dir() if source.startswith(".") else source in compose["volumes"]
        for name in service.get("depends_on", ()):
            assert name in compose["services"]
    build = compose["services"]["kvasir"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    assert "${KVASIR_API_KEY:?" in compose["services"]["kvasir"]["environment"]["KVASIR_API_KEY"]


def test_prometheus_and_grafana_find_each_other():
    prometheus = load("prometheus/prometheus.yml")
    assert all((DEPLOY / "prometheus" / file).is_file() for file in prometheus["rule_files"])
    [job] = prometheus["scrape_configs"]
    assert f'job="{job["job_name"]}"' in monitoring.DOWN.expr
    assert job["static_configs"] == [{"targets": ["kvasir:8000"]}] and "metrics_path" not in job
    assert "--public-metrics" in load("compose.yaml")["services"]["kvasir"]["command"]
    [source] = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = load("grafana/provisioning/dashboards/kvasir.yaml")["providers"]
    mounts = load("compose.yaml")["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in mounts
    assert json.loads(monitoring.DASHBOARD.read_text())["uid"] == "kvasir"


# ------------------------------------------------------------------------------------------------------------ container


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_the_container_is_not_root_and_says_whether_it_is_ready():
    found = instructions()
    names = [name for name, _ in found]
    assert names[0] == "FROM" and set(names) <= {
        "FROM", "RUN", "ARG", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT",
        "CMD",
    }  # fmt: skip
    last = {name: text for name, text in found}
    assert last["USER"].isdigit() and int(last["USER"]) > 0, "a number, so that Kubernetes can see that it is not root"
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    path = re.search(r"http://127\.0\.0\.1:8000(/[a-z/]*)", last["HEALTHCHECK"])[1]
    assert path in OPEN_PATHS and path != "/health/live", "it needs no key, and fails while the model loads"
    for source in re.findall(r"^COPY (.*)$", (DEPLOY / "Containerfile").read_text(), re.M):
        assert all((ROOT / name).exists() for name in source.split()[:-1])


def test_sigterm_reaches_the_server_and_it_has_time_to_drain():
    last = {name: text for name, text in instructions()}
    entry = json.loads(last["ENTRYPOINT"])  # in exec form: a shell would swallow the signal
    assert entry[:2] == ["kvasir", "serve"] and last["STOPSIGNAL"] == "SIGTERM" and json.loads(last["CMD"]) == []
    grace = load("compose.yaml")["services"]["kvasir"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > ServiceConfig().drain_timeout + STOP_SECONDS + CLOSE_SECONDS
    test = load("compose.yaml")["services"]["kvasir"]["healthcheck"]["test"]
    assert test[1:] == json.loads(last["HEALTHCHECK"].partition("CMD ")[2]), "one check in both places"
