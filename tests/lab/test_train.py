"""Training end to end at a tiny size: learning, exact resume, export, evaluation, card, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvasir.errors import ConfigError
from kvasir_lab import export, train
from kvasir_lab.evaluation.evaluate import Score, evaluate, greedy
from kvasir_lab.model import Model, Shape, block_mask, compiled, document_mask, losses
from kvasir_lab.task import Documents
from kvasir_lab.training import loop
from kvasir_lab.training import state as lab_state
from kvasir_lab.training.data import Mixture, Rows, pack
from kvasir_lab.training.recipe import BASE, NANO, RECIPES, SMOKE, Curves, find
from kvasir_lab.training.trainer import Trainer, mean_loss

TINY = "chain:modulus=5,max_factor=2,min_steps=1,max_steps=1"
SHAPE = Shape(dim=32, layers=2, ffn=64, heads=2, kv_heads=1, head_dim=16, positions=128)
RECIPE = SMOKE.replace(
    name="tiny",
    shape=SHAPE,
    phases=(),
    own=None,
    curves=Curves(),
    rows=(Rows(4, 96, {TINY: 0.8, "chat": 0.2}), Rows(1, 128, {"schema": 1.0})),
    validate=(Rows(2, 96, {TINY: 1.0}),),
    evaluate=((TINY, 4),),
    steps=40,
    pool=10,
    reply_tokens=12,
)

PROSE = Rows(1, 128, {"story:form=prose,length=128": 1.0}, whole=True)

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(tokenizer, **changes):
    return Trainer(RECIPE.replace(**changes), tokenizer, "cpu", workers=0)


def go(t, out, **options):
    return loop.run(t, out, **{"minutes": None, "stop_after": None, "save_every": 1e9, **options})


def test_the_loss_goes_down(tokenizer, tmp_path):
    t = trainer(tokenizer, steps=60)
    assert go(t, tmp_path)
    chain = [row["chain loss"] for row in t.history]
    assert chain[-1] < 0.75 * np.log(2048) and t.history[-1]["train loss"] < 7.0 and chain[-1] < chain[0]
    assert t.done == 60 and t.tokens > 0


def test_resuming_gives_the_same_bits(tokenizer, tmp_path):
    whole = trainer(tokenizer)
    go(whole, tmp_path)
    first = trainer(tokenizer)
    assert not go(first, tmp_path, stop_after=1e-9)  # stops at its first look
    assert first.done == loop.LOOK
    second = trainer(tokenizer)
    second.restore(tmp_path)
    go(second, tmp_path)
    assert second.done == whole.done and second.tokens == whole.tokens
    for (name, a), b in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    without_time = [[{k: v for k, v in row.items() if k != "seconds"} for row in t.history] for t in (whole, second)]
    assert without_time[0] == without_time[1]


def test_worker_processes_change_nothing(tokenizer):
    mixture = Mixture(RECIPE.rows, tokenizer, 3, pool=10)
    streams = [mixture.stream(5, workers) for workers in (0, 2)]
    for _ in range(4):
        a, b = (next(s) for s in streams)
        for left, right in zip(a, b, strict=True):
            assert np.array_equal(left.ids, right.ids) and np.array_equal(left.trained, right.trained)
    for stream in streams:
        stream.close()
    again = next(mixture.stream(6, 0))
    assert not np.array_equal(again[0].ids, next(mixture.stream(5, 0))[0].ids)


@pytest.mark.parametrize(
    "broken", ["missing", "garbage", "cut", "no_state", "other_recipe", "other_shape", "lacks_a_tensor"]
)
def test_a_state_that_cannot_be_resumed_is_refused(tokenizer, tmp_path, broken):
    t = trainer(tokenizer, steps=1)
    go(t, tmp_path)
    t.save(tmp_path)
    file, run, tensors = tmp_path / lab_state.NAME, *lab_state.load_state(tmp_path, t.recipe)
    if broken == "missing":
        file.unlink()
    elif broken == "garbage":
        file.write_bytes(b"hello" * 100)
    elif broken == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif broken == "no_state":
        lab_state.save_state(tmp_path, {"step": 3}, tensors)
    elif broken == "other_recipe":
        t.recipe = t.recipe.replace(lr=1e-5)
    elif broken == "other_shape":
        lab_state.save_state(tmp_path, run, {**tensors, "model.model.norm.weight": torch.ones(3)})
    else:
        del tensors["model.model.norm.weight"]
        lab_state.save_state(tmp_path, run, tensors)
    with pytest.raises(ConfigError, match="state.safetensors"):
        t.restore(tmp_path)


def test_the_whole_command_writes_a_checkpoint_and_a_card(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny", RECIPE.replace(steps=20, validate=(*RECIPE.validate, PROSE)))
    out = tmp_path / "made"
    argv = ["--recipe", "tiny", "--out", str(out), "--device", "cpu", "--commit", "abc123"]
    train.main([*argv, "--stop-after", "0.000001s", "--steps", "40"])
    assert "stopped at step 20 of 40" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--resume"):
        train.main(argv)
    train.main([*argv, "--resume"])
    printed = capsys.readouterr().out
    assert "exact" in printed and "done" in printed
    assert sorted(f.name for f in out.iterdir()) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]
    record = json.loads((out / "training.json").read_text())
    assert record["steps"] == 40 and record["commit"] == "abc123" and len(record["scores"]) == 1
    card = (out / "README.md").read_text()
    assert all(
        part in card
        for part in ("abc123", "Wilson", TINY, "0.08M-parameter", "| story loss |", f"| {record['steps']} |")
    )


@pytest.mark.slow
def test_the_smoke_recipe_runs_from_the_command_line(tmp_path, capsys):
    train.main(["--recipe", "smoke", "--out", str(tmp_path), "--device", "cpu", "--workers", "2"])
    assert capsys.readouterr().out.count("exact") == len(SMOKE.evaluate)


def test_a_run_with_a_time_plans_its_steps(tokenizer, tmp_path):
    t = trainer(tokenizer, steps=10**9)
    assert go(t, tmp_path, minutes=1 / 60)
    assert loop.WARM < t.done < 10**6 and t.total == t.done
    assert t.history[-1]["lr"] < 0.2 * RECIPE.lr


def test_a_loss_that_is_no_number_stops_the_run(tokenizer, tmp_path):
    t = trainer(tokenizer)
    t.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match="loss is nan"):
        go(t, tmp_path)


def test_the_learning_rate_warms_up_and_falls(tokenizer):
    t = trainer(tokenizer, steps=1000, warmup=50)
    rates = [t.rate(s) for s in range(1000)]
    assert (
        rates[0] == pytest.approx(RECIPE.lr / 50)
        and max(rates) == pytest.approx(RECIPE.lr)
        and rates.index(max(rates)) in (49, 50)
    )
    assert rates[50:] == sorted(rates[50:], reverse=True) and rates[-1] == pytest.approx(
        RECIPE.lr * RECIPE.final, rel=0.05
    )


def noisy_model(seed=0, shape=SHAPE):
    model = Model(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.mul_(4).add_(torch.randn(p.shape, generator=generator) * (0.1 if p.ndim == 1 else 0.02))
    return model.eval()


def test_the_export_loads_in_transformers_with_equal_logits(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = noisy_model()
    export.export(model, tokenizer, tmp_path, torch.float32)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 2048, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, got = hf(ids).logits, model(ids)
    assert type(hf).__name__ == "Qwen3ForCausalLM" and wanted.std() > 0.1
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert hf.generation_config.eos_token_id == [2, 5] and hf.config.bos_token_id == 1


def test_the_export_is_read_back_and_bad_folders_are_refused(tokenizer, tmp_path):
    model = noisy_model()
    export.export(model, tokenizer, tmp_path)
    again = export.load(tmp_path)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16).float(), b)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, named in (
        ({"model_type": "llama"}, "llama"),
        ({"hidden_size": 64}, "weights"),
        ({"head_dim": None}, "head_dim"),
    ):
        altered = {k: v for k, v in {**config, **change}.items() if v is not None or k != "head_dim"}
        (tmp_path / "config.json").write_text(json.dumps(altered))
        with pytest.raises(ConfigError, match=named):
            export.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        export.load(tmp_path)
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        export.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "recipe,parameters,size", [(NANO, (2.4e6, 2.6e6), 6e6), (BASE, (16e6, 16.5e6), 33e6)], ids=["nano", "base"]
)
def test_the_recipes_have_the_promised_sizes(recipe, parameters, size, tokenizer, tmp_path):
    model = Model(recipe.shape)
    assert parameters[0] < model.num_parameters < parameters[1]
    export.export(model, tokenizer, tmp_path)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < size


def test_documents_in_a_row_do_not_see_each_other():
    model = noisy_model()
    ids = torch.randint(0, 2048, (1, 60), generator=torch.Generator().manual_seed(2))
    numbers = torch.tensor([[0] * 25 + [1] * 35], dtype=torch.int16)
    with torch.no_grad():
        packed = model(ids, document_mask(numbers))
        torch.testing.assert_close(packed[:, :25], model(ids[:, :25]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(packed[:, 25:], model(ids[:, 25:]), atol=1e-4, rtol=1e-4)  # RoPE is relative
        # Negative control: without the mask the documents see each other.
        assert not torch.allclose(model(ids)[:, 25:], packed[:, 25:], atol=1e-2)


def test_losses_match_torch_and_count_trained_targets_only():
    model = noisy_model()
    ids = torch.randint(0, 2048, (2, 40), generator=torch.Generator().manual_seed(3))
    trained = torch.zeros(2, 40, dtype=torch.bool)
    trained[:, 10:20] = True
    with torch.no_grad():
        got = losses(model, ids, None, trained)
        logits = model(ids)[:, 9:19].reshape(-1, 2048)
    wanted = torch.nn.functional.cross_entropy(logits, ids[:, 10:20].reshape(-1), reduction="sum")
    torch.testing.assert_close(got[0], wanted, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(got[1], logits.logsumexp(-1).square().sum(), atol=1e-2, rtol=1e-4)


def test_packing_keeps_documents_whole_and_masks_their_starts():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 30, 40)
    ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)]).astype(np.int32)
    packed = pack(Documents(ids, np.ones(len(ids), dtype=bool), np.concatenate([[0], np.cumsum(lengths)])), 30, 32)
    for value, n in enumerate(lengths, 1):
        rows, columns = np.nonzero(packed.ids == value)
        assert len(set(rows)) <= 1 and len(columns) == n
        assert len(set(packed.documents[rows, columns])) == 1
        assert not packed.trained[rows[0], columns[0]] and packed.trained[rows[1:], columns[1:]].all()
    assert not packed.trained[packed.documents < 0].any()
    assert packed.num_tokens == lengths.sum() and packed.num_trained == (lengths - 1).sum()


def test_packing_cuts_what_is_too_long_and_drops_what_finds_no_room():
    ids = np.arange(1, 101, dtype=np.int32)
    packed = pack(Documents(ids, np.ones(100, dtype=bool), np.array([0, 60, 90, 100])), 1, 32)
    assert packed.ids[0].tolist() == list(range(1, 33)) and packed.num_trained == 31


def test_the_mixture_keeps_its_shares(tokenizer):
    mixture = Mixture((Rows(64, 256, {"chain": 0.5, "schema": 0.5}),), tokenizer, 0, pool=50)
    batch = mixture.batch(0)[0]
    compute = tokenizer.token_to_id("Compute")
    chain_tokens = sum(
        (batch.documents[r] == d).sum()
        for r, row in enumerate(batch.ids)
        for d in set(batch.documents[r]) - {-1}
        if compute in row[batch.documents[r] == d]
    )
    assert 0.4 < chain_tokens / batch.num_tokens < 0.6 and batch.num_tokens > 0.9 * batch.ids.size


def test_greedy_with_a_cache_equals_greedy_without():
    model = noisy_model(1)
    prompts = [[1, 7, 9], [1, 40, 41, 42, 43, 44, 45], [1], [1, 300]]
    got = greedy(model, prompts, 12, [])
    for prompt, reply in zip(prompts, got, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert reply == ids[len(prompt) :]
    stop = got[1][3]
    assert greedy(model, prompts, 12, [stop])[1] == got[1][: got[1].index(stop)]
    with pytest.raises(ValueError, match="no room"):
        greedy(model, [[1] * 128], 4, [])


def test_evaluation_counts_what_the_checker_accepts(tokenizer, monkeypatch):
    from kvasir_lab.evaluation import evaluate as module
    from kvasir_lab.lookup import load_task

    problems = {
        tuple(tokenizer.encode(p.prompt, add_special_tokens=False).ids): p
        for p in load_task(TINY).problems("test", 0, 30)
    }

    def oracle(_, prompts, *args, **options):
        return [tokenizer.encode(problems[tuple(p)].solution, add_special_tokens=False).ids for p in prompts]

    monkeypatch.setattr(module, "greedy", oracle)
    assert evaluate(noisy_model(), tokenizer, TINY, 30).share == 1.0
    monkeypatch.setattr(module, "greedy", lambda m, prompts, *a, **k: oracle(m, prompts[1:] + prompts[:1]))
    assert evaluate(noisy_model(), tokenizer, TINY, 30).share < 0.6  # negative control: shuffled replies


def test_the_interval_is_wilsons():
    low, high = Score("t", "test", 95, 100).interval
    assert (low, high) == pytest.approx((0.8882, 0.9785), abs=1e-3)
    assert Score("t", "test", 0, 10).interval[0] == pytest.approx(0.0, abs=1e-9)
    assert Score("t", "test", 10, 10).interval[1] == pytest.approx(1.0)


def test_mean_loss_of_an_untrained_model_is_that_of_guessing(tokenizer):
    model = Model(SHAPE)
    loss, right = mean_loss(model, Mixture((Rows(9, 96, {TINY: 1.0}),), tokenizer, 0).batch(0)[0])
    assert loss == pytest.approx(np.log(2048), abs=0.1) and right < 0.2


@pytest.mark.parametrize("fused", [False, True])
def test_each_row_shape_compiles_one_layer_and_one_head(fused):
    """Each graph costs seconds on a GPU.

    So every layer must run the same graph, and new documents must not make a new one.
    """
    import torch._dynamo as dynamo

    dynamo.reset()
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph.forward

    compute = compiled(fused=fused, backend=backend)
    model = noisy_model(shape=replace(SHAPE, layers=3, positions=256))
    for seed in range(3):
        numbers = torch.from_numpy(np.sort(np.random.default_rng(seed).integers(0, 5, (2, 256)), 1).astype(np.int16))
        for rows in (2, 1):
            ids, trained = torch.full((rows, 256), seed), torch.ones(rows, 256, dtype=torch.bool)
            with torch.no_grad():
                got = losses(model, ids, numbers[:rows], trained, compute)
                torch.testing.assert_close(got, losses(model, ids, numbers[:rows], trained), atol=0.1, rtol=1e-4)
    assert count == 4


@pytest.mark.parametrize("length", [128, 384, 1024])
def test_the_fused_mask_visits_exactly_the_tiles_that_hold_something(length):
    numbers = torch.from_numpy(np.sort(np.random.default_rng(length).integers(-1, 6, (3, length)), 1).astype(np.int16))
    numbers = torch.cat([numbers, torch.zeros(1, length, dtype=torch.int16)])
    mask, dense, tiles = block_mask(numbers), document_mask(numbers), length // 128
    wanted = dense.view(4, 1, tiles, 128, tiles, 128).any(5).any(3)
    assert torch.equal(mask.to_dense().bool(), wanted)
    b, q, k = (torch.randint(0, n, (500,)) for n in (4, length, length))
    assert torch.equal(mask.mask_mod(b, 0, q, k), dense[b, 0, q, k])


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--recipe", "nanno"], "nano"),
        (["--recipe", "smoke", "--resume"], "nothing to resume"),
        (["--recipe", "smoke", "--tokenizer", "/nowhere"], "tokenizer.json"),
    ],
)
def test_bad_settings_are_refused_before_training(tmp_path, argv, said):
    with pytest.raises(ConfigError, match=said):
        train.main([*argv, "--out", str(tmp_path / "o"), "--device", "cpu"])


@pytest.mark.parametrize(
    "argv",
    [
        ["--minutes", "0"],
        ["--steps", "-1"],
        ["--minutes", "1", "--steps", "2"],
        ["--stop-after", "soon"],
        ["--stop-after", "-3m"],
        ["--minutes", "nan"],
    ],
)
def test_bad_arguments_are_refused(tmp_path, argv, capsys):
    with pytest.raises(SystemExit):
        train.main(["--out", str(tmp_path), *argv])
    assert "error" in capsys.readouterr().err


def test_durations():
    assert [train.duration(t) for t in ("90", "90s", "8m", "1.5h")] == [90, 90, 480, 5400]


def test_recipes_and_shapes_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="no recipe"):
        find("nano9")
    with pytest.raises(ConfigError, match="kv_heads"):
        Shape(heads=3, kv_heads=2)
    with pytest.raises(ConfigError, match="positions"):
        RECIPE.replace(rows=(Rows(1, 4096, {"chat": 1.0}),))
    with pytest.raises(ConfigError, match="positive"):
        Mixture((Rows(1, 64, {"chat": 0.0}),), None, 0)
