"""The manifests in deploy/kubernetes: they fit their schemas, and a pod has time to drain."""

from __future__ import annotations

import copy
import importlib
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvasir.api.http.auth import OPEN_PATHS
from kvasir.api.http.metric_definitions import BY_NAME
from kvasir.api.server import CLOSE_SECONDS
from kvasir.client.replica import STOP_SECONDS
from kvasir.config import ServiceConfig

FOLDER = Path(__file__).parent.parent / "deploy" / "kubernetes"


def closed(properties: dict, *required: str) -> dict:
    """An object with these keys alone."""
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


NUMBER, TEXT = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
META = closed({"name": TEXT, "labels": TEXTS}, "name")
SECRET = closed({"name": TEXT, "key": TEXT}, "name", "key")
PROBE = closed(
    {
        "httpGet": closed({"path": {"type": "string", "pattern": "^/"}, "port": TEXT}, "path", "port"),
        **dict.fromkeys(("periodSeconds", "timeoutSeconds", "failureThreshold"), {"type": "integer", "minimum": 1}),
    },
    "httpGet",
)
AMOUNTS = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
CONTAINER = closed(
    {
        "name": TEXT,
        "image": TEXT,
        "args": {"type": "array", "items": TEXT},
        "env": {
            "type": "array",
            "items": closed({"name": TEXT, "valueFrom": closed({"secretKeyRef": SECRET})}, "name", "valueFrom"),
        },
        "ports": {"type": "array", "items": closed({"name": TEXT, "containerPort": NUMBER}, "name", "containerPort")},
        **dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), PROBE),
        "lifecycle": closed({"preStop": closed({"exec": closed({"command": {"type": "array", "items": TEXT}})})}),
        "resources": closed({"requests": AMOUNTS, "limits": AMOUNTS}, "requests"),
        "securityContext": {"type": "object"},
        "volumeMounts": {"type": "array", "items": closed({"name": TEXT, "mountPath": TEXT}, "name", "mountPath")},
    },
    "name",
    "image",
    "resources",
)
POD = closed(
    {
        "terminationGracePeriodSeconds": NUMBER,
        "securityContext": {"type": "object"},
        "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
        "volumes": {"type": "array", "items": closed({"name": TEXT, "emptyDir": {"type": "object"}}, "name")},
    },
    "containers",
    "terminationGracePeriodSeconds",
)
TEMPLATE = closed({"metadata": closed({"labels": TEXTS}), "spec": POD}, "spec")
SELECTOR = closed({"matchLabels": TEXTS}, "matchLabels")
GROUP = {"rayStartParams": TEXTS, "template": TEMPLATE}
# The parts of each resource that the manifests use; any other key is a mistake, or belongs in here.
SPECS = {
    ("apps/v1", "Deployment"): closed(
        {
            "replicas": NUMBER,
            "selector": SELECTOR,
            "template": TEMPLATE,
            "strategy": closed({"type": TEXT, "rollingUpdate": closed({"maxSurge": NUMBER, "maxUnavailable": NUMBER})}),
        },
        "selector",
        "template",
    ),
    ("v1", "Service"): closed(
        {
            "selector": TEXTS,
            "ports": {
                "type": "array",
                "items": closed({"name": TEXT, "port": NUMBER, "targetPort": TEXT}, "name", "port"),
            },
        },
        "selector",
        "ports",
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): closed(
        {
            "selector": SELECTOR,
            "podMetricsEndpoints": {
                "type": "array",
                "items": closed(
                    {
                        "port": TEXT,
                        "path": TEXT,
                        "interval": TEXT,
                        "authorization": closed({"type": TEXT, "credentials": SECRET}),
                    },
                    "port",
                ),
            },
        },
        "selector",
        "podMetricsEndpoints",
    ),
    ("ray.io/v1", "RayService"): closed(
        {
            **dict.fromkeys(("serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold"), NUMBER),
            "serveConfigV2": TEXT,
            "rayClusterConfig": closed(
                {
                    "rayVersion": TEXT,
                    "headGroupSpec": closed(GROUP, "template"),
                    "workerGroupSpecs": {
                        "type": "array",
                        "items": closed(
                            {
                                **GROUP,
                                "groupName": TEXT,
                                **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), NUMBER),
                            },
                            "groupName",
                            "template",
                        ),
                    },
                },
                "headGroupSpec",
            ),
        },
        "serveConfigV2",
        "rayClusterConfig",
    ),
}


def resources() -> list[tuple[str, dict]]:
    return [
        (f"{file.stem} {one['kind']}", one)
        for file in sorted(FOLDER.glob("*.yaml"))
        for one in yaml.safe_load_all(file.read_text())
    ]


def check(one: dict) -> None:
    whole = closed({"apiVersion": TEXT, "kind": TEXT, "metadata": META, "spec": {}}, "apiVersion", "kind", "metadata")
    jsonschema.validate(one, whole)
    jsonschema.validate(one["spec"], SPECS[one["apiVersion"], one["kind"]])


def pods(one: dict) -> list[dict]:
    """The pod templates of a resource."""
    spec = one["spec"]
    if one["kind"] == "RayService":
        spec = spec["rayClusterConfig"]
        return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    return [spec["template"]] if "template" in spec else []


ALL = pytest.mark.parametrize("one", [one for _, one in resources()], ids=[name for name, _ in resources()])


@ALL
def test_manifests_fit_their_schemas(one):
    check(one)
    wrong = copy.deepcopy(one)
    wrong["spec"]["surplus"] = 1
    with pytest.raises(jsonschema.ValidationError):
        check(wrong)
    for pod in pods(wrong):
        pod["spec"]["containers"][0]["readinesProbe"] = {}
    wrong["spec"].pop("surplus")
    if pods(wrong):
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


@ALL
def test_kubernetes_own_schemas_agree(one):
    validator = pytest.importorskip("kubernetes_validate")
    if "." not in one["apiVersion"]:
        validator.validate(one, "1.31", strict=True)
    for pod in pods(one):  # those of other resources are pods as well
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod["spec"]}
        validator.validate(whole, "1.31", strict=True)
        whole["spec"] = {**pod["spec"], "surplus": 1}
        with pytest.raises(validator.ValidationError):
            validator.validate(whole, "1.31", strict=True)


@ALL
def test_pods_have_time_to_drain_and_probes_ask_open_routes(one):
    for pod in pods(one):
        grace, stops = pod["spec"]["terminationGracePeriodSeconds"], 5
        assert grace > ServiceConfig().drain_timeout + STOP_SECONDS + CLOSE_SECONDS + stops
        for container in pod["spec"]["containers"]:
            ports = {port["name"] for port in container.get("ports", ())}
            probes = [container[name] for name in container if name.endswith("Probe")]
            for probe in probes:
                assert probe["httpGet"]["path"] in OPEN_PATHS and probe["httpGet"]["port"] in ports
            if "startupProbe" in container:
                start = container["startupProbe"]
                assert start["periodSeconds"] * start["failureThreshold"] >= ServiceConfig().startup_timeout
                assert container["livenessProbe"]["httpGet"]["path"] == "/health/live", "a start is not a death"


def test_names_and_ports_belong_together():
    found = dict(resources())
    deployment, monitor = found["kvasir Deployment"], found["podmonitor PodMonitor"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for one in (deployment["spec"]["selector"], monitor["spec"]["selector"]):
        assert one["matchLabels"].items() <= labels.items()
    assert found["kvasir Service"]["spec"]["selector"].items() <= labels.items()
    assert monitor["spec"]["podMetricsEndpoints"][0]["path"] == "/metrics"
    assert "queued_seconds" in BY_NAME or "kvasir:queued_seconds" in BY_NAME


def test_the_ray_application_exists_and_its_command_parses():
    service = dict(resources())["rayservice RayService"]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    from kvasir.cluster.ray_service import END_SECONDS

    head = pods(service)[0]["spec"]
    assert head["terminationGracePeriodSeconds"] > END_SECONDS
    assert service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] == int(
        application["args"]["command"][2]
    )


def test_a_server_that_ends_is_noticed(monkeypatch):
    from kvasir.cluster import ray_service

    monkeypatch.setattr(sys, "executable", "/bin/echo")
    ended = ray_service.Server(["MODEL"])
    deadline = time.monotonic() + 60
    while ended._process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="status 0"):
        ended.check_health()
