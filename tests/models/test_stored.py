"""Views of stored tensors: fused, stacked, transposed and interleaved parts find their slots, and nothing is read twice
or never."""

import pytest
import torch
from safetensors.torch import save_file

from kvasir.layers.weights import Slot
from kvasir.models import fill, packed
from kvasir.models.fill import Filling, parts_of
from kvasir.models.loader import read_header
from kvasir.models.stored import View, rows_of, uneven, view_of

X, F, E = 5, 12, 7  # experts, width, model dim
GATE = [View("experts", (x, slice(None), slice(0, None, 2)), transposed=True) for x in range(X)]
UP = [View("experts", (x, slice(None), slice(1, None, 2)), transposed=True) for x in range(X)]
ROWS = {"q": 16, "k": 4, "v": 4}
SLOTS = {
    **{f"gate.{x}": (view, (F, E)) for x, view in enumerate(GATE)},
    **{f"up.{x}": (view, (F, E)) for x, view in enumerate(UP)},
    **{part: (rows_of("qkv", part, ROWS), (size, E)) for part, size in ROWS.items()},
    **{f"bias.{x}": (View("biases", (x, slice(1, None, 2))), (F,)) for x in range(X)},
    **{f"other.{x}": (View("biases", (x, slice(0, None, 2))), (F,)) for x in range(X)},
    "whole": (view_of("whole"), (3, 4)),
}


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {"experts": (X, E, 2 * F), "qkv": (24, E), "biases": (X, 2 * F), "whole": (3, 4)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def want(stored, view):
    part = stored[view.name][view.index]
    return part.mT if view.transposed else part


def fill_slots(file, device="cpu"):
    stored = {t.name: t for t in read_header(file)}
    slots = {name: Slot(torch.full(shape, torch.nan, device=device), 1.0) for name, (_, shape) in SLOTS.items()}
    placed = [
        (stored[view.name], slots[name].through(view.index, view.transposed)) for name, (view, _) in SLOTS.items()
    ]
    Filling(torch.device(device)).start(placed, []).wait()
    return {name: slot.target.cpu() for name, slot in slots.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("part_bytes", [1, 60, 700, 1 << 20])
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_part_finds_its_slot(is_packed, part_bytes, device, tmp_path, monkeypatch):
    """Whatever the parts in which a tensor is read: inside an expert, several experts at once, packed chunks."""
    monkeypatch.setattr(fill, "PART_BYTES", part_bytes)
    monkeypatch.setattr(packed, "CHUNK_BYTES", part_bytes)
    stored = tensors(torch.bfloat16)
    file = tmp_path / ("a.safetensors" + packed.SUFFIX * is_packed)
    packed.write(file, stored) if is_packed else save_file(stored, file)
    for name, target in fill_slots(file, device).items():
        assert torch.equal(target, want(stored, SLOTS[name][0]).float() + 1.0), name


def test_a_tensor_that_many_slots_read_is_read_once(tmp_path):
    save_file(tensors(torch.float32), tmp_path / "a.safetensors")
    for tensor in read_header(tmp_path / "a.safetensors"):
        slots = [
            Slot(torch.empty(shape)).through(view.index, view.transposed)
            for view, shape in SLOTS.values()
            if view.name == tensor.name
        ]
        assert sum(part.num_bytes for part in parts_of(tensor, *slots)) == tensor.num_bytes


@pytest.mark.parametrize("wrong", ["transposed", "exchanged"])
def test_a_wrong_view_gives_other_weights(wrong, tmp_path, monkeypatch):
    """Control: the comparison above sees experts read untransposed, and gate and up exchanged."""
    stored = tensors(torch.float32)
    stored["experts"] = stored["experts"][:, :, :14].contiguous()  # square, so that no shape gives it away
    save_file(stored, tmp_path / "a.safetensors")
    right = View("experts", (2, slice(None), slice(0, None, 2)), transposed=True)
    bad = View("experts", (2, slice(None), slice(wrong == "exchanged", None, 2)), transposed=wrong == "exchanged")
    header = next(t for t in read_header(tmp_path / "a.safetensors") if t.name == "experts")
    for view, equal in ((right, True), (bad, False)):
        slot = Slot(torch.empty(7, 7))
        Filling(torch.device("cpu")).start([(header, slot.through(view.index, view.transposed))], []).wait()
        assert torch.equal(slot.target, want(stored, right)) == equal


def picked(shape, *views):
    return tuple(view.picks(shape) for view in views)


def test_shapes_of_parts():
    assert View("a", (1,)).shape((3, 4, 6)) == (4, 6)
    assert View("a", (1, slice(None), slice(1, None, 2)), transposed=True).shape((3, 4, 6)) == (3, 4)
    assert View("a", (slice(2, 3),)).shape((3, 4)) == (1, 4) and View("a").shape(()) == ()
    for view, shape in (
        (View("a", (3,)), (3, 4)),
        (View("a", (slice(2, 5),)), (4, 4)),
        (View("a", (0, 0)), (3,)),
        (View("a", (), transposed=True), (3,)),
    ):
        assert view.shape(shape) is None


def test_elements_that_nobody_reads_are_found():
    every = [view for view, _ in SLOTS.values() if view.name == "experts"]
    assert uneven((X, E, 2 * F), picked((X, E, 2 * F), *every)) is None
    assert uneven((X, E, 2 * F), picked((X, E, 2 * F), *every[1:])) == ((0, 0, 0), False)
    assert uneven((X, E, 2 * F), picked((X, E, 2 * F), *every, every[-1])) == ((4, 0, 1), True)
    assert uneven((X + 1, E, 2 * F), picked((X + 1, E, 2 * F), *every)) == ((X, 0, 1), False)
    assert uneven((25, E), picked((25, E), *(rows_of("qkv", part, ROWS) for part in ROWS))) == ((24, 0), False)
    assert uneven((), picked((), View("a"))) is None and uneven((0, 3), picked((0, 3), View("a"))) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_check_agrees_with_counting_every_element(seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 6, 5)

    def cut(size):
        start, step = (int(torch.randint(0, n, (1,), generator=generator)) for n in (size, 3))
        return slice(start, None, step + 1)

    views = [View("a", (cut(4), cut(6), cut(5))) for _ in range(3)] + [View("a")] * (seed % 2)
    counts = torch.zeros(shape)
    for view in views:
        counts[view.index] += 1
    found = uneven(shape, picked(shape, *views))
    assert (found is None) == bool((counts == 1).all())
    if found is not None:
        assert counts[found[0]] != 1 and found[1] == bool(counts[found[0]])
