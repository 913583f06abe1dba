"""Calibration of hooks: cuts and labels of traces, probes and directions of known states, and what is folded."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvasir.convert.checkpoint import convert
from kvasir.convert.converter import load_converter
from kvasir.errors import ConfigError
from kvasir.hooks.hook import Gate, Hook, read_set, write_set
from kvasir.models import checkpoint
from kvasir.models.loader import read_tensors
from kvasir_lab.lookup import load_task
from kvasir_lab.steer import crest, styles
from kvasir_lab.steer.probes import directions, fit, held_out
from kvasir_lab.steer.traces import BLANK, Cut, Trace, cuts, splitting_ids
from kvasir_lab.tasks.style import STYLES
from kvasir_lab.tokenizer import shipped_tokenizer
from tests.engine.driver import Driver
from tests.hooks import DIM, HEADS, LAYERS, write_hooks


def states_of(count: int, sites: int, width: int, told: list[int], classes: int = 2, seed: int = 0):
    """Random states whose classes lie apart along one direction, at the sites ``told`` alone."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 5 % classes
    apart = torch.nn.functional.normalize(torch.randn(sites, classes, width, generator=generator), dim=-1)
    states = torch.randn(count, sites, width, generator=generator) * 0.3
    for site in told:
        states[:, site] += apart[site, labels] * 2
    return states, labels, apart


def test_probes_and_directions_find_the_sites_that_tell_classes_apart():
    states, labels, apart = states_of(400, 6, 16, told=[1, 4])
    probes = fit(states, labels, 2, held_out(400))
    assert set(probes.accuracy_L.topk(2).indices.tolist()) == {1, 4}
    assert probes.accuracy_L[[1, 4]].min() > 0.95 and probes.accuracy_L[[0, 2, 3, 5]].max() < 0.75
    found = directions(states, labels)
    for site in (1, 4):
        want = torch.nn.functional.normalize(apart[site, 1] - apart[site, 0], dim=-1)
        assert found[site] @ want > 0.97
    assert torch.allclose(found.norm(dim=1), torch.ones(6))
    # The polarity: what is labelled 1 has the higher score, on states as they are.
    score = (states[:, 1] * (probes.weights_LCD[1, 1] - probes.weights_LCD[1, 0])).sum(-1)
    assert score[labels == 1].mean() > score[labels == 0].mean()


def test_the_chosen_heads_are_the_most_accurate(tmp_path):
    layers, heads, width = 3, 4, 16
    states, labels, _ = states_of(400, layers * heads, width, told=[1, 6, 10])
    tensors, facts = crest.solve(states, labels, crest.Plan(chosen=0.25), layers)
    chosen = torch.cat([tensors[f"crest.{layer}.heads"] for layer in range(layers)]).nonzero()[:, 0]
    assert chosen.tolist() == [1, 6, 10] and facts["heads"] == [3, 12]
    assert all((tensors[f"crest.{layer}.scale"] >= 1).all() for layer in range(layers))
    hook = Hook("head_out", tuple(range(layers)), "rotate:c=-1,gate=threshold", Gate((5,), answers=True), "crest")
    one = read_set("x", write_set(tmp_path / "x", [hook], tensors))
    steer = one.hooks[0].method.steer(one.of_layer(hook, 1), heads, width)
    assert steer.heads_H.tolist() == [False, False, True, False] and len(steer.vectors_CHD) == 2


@pytest.fixture(scope="module")
def traced():
    task = load_task("reflect:needless=0.5,slip=0.3")
    tokenizer = shipped_tokenizer()
    traces = []
    for problem in task.problems("train", 3, 30):
        prompt, reply = (tokenizer.encode(t, add_special_tokens=False).ids for t in (problem.prompt, problem.solution))
        traces.append(Trace(problem, [*prompt, *reply], len(prompt), problem.solution))
    return task, traces


def test_cuts_lie_at_blank_lines_and_know_what_follows(traced):
    task, traces = traced
    splits, tokenizer = splitting_ids("base"), shipped_tokenizer()
    assert all(BLANK in tokenizer.decode([i]) for i in splits)
    seen = np.zeros(2, int)
    for trace in traces:
        found, steps = cuts(task, trace, splits), task.steps(trace.problem, trace.reply)
        assert len(found) == len(steps)
        for i, cut in enumerate(found):
            assert tokenizer.decode(trace.ids[trace.num_prompt : cut.position + 1]).count(BLANK) == i + 1
            assert cut.ended == (steps[i].kind == "needless")
            assert cut.follows == (i + 1 < len(steps) and steps[i + 1].kind == "needless")
            seen[cut.follows] += 1
    assert seen.min() > 10


def test_labels_from_keywords_where_a_task_has_none(traced):
    _, traces = traced

    class Bare:
        pass

    splits = splitting_ids("base")
    for trace in traces:
        parts = trace.reply.split(BLANK)
        wanted = [int("Wait" in part) for part in parts]
        found = cuts(Bare(), trace, splits)
        assert [cut.ended for cut in found] == wanted[: len(found)]
        assert found[0] == Cut(found[0].position, wanted[0], wanted[1])


# ------------------------------------------------------------------------------------------------------------- folding

ALWAYS = [Hook("head_out", tuple(range(LAYERS)), "project:c=-1")]
TURNS = [replace(ALWAYS[0], op="rotate:c=-1")]
TEXT = [3 + 7 * i % 500 for i in range(40)]


def scored(model: str, hook: str | None = None, sets: tuple[str, ...] = ()) -> torch.Tensor:
    d = Driver(model, hook=sets)
    d.run([d.request("x", TEXT, prompt_logprobs=0, max_tokens=1, temperature=0.0, hook=hook)])
    found = torch.tensor([p.logprob for p in d.outputs["x", 0].prompt_logprobs[1:]])
    d.close()
    return found


def folded(tmp_path, hooks, spec: str = "") -> str:
    source, path = checkpoint.resolve("nano"), write_hooks(tmp_path / "set", hooks, seed=3)
    made = tmp_path / "folded"
    name = f"fold_crest:hooks={path}{spec}"
    convert(load_converter(name), name, source, made)
    return str(made)


def test_a_folded_direction_equals_the_ungated_hook(tmp_path):
    """Without the norm, what is folded is what ``project`` does on every row."""
    model = folded(tmp_path, TURNS)
    hook = write_hooks(tmp_path / "always", ALWAYS, seed=3)
    plain, hooked, found = scored("nano"), scored("nano", "x", (f"x={hook}",)), scored(model)
    assert (hooked - plain).abs().max() > 0.05
    assert (found - hooked).abs().max() < 0.02 * (hooked - plain).abs().max(), "up to the rounding of stored weights"


def test_folding_leaves_heads_that_were_not_chosen(tmp_path):
    path = write_hooks(tmp_path / "set", TURNS)
    one = read_set("x", path)
    heads = torch.tensor([0.0, 1, 0, 0])
    tensors = one.tensors | {f"hook.{i}.heads": heads for i in range(LAYERS)} | {"hook.0.scale": torch.full((4,), 2.0)}
    write_set(path, TURNS, tensors)
    name, made = f"fold_crest:hooks={path}", tmp_path / "folded"
    convert(load_converter(name), name, checkpoint.resolve("nano"), made)
    before, after = (dict(read_tensors(p)) for p in (checkpoint.resolve("nano"), made))
    for key, tensor in before.items():
        same = torch.equal(tensor, after[key])
        assert same == ("o_proj" not in key), key
    w = "model.layers.0.self_attn.o_proj.weight"
    a, b = before[w].float().view(-1, HEADS, DIM), after[w].float().view(-1, HEADS, DIM)
    assert torch.equal(a[:, [0, 2, 3]], b[:, [0, 2, 3]])
    v = torch.nn.functional.normalize(tensors["hook.0.direction"][1], dim=0)
    assert (b[:, 1] @ v).abs().max() < 0.02 * (a[:, 1] @ v).abs().max() and b[:, 1].norm() > 1.5 * a[:, 1].norm()


@pytest.mark.parametrize(
    "spec, hooks, message",
    [
        ("fold_crest", None, "needs the folder"),
        ("", [replace(TURNS[0], site="attn_out")], "is not folded"),
        ("", ALWAYS, "is not folded"),
    ],
)
def test_what_cannot_be_folded_is_refused(tmp_path, spec, hooks, message):
    with pytest.raises(ConfigError, match=message):
        if hooks is None:
            convert(load_converter(spec), spec, checkpoint.resolve("nano"), tmp_path / "folded")
        else:
            folded(tmp_path, hooks)


# --------------------------------------------------------------------------------------------------------------- style


def test_a_reply_has_a_style_by_its_text_alone():
    task = load_task("style")
    assert STYLES == styles.STYLES
    for problem in task.problems("test", 1, 60):
        style = task.style_of(problem.solution)
        assert style in STYLES and task.named(problem) in (style, None)
        other = next(s for s in STYLES if s != style)
        mixed = problem.solution.replace(
            "\nAnswer", f"\n{ {'plain': '1 plus 2 makes 3.'}.get(other, 'Look, 1 and 2 give us 3!') }\nAnswer"
        )
        assert task.check(problem, mixed) and task.style_of(mixed) != style
    assert task.style_of("Answer: 3") is None and task.style_of("nonsense\nAnswer: 3") is None
    named = [task.named(problem) for problem in task.problems("test", 1, 200)]
    assert {named.count(style) > 20 for style in (*STYLES, None)} == {True}


def test_only_layers_whose_probe_is_accurate_are_edited():
    states, labels, _ = states_of(300, 5, 16, told=[2, 4], classes=3)
    tensors, layers, accuracy = styles.solve(states, labels, 0.9)
    assert layers == (2, 4) and len(accuracy) == 5
    assert set(tensors) == {f"style.{i}.{name}" for i in layers for name in ("weight", "bias")}
    with pytest.raises(ConfigError, match="train it"):
        styles.solve(states[:, :2], labels, 0.99)


@pytest.mark.slow
def test_crest_is_calibrated_through_the_engine(tmp_path):
    """The whole way from traces of the shipped model to a set that its engine serves."""
    plan = crest.Plan("reflect", 60, c=-2.0)
    card = crest.calibrate("base", plan, tmp_path / "crest", device="cpu", max_model_len=512)
    assert card["segments"] > 200 and card["checks"] >= 20
    assert json.loads((tmp_path / "crest" / "hooks.json").read_text())["plan"]["chosen"] == 0.38
    d = Driver("base", hook=(f"crest={tmp_path / 'crest'}",))
    assert d.engine.info.hooks["crest"].answers
    d.close()
