"""Native steps over quantised caches, compared with the plain path: their difference is far below the codec's error."""

import pytest
import torch

from kvasir.kernels.native.library import native
from kvasir.models.native_decoder import why_not
from kvasir.types import Span
from tests import checkpoints
from tests.kv.test_codecs import codec_of
from tests.models.test_native_decoder import DENSE, NativePaged
from tests.models.test_parity import Paged

pytestmark = pytest.mark.skipif(native().library is None, reason=f"no native kernels: {native().reason}")
CODECS = ["fp8", "int8", "int4", "int4_bdr", "int4_bdr:order=4,rotate_v=true", "int4_bdr:signs=false"]


def apart(a, b) -> float:
    return float((torch.cat(a) - torch.cat(b)).square().mean().sqrt())


CASES = [("qwen3", codec) for codec in CODECS] + [
    (variant, "int4_bdr:rotate_v=true") for variant in DENSE if variant != "qwen3"
]


@pytest.mark.parametrize("variant, codec", CASES)
def test_every_family_and_codec(variant, codec, tmp_path):
    """Chunks of several lengths at once, with new pages full of NaN. A code may differ where a last bit falls on a
    border."""
    folder = checkpoints.write(tmp_path / variant, variant, head_dim=16)
    mine, plain = NativePaged(folder, codec=codec_of(codec)), Paged(folder, codec=codec_of(codec))
    got, want, exact = mine.run(lambda i: 3 + 5 * i), plain.run(lambda i: 50), Paged(folder).run(lambda i: 50)
    assert apart(got, want) < 0.15 * apart(want, exact)
    differ = total = 0
    for a, b in zip(mine.caches, plain.caches):
        for name in ("k", "v"):
            x, y = (cache.planes[name].view(torch.uint8) for cache in (a, b))
            differ, total = differ + int((x != y).sum()), total + x.numel()
    assert differ < 2e-3 * total, (differ, total)


@pytest.mark.parametrize("codec", ["int8", "int4_bdr:rotate_v=true"])
def test_steps_of_both_kinds_may_follow_each_other(codec, tmp_path):
    """A draft tree of one kind over pages of the other."""
    folder = checkpoints.write(tmp_path / "gemma", "gemma3_text_caps", head_dim=16)
    found = []
    for first, second in ((NativePaged, Paged), (Paged, NativePaged), (Paged, Paged)):
        paged = NativePaged(folder, codec=codec_of(codec))
        a, b, _ = paged.seqs
        parts = [
            *first.step(paged, [Span(a, 0, 20), Span(b, 0, 2)]),
            *second.step(paged, [Span(a, 20, 6, parents=[-1, 0, 0, 1, 1, 2])]),
        ]
        found.append([part.clone() for part in parts])
    exact = Paged(folder)
    exact = [
        *exact.step([Span(exact.seqs[0], 0, 20), Span(exact.seqs[1], 0, 2)]),
        *exact.step([Span(exact.seqs[0], 20, 6, parents=[-1, 0, 0, 1, 1, 2])]),
    ]
    assert max(apart(found[0], found[2]), apart(found[1], found[2])) < 0.15 * apart(found[2], exact)


def test_a_layout_without_a_kernel_is_left_to_the_plain_path(tmp_path):
    paged = Paged(checkpoints.write(tmp_path / "a", "qwen3", head_dim=32), codec=codec_of("nvfp4"))
    assert "nvfp4" in why_not(paged.model, paged.caches, paged.backend)
