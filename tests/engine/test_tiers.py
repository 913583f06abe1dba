"""Pages that leave the device and come back change no bit: tokens and log-probabilities are those of an unlimited
cache, whatever holds the pages and whenever copies land. CPU exact mode.

Conversations take turns in a pool of half of their pages. Checksums are on: a page that comes back is compared with
the page that left, and invariants are checked after every step.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from kvasir.engine.pages.tiers import PageTiers
from kvasir.types import Variant
from kvasir_lab import export
from kvasir_lab.tokenizer import shipped_tokenizer
from tests import checkpoints
from tests.adapters import write_adapter
from tests.engine.driver import Driver, Output
from tests.engine.late_links import LateLink
from tests.lab.test_hybrid import lively
from tests.pairwise import label, pairwise, product

SESSIONS, TURNS, OUTPUT = 4, 3, 5
# Bytes of a tier that holds everything, and of one that holds some pages; pages of a pool that holds half of what is
# needed, by model.
ALL, FEW = 64 << 20, 1 << 17
SMALL = {"nano": 20, "window": 20, "hybrid": 8}  # with few states
FACTORS = {
    "tiers": ["host", "few", "disk", "few+disk", "host+disk"],
    "model": ["nano", "hybrid", "window"],
    "codec": ["plain", "int8", "int4"],
    "drafter": ["", "ngram:min_match=1"],
    "late": [False, True],  # links whose copies land when the test says so, out of order
    "preempt_every": [0, 5],
    "n": [1, 2],
    "temperature": [0.0, 1.0],
    "overlap": [False, True],
    "chunk": [24, 64],
    "adapter": [False, True],
}


class TieredDriver(Driver):
    """A driver of an engine with tiers. ``late``: a seed for links that land copies out of order; None: threads."""

    def __init__(self, model: str, late: int | None = None, **options) -> None:
        super().__init__(model, **options)
        self.links: list[LateLink] = []
        if late is not None:
            rng, tiers = random.Random(late), self.engine.tiers
            for link in (link for links in tiers.links for link in links):
                link.close()
            tiers.links = [(LateLink(rng), LateLink(rng)) for _ in tiers.tiers]
            self.links = [link for links in tiers.links for link in links]

    def step(self, preempt: bool = False) -> None:
        for link in self.links:
            link.tick()
        super().step(preempt)

    def assert_clean(self) -> None:
        tiers = self.engine.tiers
        while self.links and (tiers._queued or tiers._flying):
            tiers._launch_queued()
            for link in self.links:
                link.finish()
            tiers._land()
        super().assert_clean()


def tier_options(tiers: str, folder: Path) -> dict:
    found: dict = {}
    for name in tiers.split("+"):
        if name == "disk":
            found["kv_disk"] = f"{folder},bytes={ALL}"
        elif name:
            found["kv_host_bytes"] = FEW if name == "few" else ALL
    return found


def converse(driver: Driver, case: dict, turns=range(TURNS)) -> dict[tuple[str, int], Output]:
    """Turns of all sessions at once. They share a beginning, and the answers in a history are the test's own."""
    vocab = min(driver.engine.info.tokenizer_size, driver.engine.info.vocab_size) - 4
    first = min(300, vocab // 3)
    word = cache(lambda *place: first + random.Random(repr(place)).randrange(vocab - first))
    for turn in turns:
        asked = []
        for s in range(SESSIONS):
            ids = [word("shared", i) for i in range(40)] + [word(s, i) for i in range(24 + 20 * turn)]
            request = driver.request(
                f"s{s}t{turn}",
                ids,
                temperature=case["temperature"],
                seed=s,
                n=case["n"],
                max_tokens=OUTPUT,
                ignore_eos=True,
                logprobs=0,
            )
            if case["adapter"] and s % 2:
                request.variant = Variant("a", driver.engine.info.adapters["a"].key)
            asked.append(request)
        driver.run(asked, preempt_every=case["preempt_every"])
    return driver.outputs


def told(outputs: dict[tuple[str, int], Output]) -> dict:
    return {key: (out.tokens, [p.logprob for p in out.logprobs]) for key, out in outputs.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Models by name, and an adapter of nano."""
    root = tmp_path_factory.mktemp("tiers")
    export.export(lively(), shipped_tokenizer(), root / "hybrid")
    checkpoints.write(root / "window", "gemma3_text")
    write_adapter(root / "a", strength=0.5)
    return {"nano": "nano", "hybrid": str(root / "hybrid"), "window": str(root / "window"), "a": str(root / "a")}


def options_of(case: dict, folders: dict[str, str]) -> dict:
    found = dict(kv_codec=case["codec"], page_slots=8, max_num_seqs=4, max_model_len=112, state_interval=16)
    if case["model"] == "window":
        found |= {"skip_tokenizer_init": True}
    if case["adapter"]:
        found |= {"enable_lora": True, "lora_modules": (f"a={folders['a']}",)}
    return found


@pytest.fixture(scope="module")
def reference(folders):
    """Answers of an engine with room for everything to the conversations of a case."""
    found: dict = {}

    def get(case: dict) -> dict:
        key = tuple(case[name] for name in ("model", "codec", "temperature", "n", "adapter"))
        if key not in found:
            driver = Driver(folders[case["model"]], max_num_batched_tokens=256, **options_of(case, folders))
            found[key] = told(converse(driver, case | {"preempt_every": 0}))
            driver.close()
        return found[key]

    return get


def allowed(case: dict) -> bool:
    """Adapters are of nano."""
    return case["model"] == "nano" or not case["adapter"]


def run_case(case: dict, folders, reference, folder: Path) -> PageTiers:
    if not allowed(case):
        case = case | {"adapter": False}
    options = options_of(case, folders)
    driver = TieredDriver(
        folders[case["model"]],
        late=5 if case["late"] else None,
        drafter=case["drafter"],
        draft_control="fixed",
        overlap=case["overlap"],
        max_num_batched_tokens=case["chunk"],
        num_pages=SMALL[case["model"]],
        **options,
        **tier_options(case["tiers"], folder),
    )
    assert told(converse(driver, case)) == reference(case), "not one bit may differ"
    assert not driver.errors
    tiers = driver.engine.tiers
    assert not sum(counts.broken + counts.failed for counts in tiers._counts)
    driver.engine.close()
    return tiers


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=label)
def test_same_bits_as_an_unlimited_cache(case, folders, reference, tmp_path):
    tiers = run_case(case, folders, reference, tmp_path / "pages")
    assert sum(counts.written_bytes for counts in tiers._counts), "nothing left the device"
    assert "few" in case["tiers"] or sum(counts.hit_tokens for counts in tiers._counts), "nothing came back"


CORE = ("tiers", "model", "codec", "drafter", "late", "preempt_every", "n")


@pytest.mark.slow
@pytest.mark.parametrize("place, case", list(enumerate(product({name: FACTORS[name] for name in CORE}))), ids=str)
def test_same_bits_full_product(place, case, folders, reference, tmp_path):
    """All combinations of the factors that touch pages; the others take turns."""
    others = {name: values[place % len(values)] for name, values in FACTORS.items() if name not in CORE}
    run_case(case | others, folders, reference, tmp_path / "pages")


PLAIN = {name: values[0] for name, values in FACTORS.items()} | {"temperature": 1.0}


@pytest.mark.parametrize("model", ["nano", "hybrid", "window"])
def test_tiers_give_back_what_an_unlimited_cache_has(model, folders, reference, tmp_path):
    """Most of what an unlimited cache would have given comes from the tiers. Without them it is lost."""
    cached = {}
    for name, more in {"room": dict(num_pages=400), "none": {}, "host": dict(kv_host_bytes=ALL)}.items():
        case = PLAIN | {"model": model}
        options = {"num_pages": SMALL[model]} | more | options_of(case, folders)
        driver = Driver(folders[model], max_num_batched_tokens=64, **options)
        assert told(converse(driver, case)) == reference(case)
        cached[name] = sum(out.num_cached for out in driver.outputs.values())
        driver.close()
    assert cached["host"] >= 0.9 * cached["room"] > 1.1 * cached["none"]


# ------------------------------------------------------------------------------------------------- negative controls


def test_a_page_that_is_read_before_it_has_come_is_noticed(folders, reference, monkeypatch):
    """Futures are done at once, and the bytes never come: pages hold poison."""

    def early(self, job):
        future = LateLink.submit(self, job)
        future.set_result([[True] * len(call.args[2]) for call in job.__closure__[0].cell_contents])
        self.waiting.clear()
        return future

    driver = TieredDriver(
        "nano", 1, num_pages=SMALL["nano"], kv_host_bytes=ALL, check=False, **options_of(PLAIN, folders)
    )
    for _, up in driver.engine.tiers.links:
        monkeypatch.setattr(up, "submit", early.__get__(up))
    found = told(converse(driver, PLAIN))
    assert driver.engine.tiers._counts[0].hit_tokens and (found != reference(PLAIN) or driver.errors)


def test_a_page_whose_copy_was_torn_is_noticed(folders):
    """The checksum finds a copy that ran after its source was written over."""
    driver = TieredDriver("nano", 1, num_pages=SMALL["nano"], kv_host_bytes=ALL, **options_of(PLAIN, folders))
    host = driver.engine.tiers.tiers[0]
    write = host.write

    def torn(group, rows, moves):
        done = write(group, rows, moves)
        for move in moves:
            host.rows(group)[move.slot][-1] ^= 1
        return done

    host.write = torn
    with pytest.raises(AssertionError, match="came back changed"):
        converse(driver, PLAIN)
