"""Write the Grafana dashboard and the alert rules of Prometheus from the definitions of the metrics.

    python -m tools.monitoring

A test holds that the stored files are current. Every metric has a panel, in the section that its definition names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import yaml

from kvasir.api.http.metric_definitions import BY_NAME, DEFINITIONS, Alert, Definition, Section

DEPLOY = Path(__file__).parent.parent / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvasir.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
# Panels that divide one counter's rate by another's.
SHARES = (
    ("Share of prompt tokens found in the cache", "Cache", "cached_tokens", "prefix_query_tokens"),
    ("Share of draft tokens accepted", "Drafts", "accepted_draft_tokens", "draft_tokens"),
)
DOWN = Alert("KvasirDown", 'up{job="kvasir"} == 0', "1m", "critical", "The server does not answer Prometheus.")
QUANTILES = (0.5, 0.95, 0.99)
FILTER = '{instance=~"$instance"}'
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 7  # of a panel; a dashboard is 24 wide


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for section in get_args(Section):
        panels.append({"type": "row", "title": section, "collapsed": False, "gridPos": _place(0, y, 24, 1)})
        own = [_share(*share) for share in SHARES if share[1] == section]
        own += [_panel(d) for d in DEFINITIONS if d.section == section]
        for i, panel in enumerate(own):
            panel["gridPos"] = _place(i % 3 * WIDTH, y + 1 + i // 3 * HEIGHT, WIDTH, HEIGHT)
        panels += own
        y += 1 + -(-len(own) // 3) * HEIGHT
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    variables = [
        {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus", "hide": 0},
        {
            "name": "instance",
            "label": "Server",
            "type": "query",
            "datasource": SOURCE,
            "query": "label_values(kvasir:build_info, instance)",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    return {
        "uid": "kvasir",
        "title": "kvasir",
        "tags": ["kvasir"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(definition: Definition) -> dict[str, Any]:
    name = definition.prometheus + FILTER
    by = f" by ({', '.join(('instance', *definition.labels))})"
    legend = " ".join(f"{{{{{label}}}}}" for label in definition.labels or ("instance",))
    unit = definition.unit
    if definition.kind == "histogram":
        rate = f"sum by (le) (rate({name}[$__rate_interval]))"
        queries = [(f"histogram_quantile({q}, {rate})", f"p{q * 100:g}") for q in QUANTILES]
    elif definition.kind == "counter":
        queries = [(f"sum{by} (rate({name}[$__rate_interval]))", legend)]
        unit = "ops" if unit == "short" else unit  # a second's increase
    else:
        queries = [(name, legend)]
    return _chart(definition.name.replace("_", " "), definition.text, unit, queries)


def _share(title: str, section: str, part: str, whole: str) -> dict[str, Any]:
    rates = [f"sum by (instance) (rate({BY_NAME[n].prometheus}{FILTER}[$__rate_interval]))" for n in (part, whole)]
    return _chart(title, title, "percentunit", [(" / ".join(rates), "{{instance}}")])


def _chart(title: str, text: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "custom": {"fillOpacity": 8, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def alerts() -> dict[str, Any]:
    """The rule file of Prometheus."""
    rules = [_rule(DOWN, DOWN.expr)]
    rules += [_rule(d.alert, d.alert.expr.format(name=d.prometheus)) for d in DEFINITIONS if d.alert is not None]
    return {"groups": [{"name": "kvasir", "rules": rules}]}


def _rule(alert: Alert, expr: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": expr,
        "for": alert.hold,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary},
    }


def files() -> dict[Path, str]:
    """Text of each file that is made."""
    head = "# Made by `python -m tools.monitoring` from the definitions of the metrics. Do not edit.\n"
    return {
        DASHBOARD: json.dumps(dashboard(), indent=1) + "\n",
        ALERTS: head + yaml.safe_dump(alerts(), sort_keys=False, width=120),
    }


if __name__ == "__main__":
    for file, text in files().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        print(file)
