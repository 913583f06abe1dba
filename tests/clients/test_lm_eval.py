"""lm-eval's scores through the server equal those of its own transformers backend, question by question."""

import json
import re
import subprocess
import sys

import pytest

from tests.clients.environment import FOLDER, PYTHON, missing
from tests.integration.serving import Served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing(".py")), reason=missing(".py"))]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, scratch = tmp_path_factory.mktemp("model") / "nano", tmp_path_factory.mktemp("tasks")
    command = [sys.executable, "-m", "kvasir.cli.main", "convert", "unpack", "nano", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    server = Served(tmp_path_factory.mktemp("server"), "--dtype", "float32")
    try:
        command = [str(PYTHON), str(FOLDER / "lm_eval_scores.py"), server.url, str(folder), str(scratch)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    finally:
        server.kill()
    last = re.findall(r"^RESULTS (.*)$", done.stdout, re.MULTILINE)
    assert last, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(last[-1])


def log_likelihoods(answers):
    """Log-likelihood and greediness of each choice of each question."""
    return [[(float(choice[0][0]), str(choice[0][1])) for choice in question] for question in answers]


def test_log_likelihoods(results):
    hf, served = (log_likelihoods(results[kind]["answers"]["kvasir_choices"]) for kind in ("hf", "completions"))
    assert len(hf) == len(served) == 8
    for ours, theirs in zip(served, hf):
        for (value, greedy), (expected, expected_greedy) in zip(ours, theirs):
            assert value == pytest.approx(expected, abs=1e-3) and greedy == expected_greedy
    assert results["completions"]["metrics"]["kvasir_choices"] == results["hf"]["metrics"]["kvasir_choices"]


def test_the_comparison_can_fail(results):
    """Without the token that begins a text the scores are others: this is what the setting is for."""
    hf, other = (log_likelihoods(results[kind]["answers"]["kvasir_choices"]) for kind in ("hf", "without_bos"))
    differences = [abs(a[0] - b[0]) for ours, theirs in zip(other, hf) for a, b in zip(ours, theirs)]
    assert max(differences) > 0.05


def test_generated_text(results):
    words = {kind: results[kind]["answers"]["kvasir_words"] for kind in ("hf", "completions", "hf_chat", "chat")}
    assert words["completions"] == words["hf"] and words["chat"] == words["hf_chat"]
    assert words["chat"] != words["completions"]
