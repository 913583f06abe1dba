"""Trained drafters draft as trained, change no token and drop their state in time. Bad folders are refused."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.config import EngineConfig
from kvasir.engine.drafts import drafting
from kvasir.engine.start.build import build
from kvasir.errors import ConfigError
from kvasir.models.checkpoint import resolve
from kvasir.speculation import heads
from kvasir.speculation.drafter import Ask
from kvasir.speculation.drafters.eagle import Config, EagleDrafter
from kvasir.speculation.head_kinds.eagle import Eagle, EagleShape
from kvasir.speculation.router import load_drafter
from kvasir.speculation.tree import products
from kvasir.types import Request, SamplingParams, Sequence
from kvasir_lab import export
from tests.pairwise import label, pairwise
from tests.speculation.trained import driver, plain, random_head, requests, tokens, trained

STEPS = {"medusa": 30, "eagle": 40, "ppd": 40}
FACTORS = {
    "drafter": ["medusa", "eagle", "eagle width=1,window=64,lanes=2", "eagle random", "ppd", "ppd rows=4,width=2"],
    "temperature": [0.0, 0.7, 1.0],
    "chunk": [6, 64],
    "cache": [True, False],
    "preempt_every": [0, 3],
    "pool": [256, 10],
    "n": [1, 2],
    "codec": ["plain", "int4_bdr"],
    "overlap": [True, False],
    "static": [True, False],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    found = {kind: trained(kind, root / kind, steps) for kind, steps in STEPS.items()}
    return found | {f"{kind} random": random_head(kind, root / f"{kind}-random") for kind in STEPS}


@pytest.fixture(scope="module")
def reference():
    found = {}

    def get(*key) -> dict:
        if key not in found:
            found[key] = plain(*key)
        return found[key]

    return get


def spec(name: str, folders) -> str:
    kind, _, rest = name.partition(" ")
    return f"{kind}:model={folders[name if rest == 'random' else kind]}" + (f",{rest}" if "=" in rest else "")


# Drafters of the pairs: each kind once, and EAGLE's with as many lanes as sequences wait for. `make test-all` has all.
ONCE = ["medusa", "eagle", "eagle width=1,window=64,lanes=2", "ppd"]


@pytest.mark.parametrize("case", list(pairwise(FACTORS | {"drafter": ONCE})), ids=label)
def test_same_tokens(case, folders, reference):
    check_same_tokens(case, folders, reference)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(pairwise(FACTORS)), ids=label)
def test_same_tokens_of_every_variant(case, folders, reference):
    check_same_tokens(case, folders, reference)


def check_same_tokens(case, folders, reference):
    d = driver(
        spec(case["drafter"], folders),
        max_num_batched_tokens=case["chunk"],
        num_pages=case["pool"],
        enable_prefix_caching=case["cache"],
        kv_codec=case["codec"],
        overlap=case["overlap"],
        static=case["static"],
    )
    d.run(requests(d, case["temperature"], case["n"]), preempt_every=case["preempt_every"])
    assert tokens(d) == reference(case["temperature"], case["n"], case["codec"]), case
    stats, drafter = d.engine.stats(), d.engine.proposals.drafting.drafter
    crowded = (
        case["drafter"].startswith("ppd") and case["chunk"] == 6
    )  # a step must be left over for prompt tokens before one for drafts
    assert stats.drafts or crowded
    assert stats.accepted_tokens > 5 or crowded or "random" in case["drafter"], "they know these texts by heart"
    if hasattr(drafter, "_lanes"):
        assert not drafter._lanes and not drafter._queue and len(drafter._free) == drafter.config.lanes, (
            "a sequence that ended holds its lane"
        )
    d.close()


@pytest.mark.parametrize("kind", STEPS)
def test_what_was_learnt_is_accepted_and_wrong_hidden_states_are_not(kind, folders, reference, monkeypatch):
    """A head saves forwards on texts that it knows by heart, when greedy. Fed the states of other rows it saves fewer,
    and no token changes."""

    def run() -> float:
        d = driver(spec(kind, folders), max_num_seqs=4)
        d.run(requests(d, 0.0))
        assert tokens(d) == reference(0.0, 1, "plain")
        stats = d.engine.stats()
        d.close()
        return stats.accepted_tokens / stats.drafts

    right = run()
    assert right > (0.6 if kind == "ppd" else 0.8), right
    real = drafting.Drafting.ingest

    def shuffled(self, span, hidden):
        real(self, span, None if hidden is None else torch.roll(hidden, 1, -1))

    monkeypatch.setattr(drafting.Drafting, "ingest", shuffled)
    heard = drafting.Drafting.observe

    def misheard(self, span, result, forced=False):
        if result.guesses is not None:
            result.guesses = [[(token ^ 1, chance) for token, chance in row] for row in result.guesses]
        heard(self, span, result, forced)

    monkeypatch.setattr(drafting.Drafting, "observe", misheard)
    committed = drafting.Drafting._committed
    monkeypatch.setattr(
        drafting.Drafting,
        "_committed",
        lambda self, *args: None if kind == "ppd" else torch.roll(committed(self, *args), 1, -1),
    )
    assert run() < 0.5 * right


def test_beside_other_drafters_each_gets_its_own_layers(folders, reference):
    """The router chooses by step and request, and heads follow every row whoever drafted."""
    d = driver(f"{spec('medusa', folders)}+ngram:min_match=1+{spec('eagle', folders)}", max_num_batched_tokens=32)
    router = d.engine.proposals.drafting.drafter
    assert router.hidden_layers == (1, 2, 3) and router._columns == {"medusa": [2], "eagle": [0, 1, 2]}
    for tag, drafter in (("r", None), ("e", "eagle"), ("m", "medusa")):
        d.run(requests(d, 0.0, tag=tag, drafter=drafter))
    found = tokens(d)
    assert all(found[tag + name[1:], b] == t for (name, b), t in reference(0.0, 1, "plain").items() for tag in "rem")
    by = d.engine.stats().drafted_by
    assert by["eagle"][1] > 10 and by["medusa"][1] > 10 and not router.drafters["eagle"]._lanes
    d.close()


def test_one_step_without_hidden_states_is_only_a_gap(folders, reference, monkeypatch):
    """A drafter works without rows it never saw: cached prefixes and pauses of the controller."""
    real, count = drafting.Drafting.ingest, 0

    def forgetful(self, span, result):
        nonlocal count
        count += 1
        if count % 2:
            real(self, span, result)

    monkeypatch.setattr(drafting.Drafting, "ingest", forgetful)
    for kind in STEPS:
        d = driver(spec(kind, folders), max_num_batched_tokens=16)
        d.run(requests(d, 0.7))
        assert tokens(d) == reference(0.7, 1, "plain") and d.engine.stats().drafts
        d.run(requests(d, 0.7, tag="again"))
        d.close()


def test_weights_swapped_under_way_change_drafts_and_no_token(folders, reference):
    d = driver(spec("eagle", folders))
    for request in requests(d, 0.0):
        d.submit(request)
    while d.engine.stats().drafts < 4:
        d.step()
    d.engine.proposals.drafting.drafter.load(load_file(folders["eagle random"] / heads.WEIGHTS), 1)
    d.run([])
    stats = d.engine.stats()
    assert (
        tokens(d) == reference(0.0, 1, "plain")
        and d.engine.proposals.drafting.drafter.version == 1
        and stats.accepted_tokens < 0.7 * stats.drafts
    )
    d.close()


def test_taped_drafts_are_right_as_often(folders):
    """Decode steps in normal mode on a CPU are tapes, and so is greedy drafting."""
    accepted = []
    for exact in (True, False):
        d = driver(spec("eagle", folders), batch_invariant=exact, max_num_seqs=1)
        for tag in "ab":
            d.run(requests(d, 0.0, tag=tag))
        assert tokens(d)
        accepted.append(d.engine.stats().accepted_tokens)
        assert any(shape.replay for shape in d.engine.proposals.drafting.drafter._shapes.values()) != exact
        d.close()
    assert abs(accepted[0] - accepted[1]) <= 5  # normal mode may break a tie otherwise


def test_under_control_drafting_rests_and_comes_back(folders, reference):
    d = driver(spec("eagle", folders), draft_control="goodput")
    for tag in "abc":
        d.run(requests(d, 0.0, tag=tag))
    found = tokens(d)
    assert {(f"a{name[1:]}", b): t for (name, b), t in reference(0.0, 1, "plain").items()}.items() <= found.items()
    d.close()


# ------------------------------------------------------------------------------------------------- drafting = training


DIM, VOCAB = 32, 50


class Fake:
    """A stand-in for a served model's embedding and output matrix."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, DIM, generator=generator)
        self.spec = SimpleNamespace(hidden_size=DIM, vocab_size=VOCAB, max_position=256, layers=[None] * 4)
        self.place = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
        self.norm = SimpleNamespace(weight=torch.ones(DIM))

    def embed(self, ids):
        return self.table[ids]

    def read_out(self, x):
        return x @ self.table.T


def sequence(ids: list[int]) -> Sequence:
    return Sequence(Request(id="r", prompt_ids=ids, params=SamplingParams(temperature=0.0), seed=0, max_tokens=99))


@pytest.fixture
def eagle(tmp_path):
    shape = EagleShape(DIM, (0, 1, 3), depth=4, heads=4, kv_heads=2, head_dim=8, ffn=24)
    head = Eagle(shape)
    head.begin_with(torch.ones(DIM), torch.zeros(1, DIM), torch.Generator().manual_seed(5))
    with torch.no_grad():
        for p in head.parameters():
            p.copy_((p * 2).bfloat16())  # larger, so that attention and positions matter; and as the file rounds it
    model = Fake()
    heads.write(
        head,
        tmp_path,
        {"hidden_size": DIM, "vocab_size": VOCAB, "num_layers": 4, "weights": heads.fingerprint(model.norm.weight)},
    )
    return head, model, tmp_path


@pytest.mark.parametrize("pieces", [[11], [1] * 11, [5, 6], [3, 0, 8]], ids=str)
@torch.no_grad()
def test_eagle_drafts_what_training_unrolls(eagle, pieces):
    """A chain has the tokens and estimates of the unrolled steps over the same text, however rows were handed over."""
    head, model, folder = eagle
    drafter = EagleDrafter(Config(model=str(folder), width=1, window=64))
    drafter.attach(model)
    ids = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(7)).tolist()
    features = torch.randn(11, 3, DIM, generator=torch.Generator().manual_seed(8))
    seq, at = sequence(ids), 0
    for size in pieces:
        if size:
            drafter.ingest(seq, features[at : at + size], at)
        at += size
    (tree,) = drafter.propose([Ask(seq, 4, 4)])
    assert len(tree) == 4 and tree.is_chain
    text = torch.tensor([*ids, *tree.tokens])
    embedded = torch.cat([model.embed(text[1:]), torch.zeros(1, DIM)])[None]
    padded = torch.cat([features, torch.zeros(len(text) - 11, 3, DIM)])[None]
    logits = [model.read_out(x[0, 10]) for x in head.unroll(padded, torch.zeros_like(embedded), embedded)]
    assert [int(row.argmax()) for row in logits] == tree.tokens
    for row, est, token in zip(logits, tree.est, tree.tokens):
        assert est == pytest.approx(float(row.softmax(-1)[token]), rel=1e-4)


def test_a_captured_draft_is_the_eager_one(eagle):
    """Static buffers with unused rows give the same trees at any temperature, and each shape is captured once."""
    _, model, folder = eagle
    captured = []

    def capture(work):
        captured.append(work)
        return work

    drafters = [EagleDrafter(Config(model=str(folder), width=2, window=128)) for _ in range(2)]
    for drafter, how in zip(drafters, (None, capture)):
        drafter.attach(model, how)
        drafter._host_noise = False
    seqs = [
        Sequence(
            Request(
                id=str(i),
                prompt_ids=[i] * (20 + 30 * i),
                params=SamplingParams(temperature=0.5 * i),
                seed=2**63 + i,
                max_tokens=9,
            )
        )
        for i in range(3)
    ]
    for drafter in drafters:
        for seq in seqs:
            drafter.ingest(
                seq,
                torch.randn(len(seq.tokens) - 1, 3, DIM, generator=torch.Generator().manual_seed(len(seq.tokens))),
                0,
            )
    for _ in range(4):
        for asked in (seqs, seqs[:1], seqs[1:]):
            eager, static = (drafter.propose([Ask(seq, 6, 3) for seq in asked]) for drafter in drafters)
            assert [t.tokens for t in eager] == [t.tokens for t in static] and all(len(t) == 6 for t in eager)
            for a, b in zip(eager, static):
                assert a.est == pytest.approx(b.est, rel=1e-4) and a.parents == b.parents
    assert len(captured) == 3


@pytest.mark.parametrize("width", [1, 3])
def test_captured_keys_of_committed_rows_are_the_eager_ones(eagle, width):
    """Rows of steps, padded and replayed, leave in every lane what eager ones do, and so the same drafts.

    Mutation: padding rows belong to the first lane."""
    _, model, folder = eagle
    drafters = [EagleDrafter(Config(model=str(folder), width=width, window=64, lanes=3)) for _ in range(2)]
    for drafter, how in zip(drafters, (None, lambda work: work)):
        drafter.attach(model, how)
    seqs, rng = [sequence([i + 1] * (5 + 30 * i)) for i in range(3)], random.Random(3)
    generator = torch.Generator().manual_seed(3)
    lengths = {seq: len(seq.tokens) - 1 for seq in seqs}
    for _ in range(12):
        for seq, length in lengths.items():
            features = torch.randn(length, 3, DIM, generator=generator)
            for drafter in drafters:
                drafter.ingest(seq, features, len(seq.tokens) - 1 - length)
        eager, static = (drafter.propose([Ask(seq, 6, 3) for seq in seqs]) for drafter in drafters)
        for a, b in zip(eager, static):
            assert a.tokens and a.tokens == b.tokens and a.parents == b.parents and a.depths == b.depths
            assert a.est == pytest.approx(b.est, rel=1e-4)
        lanes = [(drafters[0]._lanes[seq].index, drafters[1]._lanes[seq].index) for seq in seqs]
        for mine, other in lanes:
            assert torch.equal(drafters[0]._positions[mine], drafters[1]._positions[other])
            for name in ("_k", "_v", "_states"):
                a, b = (getattr(drafter, name)[at] for drafter, at in zip(drafters, (mine, other)))
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        for seq in seqs:
            lengths[seq] = rng.randint(1, 4)
            seq.tokens += [rng.randrange(50) for _ in range(lengths[seq])]
    assert any(shape.replay for key, shape in drafters[1]._shapes.items() if len(key) == 1), "no rows were replayed"


@torch.no_grad()
def test_a_tree_is_the_best_of_its_chains(eagle):
    """The estimate of a node is that of a chain over its own path: siblings do not see each other. The tree has the
    best nodes."""
    head, model, folder = eagle
    drafter = EagleDrafter(Config(model=str(folder), width=3, window=64))
    drafter.attach(model)
    ids = [3, 1, 4, 1, 5, 9]
    features = torch.randn(5, 3, DIM, generator=torch.Generator().manual_seed(9))
    seq = sequence(ids)
    drafter.ingest(seq, features, 0)
    (tree,) = drafter.propose([Ask(seq, 12, 3)])
    assert len(tree) == 12 and not tree.is_chain and max(tree.depths) == 2
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.insert(0, tree.tokens[at])
            at = tree.parents[at]
        text = torch.tensor([*ids, *path])
        embedded = torch.cat([model.embed(text[1:]), torch.zeros(1, DIM)])[None]
        padded = torch.cat([features, torch.zeros(len(text) - 5, 3, DIM)])[None]
        row = list(head.unroll(padded, torch.zeros_like(embedded), embedded))[len(path) - 1][0, 4]
        assert tree.est[node] == pytest.approx(float(model.read_out(row).softmax(-1)[path[-1]]), rel=1e-4)
    (small,) = drafter.propose([Ask(seq, 2, 1)])
    assert set(small.depths) == {0} and len(small) == 2


def test_lanes_hold_a_window_and_are_taken_over(eagle):
    """Rows beyond the window drop out, a branch takes over what its sibling saw before it, and a sequence without a
    free lane waits."""
    _, model, folder = eagle
    drafter = EagleDrafter(Config(model=str(folder), width=1, window=64, lanes=2))
    drafter.attach(model)
    first, features = sequence([1] * 201), torch.randn(200, 3, DIM)
    drafter.ingest(first, features[:150], 0)
    drafter.ingest(first, features[150:], 150)
    drafter._flush()
    assert sorted(drafter._positions[drafter._lanes[first].index].tolist()) == list(range(136, 200))
    branch = Sequence(first.request, 1)
    drafter.ingest(branch, features[140:141], 140)
    drafter._flush()
    assert sorted(p for p in drafter._positions[drafter._lanes[branch].index].tolist() if p >= 0) == list(
        range(136, 141)
    )
    other = sequence([2] * 9)
    drafter.ingest(other, features[:8], 0)
    assert not drafter.propose([Ask(other, 4, 4)])[0].tokens and drafter.propose([Ask(first, 4, 4)])[0].tokens
    drafter.close(branch)
    drafter.ingest(other, features[7:8], 7)
    assert drafter.propose([Ask(other, 4, 4)])[0].tokens
    for seq in (first, other):
        drafter.close(seq)
    assert len(drafter._free) == 2 and not drafter._queue


def test_products_come_best_first():
    est, ids = [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], [[1, 2, 3], [4, 5, 6]]
    tree = products(est, ids, 5, 2)
    best = sorted((a * (1.0 if b is None else b) for a in est[0] for b in [None, *est[1]]), reverse=True)[:5]
    joint = [tree.est[i] * (1.0 if tree.parents[i] < 0 else tree.est[tree.parents[i]]) for i in range(len(tree))]
    assert joint == pytest.approx(best)
    assert max(products(est, ids, 9, 1).depths) == 0


# ------------------------------------------------------------------------------------------------------------- refusals


def broken(folder, how):
    config = json.loads((folder / "config.json").read_text())
    if how == "vocabulary":
        config["target"]["vocab_size"] += 1
    elif how == "width":
        config["target"]["hidden_size"] = 64
    elif how == "format":
        del config["format"]
    elif how == "weights":
        tensors = load_file(folder / heads.WEIGHTS)
        save_file({name: tensor[:1].contiguous() for name, tensor in tensors.items()}, folder / heads.WEIGHTS)
    elif how == "cut":
        (folder / heads.WEIGHTS).write_bytes(b"no")
    (folder / "config.json").write_text("{" if how == "json" else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "how, words",
    [
        ("vocabulary", "vocab_size"),
        ("width", "hidden_size"),
        ("format", "no drafter"),
        ("weights", "broken"),
        ("cut", "broken"),
        ("json", "no drafter"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(how, words, tmp_path):
    folder = broken(random_head("medusa", tmp_path), how)
    with pytest.raises(ConfigError, match=words) as caught:
        driver(f"medusa:model={folder}")
    assert "kvasir train drafter medusa" in str(caught.value)


def test_the_wrong_kind_and_a_missing_folder_are_refused(tmp_path):
    folder = random_head("medusa", tmp_path)
    with pytest.raises(ConfigError, match="--drafter medusa:model="):
        driver(f"eagle:model={folder}")
    with pytest.raises(ConfigError, match="kvasir train drafter eagle"):
        driver(f"eagle:model={tmp_path / 'nowhere'}")
    with pytest.raises(ConfigError, match="window=3"):
        driver("eagle:window=3")
    with pytest.raises(ConfigError, match="kvasir train drafter"):
        driver("medusa")  # the shipped heads, if any, are for another model


def test_other_weights_of_the_same_shape_are_a_warning(tmp_path, caplog, monkeypatch):
    folder = random_head("medusa", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["target"]["weights"] = "0"
    (folder / "config.json").write_text(json.dumps(config))
    said = []
    monkeypatch.setattr(heads.log, "warning", lambda text, *args: said.append(text % args))
    driver(f"medusa:model={folder}").close()
    assert "drafts are worse" in said[0]


@pytest.mark.parametrize("kind", STEPS)
def test_shipped_heads_are_for_the_shipped_model(kind):
    folder = heads.shipped(kind)
    if folder is None:
        pytest.skip(f"the package holds no {kind}")
    _, facts = heads.read(kind, folder)
    model = export.load(resolve("base"))
    assert facts["weights"] == heads.fingerprint(model.model.norm.weight), (
        "trained for other weights: run tools/train_drafters.sh"
    )
    [weights] = folder.glob("model*")
    assert weights.stat().st_size < {"eagle": 2_600_000, "medusa": 1_300_000, "ppd": 10_000}[kind]


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_what_a_head_takes_is_known_before_the_pool_is_sized(kind, folders):
    d = driver(f"{kind}:model={folders[kind]}")
    drafter, model = d.engine.proposals.drafting.drafter, d.engine.runner.model
    held = (
        sum(p.nbytes for p in drafter._head.parameters())
        + drafter.state_bytes()
        + (drafter._head.turns.nbytes if kind == "eagle" else 0)
    )
    assert drafter.device_bytes(model) == held
    assert load_drafter(f"suffix+{kind}:model={folders[kind]}").device_bytes(model) == held
    d.close()


def test_the_pool_leaves_it_free(monkeypatch):
    monkeypatch.setattr("kvasir.engine.start.sizing.available_memory", lambda: 64 << 20)
    pages = []
    for beside in (0, 16 << 20):
        built = build(
            EngineConfig.of(model="nano", num_threads=1, max_model_len=1024, max_num_seqs=1024),
            lambda model, size=beside: size,
        )
        pages.append(built.plan.total_bytes)
    assert pages[0] > pages[1] and pages[0] - pages[1] == pytest.approx(8 << 20, rel=0.1)
