"""A tape repeats what it recorded, on new inputs; decode steps from tapes give the tokens of eager ones."""

import gc

import pytest
import torch

from kvasir.engine.start import build
from kvasir.engine.ways import decode_tapes
from kvasir.engine.ways.tape import Arena, record
from tests.engine.driver import Driver


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def block(x, w, pool, at):
    """A tape of views, in-place calls, copies, several results, a call without an out form, and a result that nobody
    uses."""
    y = torch.mm(x, w).view(-1, 2, 8)
    left, right = y.unbind(1)
    pool.index_copy_(0, at, left)
    scale = torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=torch.float32).rsqrt_()
    best, _ = right.max(-1)
    z = (y * scale).flip(1).transpose(0, 1).reshape(-1, 8)
    z = torch.nn.functional.scaled_dot_product_attention(z[None], z[None], z[None])[0]
    torch.exp(z)
    return (
        torch.cat([torch.nn.functional.silu(z), pool.index_select(0, at).repeat(2, 1)], 1)
        .add_(best.repeat(2)[:, None])
        .double()
    )


@torch.inference_mode()
def test_a_tape_repeats_its_function_on_new_inputs():
    x, w, pool, at = torch.randn(3, 16), torch.randn(16, 16), torch.zeros(9, 8), torch.tensor([4, 1, 7])
    twin, arena = pool.clone(), Arena()
    tape = record(lambda: block(x, w, pool, at), arena)
    assert torch.equal(tape.result, block(x, w, twin, at))
    size = len(arena)
    for _ in range(4):
        x.normal_()
        at.copy_(torch.randperm(9)[:3])
        assert torch.equal(tape.replay(), block(x, w, twin, at))
        assert torch.equal(pool, twin)
    assert len(arena) == size, "a replay allocates nothing"


@torch.inference_mode()
def test_tapes_share_their_memory():
    arena, x = Arena(), torch.randn(4, 256)

    def chain():
        y = x
        for _ in range(20):
            y = torch.mul(y, 2)
        return y

    tapes = [record(chain, arena) for _ in range(3)]
    assert len(arena) <= 3 * x.numel() * 4, "a result's memory is used again once nothing names it"
    for tape in tapes:
        assert torch.equal(tape.replay(), chain())
        assert len(tape) == 20


@torch.inference_mode()
def test_what_a_later_call_still_reads_is_not_overwritten():
    x = torch.randn(4, 256)

    def skip():
        first = x * 2
        view = first[1:]
        del first
        y = x + 1
        for _ in range(3):
            y = y * 0.5
        return y[1:] + view

    tape = record(skip, Arena())
    x.normal_()
    gc.collect()
    assert torch.equal(tape.replay(), skip())


def run(lengths, monkeypatch, taped: bool, **options):
    monkeypatch.setattr(build, "why_not", lambda *args: "tapes are for where there are no native kernels")
    monkeypatch.setattr(decode_tapes, "MAX_ROWS", 32 if taped else 0)
    driver = Driver(batch_invariant=False, max_num_batched_tokens=64, max_num_seqs=32, **options)
    reqs = [
        driver.request(
            f"r{k}",
            [300 + (11 * i + 7 * k) % 1500 for i in range(n)],
            temperature=k % 2,
            max_tokens=40,
            seed=k,
            ignore_eos=True,
        )
        for k, n in enumerate(lengths)
    ]
    driver.run(reqs)
    used = len(driver.engine.runner.way(decode_tapes.DecodeTapes)._steps)
    tokens = {key: out.tokens for key, out in driver.outputs.items()}
    driver.close()
    return tokens, used


@pytest.mark.parametrize("lengths", [[20], [5, 33, 64], [7 * k + 3 for k in range(18)]])
def test_taped_decode_gives_the_tokens_of_eager_decode(lengths, monkeypatch):
    """Freed pages are full of NaN, and sequences of several lengths share a tape's padded pages and rows."""
    eager, none = run(lengths, monkeypatch, False, num_pages=120)
    taped, used = run(lengths, monkeypatch, True, num_pages=120)
    assert none == 0 and used > 0
    assert taped == eager


def test_rounding_wastes_a_quarter_at_most():
    for least in (1, 2):
        for count in range(1, 300):
            assert count <= decode_tapes._rounded(count, least) <= max(count + count // 4, -(-count // least) * least)
