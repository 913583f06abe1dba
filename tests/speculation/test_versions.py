"""New weights are checked whole before a byte is written, and the version before comes back to the bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from kvasir.speculation.versions import Versions, overwrite


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), value), "b": torch.full((4,), value)}


BAD = {
    "a name is missing": lambda w: w.pop("b"),
    "a name is odd": lambda w: w.update(c=torch.zeros(1)),
    "a shape": lambda w: w.update(b=torch.zeros(5)),
    "not a number, in the last tensor": lambda w: w["b"].__setitem__(3, torch.nan),
    "infinite": lambda w: w["a"].__setitem__((2, 1), torch.inf),
    "integers": lambda w: w.update(b=torch.zeros(4, dtype=torch.int32)),
}


@pytest.mark.parametrize("fault", BAD)
def test_nothing_is_written_of_weights_that_do_not_fit(fault, tmp_path):
    live, new = weights(1.0), weights(2.0)
    BAD[fault](new)
    with pytest.raises(ValueError):
        overwrite(live, new)
    versions = Versions(live)
    save_file(new, tmp_path / "w")
    with pytest.raises(ValueError):
        versions.stage(tmp_path / "w", 1)
    assert all(torch.equal(live[name], tensor) for name, tensor in weights(1.0).items())
    assert versions.candidate is None and versions.serving == 0


def test_the_check_is_what_keeps_half_a_version_out(monkeypatch):
    """Control: without it, as ``load_state_dict`` does, what fits is copied before the rest fails."""
    monkeypatch.setattr("kvasir.speculation.versions.check", lambda own, found: None)
    live, new = weights(1.0), weights(2.0)
    new["b"] = torch.zeros(5)
    with pytest.raises(RuntimeError):
        overwrite(live, new)
    assert live["a"][0, 0] == 2.0 and live["b"][0] == 1.0, "half a swap"


def test_versions_are_served_in_place_and_taken_back(tmp_path):
    live = weights(1.0)
    places = {name: tensor.data_ptr() for name, tensor in live.items()}
    versions = Versions(live)
    for number in (1, 2):
        save_file({name: t.bfloat16() for name, t in weights(10.0 * number).items()}, tmp_path / "w")
        versions.stage(tmp_path / "w", number)
        assert versions.serving == number - 1 and live["a"][0, 0] in (1.0, 10.0), "staging serves nothing"
        for new in (True, False, True, True):
            versions.serve(new)
        assert all((t == 10.0 * number).all() for t in live.values())
        versions.accept()
    assert versions.accepted == versions.serving == 2 and versions.candidate is None
    save_file(weights(99.0), tmp_path / "w")
    versions.stage(tmp_path / "w", 3)
    versions.serve(True)
    versions.refuse()
    assert versions.serving == 2 and all((t == 20.0).all() for t in live.values())
    assert places == {name: tensor.data_ptr() for name, tensor in live.items()}


def test_a_file_cut_short_is_refused(tmp_path):
    save_file(weights(2.0), tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    versions = Versions(weights(1.0))
    for cut in (0, 5, len(data) // 2, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:cut])
        with pytest.raises(ValueError, match="cannot be read"):
            versions.stage(tmp_path / "cut", 1)
    with pytest.raises(ValueError, match="cannot be read"):
        versions.stage(tmp_path / "nothing", 1)
