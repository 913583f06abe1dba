"""``kvasir bench report``: write results as one self-contained HTML page with tables, verdicts and plots."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

from kvasir.bench.merge import load
from kvasir.bench.result import limit_of, middle, share_of_limit, shown, verdict
from kvasir.errors import ConfigError, install

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left } .met { color: #17692b } .missed { color: #a11; font-weight: 600 }
.facts { color: #666; font-size: 13px } code { font-size: 13px } svg { max-width: 100%; height: auto }"""
# Kinds of metric that get a plot -> title of the plot.
WORDS = {
    "decode_tok_s": "decode, tokens a second",
    "prefill_tok_s": "prefill, tokens a second",
    "ttft_ms_p50": "TTFT p50, ms",
    "ttft_ms_p99": "TTFT p99, ms",
    "itl_ms_p99": "ITL p99, ms",
    "output_tok_s": "output, tokens a second",
    "cached_tokens": "cached tokens",
    "first_token_s": "exec to first token, s",
}
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#718096")


def run(files: list[Path], output: Path) -> None:
    """Write the page. Raises ConfigError for a file that is not a result, or without matplotlib."""
    results = [load(f) for f in files]
    output.write_text(page(results))


def page(results: list[dict[str, Any]]) -> str:
    body = "\n".join(_section(r) for r in results)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kvasir bench</title><style>{STYLE}</style>'
    return f"{head}\n<h1>kvasir bench</h1>\n{body}\n</html>\n"


def _section(found: dict[str, Any]) -> str:
    facts = f"{found['machine']} · commit {found['commit'] or 'unknown'} · {found['date']} · " + ", ".join(
        f"{k} {v}" for k, v in found["versions"].items()
    )
    return (
        f"<h2>{_text(found['case'])}</h2><p class=facts>{_text(facts)}<br><code>{_text(found['command'])}</code></p>"
        f"{_settings(found)}{_verdicts(found)}{plots(found)}{_metrics(found)}"
    )


def _settings(found: dict[str, Any]) -> str:
    rows = [
        f"<b>{_text(a['name'])}</b> {_text(', '.join(f'{k}={v}' for k, v in a['config'].items()))}"
        for a in found["arms"]
    ]
    return f"<p class=facts>{'<br>'.join(rows)}</p>"


def _verdicts(found: dict[str, Any]) -> str:
    targets = found.get("targets", {})
    if not targets:
        return ""
    rows = [
        f"<tr><td>{_text(name)}<td>{t['ratio']:.3f}x<td class={'met' if t['met'] else 'missed'}>{_text(verdict(t))}"
        for name, t in targets.items()
    ]
    return f"<table><tr><th>target<th>ratio<th>{''.join(rows)}</table>"


def _metrics(found: dict[str, Any]) -> str:
    """A table with metrics down and arms across, then the ratios of each metric and its share of the limit."""
    arms, limits = found["arms"], found["limits"]
    names = list(dict.fromkeys(name for a in arms for name in a["metrics"]))
    pairs = list(dict.fromkeys(r.split(" ", 1)[1] for r in found["ratios"] if " " in r))
    heads = [
        "metric",
        *(a["name"] for a in arms),
        *pairs,
        *(["limit", f"share of it, {arms[0]['name']}"] if limits else []),
    ]
    rows = []
    for name in names:
        cells = [name, *(shown(a["metrics"][name]) if name in a["metrics"] else "" for a in arms)]
        cells += [f"{found['ratios'][f'{name} {p}']:.2f}x" if f"{name} {p}" in found["ratios"] else "" for p in pairs]
        if limits:
            limit = limits.get(name)
            cells += [shown(limit) if limit is not None else "", share_of_limit(arms[0]["metrics"].get(name), limit)]
        rows.append("<tr>" + "".join(f"<td>{_text(c)}" for c in cells))
    return f"<table><tr>{''.join(f'<th>{_text(h)}' for h in heads)}{''.join(rows)}</table>"


def plots(found: dict[str, Any]) -> str:
    """One bar chart for each kind of metric that several workloads or arms have.

    Bars are medians, whiskers the range, and dashed lines the limits.
    """
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for a in found["arms"] for name in a["metrics"]):
        group, _, kind = name.rpartition(".")
        if group and kind in WORDS:
            kinds.setdefault(kind, []).append(group)
    return "".join(_plot(found, kind, groups) for kind, groups in kinds.items())


def _plot(found: dict[str, Any], kind: str, groups: list[str]) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError(f"the report draws with matplotlib: {install('plots')}") from e
    arms = found["arms"]
    legend = 0.8 + 0.075 * max(len(entry["name"]) for entry in arms)  # inches to the right of the bars
    figure = Figure(figsize=(legend + len(groups) * max(1.5, 0.55 * len(arms)), 2.9), layout="constrained")
    # Every group has its own scale, since batch 1 and batch 256 are two orders of magnitude apart.
    for place, (axes, group) in enumerate(zip(figure.subplots(1, len(groups), squeeze=False)[0], groups)):
        for i, entry in enumerate(arms):
            metric = entry["metrics"].get(f"{group}.{kind}")
            value = middle(metric)
            if value is None:
                continue
            low, high = (metric["min"], metric["max"]) if isinstance(metric, dict) else (value, value)
            axes.bar(
                i,
                value,
                0.85,
                color=COLOURS[i % len(COLOURS)],
                label=entry["name"],
                yerr=[[value - low], [high - value]],
                capsize=3,
                error_kw={"linewidth": 0.8},
            )
            limit = limit_of(found["limits"], f"{group}.{kind}", entry["name"])
            if isinstance(limit, (int, float)):
                axes.hlines(
                    limit,
                    i - 0.5,
                    i + 0.5,
                    color="#222",
                    linestyle="dashed",
                    linewidth=1,
                    label="limit of the machine" if i == 0 else None,
                )
        axes.set_xticks([])
        axes.set_xlabel(group, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 0:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(WORDS[kind], fontsize=10)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"{found['case']} {kind}"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def _text(value: Any) -> str:
    return html.escape(str(value))
