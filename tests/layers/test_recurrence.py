"""KDA, Mamba-3 and M2RNN: short references written from the papers, scans beside recurrences, and steps over state
pages: cut anywhere, run again, with drafts. Planted mistakes must be seen. Parity is learnt on short texts.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kvasir.attention.backends.torch import TorchBackend
from kvasir.errors import ConfigError
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.kv.pool import KVPool
from kvasir.layers import recurrence
from kvasir.layers.mixers import kda, m2rnn, mamba3
from kvasir.layers.recurrent_spec import KDASpec, M2RNNSpec, Mamba3Spec
from kvasir.layers.spec import LOOK_AHEAD, NormSpec
from kvasir.layers.weights import Placement
from kvasir.types import CacheGroup, StepBatch
from kvasir_lab.studies.parity_study import MARK, STEPS, Learner

EXACT = Placement(torch.device("cpu"), torch.float32, exact=True)
NORM = NormSpec(1e-5)
SPECS = {
    "kda": (kda, KDASpec(3, 8, NORM)),
    "mamba3": (mamba3, Mamba3Spec(4, 6, 16, NORM, groups=2)),
    "mamba3 mimo": (mamba3, Mamba3Spec(4, 6, 12, NORM, rotated=1.0, rank=3, rate="softplus")),
    "m2rnn": (m2rnn, M2RNNSpec(6, 2, 10, 5, NORM)),
}
HIDDEN, TOKENS, PAGES = 20, 200, 10


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixer_of(name):
    """The mixer with random weights, and these by slot."""
    module, spec = SPECS[name]
    mixer, given = module.Mixer(spec, HIDDEN, EXACT), {}
    for seed, (slot, place) in enumerate(sorted(mixer.slots().items())):
        value = drawn(*place.target.shape, seed=seed) * (place.target.shape[-1] ** -0.5 if "weight" in slot else 0.5)
        if "norm" in slot.lower() or "factor" in slot:
            value = 1 + value
        if slot == "inner":
            value = torch.eye(spec.value_dim) + value
        place.target.copy_(value)
        given[slot.removesuffix(".weight")] = value
    return mixer, SimpleNamespace(**{slot.replace(".", "_"): value for slot, value in given.items()})


def forward(mixer, x, planes, table=(1, 2), start=0):
    none, whole = torch.zeros(0), functools.partial(torch.tensor, dtype=torch.int32, device=x.device)
    batch = StepBatch(none, none, whole([0, len(x)]), whole([start]), (whole([table]),), (), none, [start], [len(x)])
    return mixer.forward(x, None, SimpleNamespace(planes=planes, group=0), TorchBackend(), batch)


# ------------------------------------------------------------------------------------------------------- the references


def silu_conv(x, weight):
    padded = torch.cat((torch.zeros(weight.shape[-1] - 1, x.shape[1]), x))
    return F.silu(F.conv1d(padded.T[None], weight, groups=x.shape[1])[0].T)


def reference_kda(w, x, s):
    q, k, v = (
        silu_conv(x @ m.T, c).unflatten(-1, (3, 8)) for m, c in ((w.q, w.q_conv), (w.k, w.k_conv), (w.v, w.v_conv))
    )
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    steps = F.softplus(x @ w.f_a.T @ w.f_b.T + w.decay_bias).unflatten(-1, (3, 8))
    g = (-w.log_decay.exp().view(3, 1) * steps).exp()
    state, out, beta, eye = torch.zeros(3, 8, 8), [], (x @ w.b.T).sigmoid(), torch.eye(8)
    for t in range(len(x)):
        for h in range(3):
            forget = (eye - beta[t, h] * torch.outer(k[t, h], k[t, h])) @ torch.diag(g[t, h])
            state[h] = forget @ state[h] + beta[t, h] * torch.outer(k[t, h], v[t, h])
        out.append(torch.einsum("hdv,hd->hv", state, q[t]) * 8**-0.5)
    out = F.rms_norm(torch.stack(out), (8,), w.norm, 1e-5)
    return (out * (x @ w.g_a.T @ w.g_b.T).sigmoid().unflatten(-1, (3, 8))).flatten(1) @ w.o.T


def reference_mamba3(w, x, s):
    h, p, n, r, count = s.num_heads, s.dim, s.state_dim, s.rank, s.angles
    one = torch.ones(h, r, p)
    fx, fz, fo = (getattr(w, name, one) for name in ("x_factor", "z_factor", "out_factor"))
    state, angle, last_b, last_x, out = (
        torch.zeros(h, p, n),
        torch.zeros(h, count),
        torch.zeros(h, r, n),
        torch.zeros(h, p),
        [],
    )
    for row in x:
        dt, raw = F.softplus(w.dt @ row + w.step_bias), w.A @ row
        rate = F.softplus(raw) if s.rate == "softplus" else torch.where(raw >= 0, 1 + raw, 1 / (1 - raw))
        a, lam = (-rate.clamp(min=1e-4) * dt).exp(), (w.trap @ row).sigmoid()
        angle = (angle + torch.outer(dt, (w.angle @ row).tanh() * math.pi)) % (2 * math.pi)
        b, c = (rotated(F.rms_norm((m @ row).view(r, s.groups, n), (n,), norm, 1e-5).repeat_interleave(h // s.groups, 1)
                        .transpose(0, 1) + bias, angle, r == 1)
                for m, norm, bias in ((w.B, w.B_norm, w.B_bias), (w.C, w.C_norm, w.C_bias)))  # fmt: skip
        u, z = (w.x @ row).view(h, p), (w.z @ row).view(h, 1, p)
        state = a[:, None, None] * state + torch.einsum(
            "h,hrp,hrn->hpn", (1 - lam) * dt * a, last_x[:, None] * fx, last_b
        )
        state = state + torch.einsum("h,hrp,hrn->hpn", lam * dt, u[:, None] * fx, b)
        y = torch.einsum("hpn,hrn->hrp", state, c) + w.skip[:, None, None] * u[:, None] * fx
        out.append((y * F.silu(z * fz) * fo).sum(1).flatten())
        last_b, last_x = b, u
    return torch.stack(out) @ w.o.T


def rotated(v, angle, neighbours):
    v, half = v.clone(), v.shape[-1] // 2
    for i in range(angle.shape[-1]):
        a, b = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
        cos, sin = angle[:, None, i].cos(), angle[:, None, i].sin()
        v[..., a], v[..., b] = v[..., a] * cos - v[..., b] * sin, v[..., a] * sin + v[..., b] * cos
    return v


def reference_m2rnn(w, x, s):
    q, k, v = silu_conv(x @ torch.cat((w.q, w.k, w.v)).T, w.conv).split((20, 20, 30), -1)
    q, k = (z.view(-1, 2, 10).repeat_interleave(3, 1) for z in (q, k))
    f = (-w.log_decay.exp() * F.softplus(x @ w.f.T + w.forget_bias)).exp()
    state, out = torch.zeros(6, 10, 5), []
    for t in range(len(x)):
        vt = v[t].view(6, 5)
        new = torch.tanh(state @ w.inner + torch.einsum("hk,hv->hkv", k[t], vt))
        state = f[t][:, None, None] * state + (1 - f[t])[:, None, None] * new
        out.append((torch.einsum("hkv,hk->hv", state, q[t]) + w.skip[:, None] * vt).flatten())
    return F.rms_norm(torch.stack(out) * F.silu(x @ w.g.T), (30,), w.norm, 1e-5) @ w.o.T


REFERENCES = {
    "kda": reference_kda,
    "mamba3": reference_mamba3,
    "mamba3 mimo": reference_mamba3,
    "m2rnn": reference_m2rnn,
}


@pytest.mark.parametrize("name", SPECS)
def test_a_mixer_is_its_reference(name):
    """In exact mode, and with the scan."""
    mixer, weights = mixer_of(name)
    x, pages = drawn(70, HIDDEN, seed=99), Pages(name)
    want = REFERENCES[name](weights, x, SPECS[name][1])
    for mixer.exact in (True, False):
        torch.testing.assert_close(forward(mixer, x, pages.planes), want, atol=2e-5, rtol=1e-4)
    spec = SPECS[name][1]
    slots = mixer.slots().values()
    assert spec.matrices(HIDDEN) + spec.vectors(HIDDEN) == sum(slot.target.numel() for slot in slots)
    assert (spec.cache_row(), spec.attention(), spec.window, spec.pair_flops()) == (None, None, None, 0)
    with pytest.raises(ConfigError, match="cannot read another layer's"):
        SPECS[name][0].Mixer(spec, HIDDEN, EXACT, writes=False)


# ------------------------------------------------------------------------------------------- steps over pages of states


class Pages:
    """A poisoned pool of state pages, and one sequence whose rows are random."""

    def __init__(self, name, exact=True):
        spec = SPECS[name][1]
        group = CacheGroup("state", (0,), kind="state", states=(spec.state(),))
        self.pool = KVPool([group], PlainCodec(), [PAGES], 16, "cpu", torch.float32)
        self.pool.poison(0, list(range(PAGES)))
        self.planes, self.mixer = self.pool.layer(0).planes, mixer_of(name)[0]
        self.exact, self.table = exact, (1, 2)
        self.rows = drawn(TOKENS, self.planes["ahead"].shape[-1], seed=7)

    def launch(self, start, rows, table=None):
        """Run one step; nothing is committed."""
        return self.step(rows, [start], [len(rows)], [table or self.table])

    def step(self, rows, starts, lengths, tables):
        """Results of one step of several spans."""
        tables = [torch.tensor(tables, dtype=torch.int32)]
        batch = SimpleNamespace(starts=starts, lengths=lengths, span_lengths=None, tables=tables)
        self.mixer.exact = self.exact
        return self.mixer.run(rows, SimpleNamespace(planes=self.planes, group=0), batch)

    def run(self, lengths, start=0):
        out = []
        for length in lengths:
            out.append(self.launch(start, self.rows[start : start + length]))
            if length > LOOK_AHEAD:
                self.table = self.table[::-1]
            start += length
        return torch.cat(out)


@pytest.fixture(scope="module", params=SPECS)
def whole(request):
    """A rule's name, and the results of its rows in one span."""
    return request.param, Pages(request.param).run([TOKENS])


MIXED = [5, 1, 1, 40, 16, 1, 17, 3, 64, 1, 1, 16, 34]


@pytest.mark.parametrize(
    "lengths", [MIXED, *(pytest.param([n, TOKENS - n], marks=pytest.mark.slow) for n in (1, 17, 100))], ids=str
)
def test_cuts_change_no_bit(whole, lengths):
    """In exact mode; the scan is close."""
    name, want = whole
    assert torch.equal(Pages(name).run(lengths), want)
    torch.testing.assert_close(Pages(name, exact=False).run(lengths), want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_every_cut_changes_no_bit(whole):
    name, want = whole
    for first in range(1, TOKENS):
        assert torch.equal(Pages(name).run([first, TOKENS - first]), want), first


def drafted(pages, accepted, folded=0):
    """Steps of one token and seven drafts, ``accepted`` of which are right. Each runs twice, first with other rows.
    ``folded``: drafts that are folded without having been accepted."""
    start, out = 8, [pages.launch(0, pages.rows[:8])]
    while start + 8 <= TOKENS:
        draft = pages.rows[start : start + 8].clone()
        draft[1 + accepted :] = drawn(*draft[1 + accepted :].shape, seed=start)
        pages.launch(start, draft[:1])
        out.append(pages.launch(start, draft)[: 1 + accepted])
        start += 1 + accepted
        pages.planes["position"][pages.table[0]] -= folded
    return torch.cat(out)


@pytest.mark.parametrize("accepted", [pytest.param(0, marks=pytest.mark.slow), 2, 7])
def test_drafts_leave_no_trace(whole, accepted):
    name, want = whole
    got = drafted(Pages(name), accepted)
    assert torch.equal(got, want[: len(got)])


def test_a_snapshot_goes_on(whole):
    """A copy of a page, taken after a span whose rows are not folded yet, and a page that a long span left."""
    name, want = whole
    pages = Pages(name)
    pages.run([40, 3])
    for key in pages.planes:
        pages.planes[key][5] = pages.planes[key][pages.table[0]]
    pages.run([60], 43)
    assert torch.equal(pages.launch(43, pages.rows[43:90], (5, 6)), want[43:90])


def test_sequences_that_decode_together(whole):
    """Decodes and drafts of several sequences, some of them alike, in one run and in exact mode."""
    name, want = whole
    for exact in (True, False):
        pages = Pages(name, exact)
        begin, lengths = [40, 18, 60, 0, 41], [1, 1, 1, 1, 2]
        tables = [(1, 2), (3, 4), (5, 6), (7, 0), (8, 9)]
        for table, length in zip(tables, begin):
            if length:
                pages.launch(0, pages.rows[:length], table)
        tables = [(b, a) if length else (a, b) for (a, b), length in zip(tables, begin)]
        for step in range(3):
            starts = [start + step * length for start, length in zip(begin, lengths)]
            rows = torch.cat([pages.rows[s : s + n] for s, n in zip(starts, lengths)])
            got = pages.step(rows, starts, lengths, tables)
            expected = torch.cat([want[s : s + n] for s, n in zip(starts, lengths)])
            assert torch.equal(got, expected) if exact else torch.allclose(got, expected, atol=1e-4, rtol=1e-4)


def test_planted_mistakes_are_seen(whole, monkeypatch):
    name, want = whole
    pages = Pages(name)
    pages.run([40])
    for key in set(pages.planes) - set(recurrence.OWN):  # each part of the state matters
        clean = pages.planes[key][pages.table[0]].clone()
        pages.planes[key][pages.table[0]] = 0
        assert not torch.equal(pages.launch(40, pages.rows[40:60], (pages.table[0], 7)), want[40:60]), key
        pages.planes[key][pages.table[0]] = clean
    assert torch.equal(pages.launch(40, pages.rows[40:60], (pages.table[0], 7)), want[40:60])
    got = drafted(Pages(name), 1, folded=1)
    assert not torch.equal(got, want[: len(got)]), "a draft was folded that was not accepted"
    with pytest.raises(AssertionError, match="cannot reach"):
        pages.launch(90, pages.rows[90:91])


# ------------------------------------------------------------------------------------------------------------- learning


@pytest.fixture
def one_thread():
    """Run with one thread, as the study does: training may depend on the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["mamba3", "m2rnn"])
def test_parity_learnt_on_short_texts_holds_on_long_ones(name):
    """Trained on up to 64 tokens, right on 256."""
    learner = Learner(name)
    assert learner.learn(STEPS[name]) == 64
    with torch.no_grad():
        right = learner.right().mean()
        assert right > 0.99, right
        layer, bits = learner.layer, torch.randint(0, 2, (256,))
        one_by_one = layer.rule.run(layer.rows[F.pad(bits, (1, 0), value=MARK)], layer.start, 0, True)[0]
        signs = (one_by_one[1:].flatten(1) @ layer.out).squeeze(-1)
        assert ((signs < 0).long() == bits.cumsum(0) % 2).float().mean() > 0.98, "as a decode computes it"


@pytest.mark.parametrize("name", STEPS)
def test_every_layer_of_the_study_learns_something(name):
    """A few steps move every number that is learnt, and a bit changes no answer before it."""
    learner = Learner(name)
    before = [p.detach().clone() for p in learner.parameters]
    assert learner.learn(2) == 4
    assert all(not torch.equal(p, old) for p, old in zip(learner.parameters, before))
    bits = torch.randint(0, 2, (2, 9))
    other = bits.clone()
    other[:, 5] ^= 1
    with torch.no_grad():
        signs, changed = learner.signs(bits), learner.signs(other)
    torch.testing.assert_close(signs[:, :5], changed[:, :5])
    assert not torch.allclose(signs[:, 5:], changed[:, 5:]) and learner.right(2).shape == (256,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SPECS)
def test_a_gpu_computes_the_same(name):
    """Long spans, short ones and folded rows, with the scan and row by row."""
    spec = SPECS[name][1]
    group = CacheGroup("state", (0,), kind="state", states=(spec.state(),))
    mixer, _ = mixer_of(name)
    there = SPECS[name][0].Mixer(spec, HIDDEN, Placement(torch.device("cuda"), torch.float32))
    for slot, place in there.slots().items():
        place.target.copy_(mixer.slots()[slot].target)
    x, lengths = drawn(TOKENS, HIDDEN, seed=5), MIXED
    for exact in (True, False):
        mixer.exact = there.exact = exact
        found = []
        for layer, device in ((mixer, "cpu"), (there, "cuda")):
            pool = KVPool([group], PlainCodec(), [PAGES], 16, device, torch.float32)
            out, start, table = [], 0, (1, 2)
            for length in lengths:
                rows = x[start : start + length].to(device)
                out.append(forward(layer, rows, pool.layer(0).planes, table, start).cpu())
                table, start = table[::-1] if length > LOOK_AHEAD else table, start + length
            found.append(torch.cat(out))
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)
