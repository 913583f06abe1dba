"""Request traces: both formats, arrivals, and prompts that share the prefixes that the recorded ones shared."""

import gzip
import json
import statistics

import pytest

from kvasir.bench import traces
from kvasir.bench.load import Load
from kvasir.bench.traces import BLOCK, Recorded, prompt_ids, read, scaled, schedule
from kvasir.errors import ConfigError

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:16:00.0000000,10,0\r\n"
)
MOONCAKE = [
    {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 4000, "input_length": 1024, "output_length": 6, "hash_ids": [0, 2]},
]
EVEN = [Recorded(i * 0.5, 10, 5) for i in range(1000)]


def mooncake(tmp_path):
    file = tmp_path / "t.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, MOONCAKE)).encode()))
    return read(file)


def test_azure(tmp_path):
    (tmp_path / "t.csv").write_text(AZURE, newline="")
    first, second = read(tmp_path / "t.csv")
    assert (first.at, first.prompt, first.output) == (0.0, 374, 44), (
        "by arrival; a request without an answer is left out"
    )
    assert second.at == pytest.approx(4.314579, abs=1e-6) and (second.prompt, second.output) == (396, 109)


def test_mooncake(tmp_path):
    assert mooncake(tmp_path) == [Recorded(0.0, 700, 5, (0, 1)), Recorded(3.0, 1024, 6, (0, 2))]


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,b\n1,2\n", "neither"),
        ("{1}", "neither"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,37", "neither"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    ],
)
def test_other_files(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read(tmp_path / "no.csv")
    whole = gzip.compress(AZURE.encode())
    for damaged in (whole[:-20], whole[:30] + bytes(8) + whole[38:]):
        (tmp_path / "t.csv.gz").write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot read the trace"):
            read(tmp_path / "t.csv.gz")


def test_prompts_share_the_recorded_prefix(tmp_path):
    one, other = (prompt_ids(r, i) for i, r in enumerate(mooncake(tmp_path)))
    assert (len(one), len(other)) == (700, 1024)
    assert one[:BLOCK] == other[:BLOCK] and one[BLOCK:] != other[BLOCK:700]
    low, high = traces.IDS
    assert all(low <= t < high for t in one) and one == prompt_ids(mooncake(tmp_path)[0], 7), (
        "the hash ids alone decide"
    )


def test_scaled_prompts_share_the_same_part(tmp_path):
    one, other = (prompt_ids(r, i, 0.125) for i, r in enumerate(scaled(mooncake(tmp_path), 0.125, None)))
    assert (len(one), len(other)) == (88, 128) and one[:64] == other[:64] and one[64] != other[64]


def test_prompts_without_hash_ids_share_nothing():
    one, other = (prompt_ids(Recorded(0.0, 300, 1), i) for i in (0, 1))
    assert len(one) == len(other) == 300 and one[:4] != other[:4]


def test_lengths():
    assert scaled([Recorded(0.0, 1000, 3)], 0.1, 50) == [Recorded(0.0, 50, 1)]
    assert scaled([Recorded(0.0, 1000, 3)], 1.0, None) == [Recorded(0.0, 1000, 3)]


def test_poisson_arrivals():
    due = schedule(EVEN, arrivals="poisson", rate=20.0, num_requests=1000, seconds=1.0)
    gaps = [b - a for a, b in zip(due, due[1:])]
    assert due[0] == 0.0 and len(due) == 1000 and statistics.mean(gaps) == pytest.approx(0.05, rel=0.15)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.2), "exponential: as wide as its mean"
    assert due == schedule(EVEN, arrivals="poisson", rate=20.0, num_requests=1000, seconds=1.0)


def test_a_window_has_enough_requests_and_is_long_enough():
    assert len(schedule(EVEN, arrivals="poisson", rate=10.0, num_requests=10, seconds=20.0)) == pytest.approx(
        200, rel=0.3
    )
    assert len(schedule(EVEN, arrivals="recorded", rate=None, num_requests=10, seconds=20.0)) == 41
    assert len(schedule(EVEN, arrivals="recorded", rate=None, num_requests=100, seconds=20.0)) == 100
    assert len(schedule(EVEN, arrivals="poisson", rate=10.0, num_requests=9999, seconds=1.0)) == 1000, (
        "no more than there are"
    )


def test_a_trace_that_runs_out_says_so(caplog):
    load = Load("even", "even.csv", rate=10.0, num_requests=10, seconds=20.0)
    assert len(load.calls(EVEN, 10.0)) < len(EVEN) and not caplog.records
    load.calls(EVEN[:50], 10.0)
    assert "all of its 50 requests make a window of" in caplog.text


@pytest.mark.parametrize("arrivals", ["poisson", "recorded"])
def test_a_window_is_no_shorter_than_asked(arrivals):
    """A window ends at its last arrival, the first one at which it is long enough and has enough requests."""
    due = schedule(EVEN, arrivals=arrivals, rate=10.0, num_requests=10, seconds=20.0)
    assert due[-2] < 20.0 <= due[-1]


def test_recorded_arrivals_keep_their_shape():
    trace = [Recorded(at, 1, 1) for at in (0.0, 1.0, 1.0, 10.0)]
    assert schedule(trace, arrivals="recorded", rate=None, num_requests=4, seconds=0) == [0.0, 1.0, 1.0, 10.0]
    assert schedule(trace, arrivals="recorded", rate=3.0, num_requests=4, seconds=0) == pytest.approx(
        [0.0, 0.1, 0.1, 1.0]
    )


def test_all_at_once():
    assert schedule(EVEN, arrivals="recorded", rate=float("inf"), num_requests=7, seconds=60.0) == [0.0] * 7


@pytest.mark.parametrize(
    "arrivals, rate, message", [("poisson", None, "need a rate"), ("bursty", 1.0, "neither poisson nor recorded")]
)
def test_bad_arrivals(arrivals, rate, message):
    with pytest.raises(ConfigError, match=message):
        schedule(EVEN, arrivals=arrivals, rate=rate, num_requests=1, seconds=0)
