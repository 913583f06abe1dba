"""Each task against an independent solution: plain arithmetic, search, breadth-first search, and statistics."""

from __future__ import annotations

import collections
import itertools
import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from kvasir_lab.lookup import load_task
from kvasir_lab.tokenizer import shipped_tokenizer


def asked(problem) -> str:
    return problem.messages[-1]["content"]


# ------------------------------------------------------------------------------------------------------------- long_add


def test_long_sums_are_right_and_so_is_every_column():
    for problem in load_task("long_add:max_terms=4").problems("test", 0, 60):
        terms = [int(t) for t in re.findall(r"\d+", asked(problem))]
        assert int(problem.answer) == sum(terms) and problem.difficulty == max(len(str(t)) for t in terms)
        carry = 0
        *lines, _ = problem.solution.split("\n")
        assert len(lines) == problem.difficulty
        for d, line in enumerate(lines):
            left, right = line.split("=")
            digits = [carry, *(t // 10**d % 10 for t in terms)]
            assert left == "+".join(map(str, digits)) and int(right) == sum(digits)
            carry = int(right) // 10


# ------------------------------------------------------------------------------------------------------------ countdown


def reachable(numbers: list[Fraction]) -> set[Fraction]:
    out = set(numbers)
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b, rest = numbers[i], numbers[j], [n for k, n in enumerate(numbers) if k not in (i, j)]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            out |= reachable([*rest, value])
    return out


def test_every_countdown_can_be_solved_by_brute_force():
    for problem in load_task("countdown").problems("test", 0, 25):
        target, *numbers = map(int, re.findall(r"\d+", asked(problem)))
        assert len(numbers) == problem.difficulty and target not in numbers and 1 <= target <= 99
        assert Fraction(target) in reachable([Fraction(n) for n in numbers])


def test_countdown_takes_any_right_way_and_no_wrong_one():
    task = load_task("countdown")
    problem = task.problems("test", 0, 1)[0]
    game = type(problem)(({"role": "user", "content": "Make 22 from 7, 4, 3, 9."},), "", "")
    for right in (
        "7*4=28\n9-3=6\n28-6=22\nAnswer: 22",
        "Answer: 7*4-(9-3)",
        "Answer: 4*7-9+3",
        "4*7=28\n28-9=19\n19+3=22\nAnswer: 22",
    ):
        assert task.check(game, right), right
    for wrong in (
        "7*4=28\n28-6=22\nAnswer: 22",
        "7*4=27\nAnswer: 22",
        "7*4=28\n9-3=6\n28-6=22\nAnswer: 21",
        "Answer: 22",
        "Answer: 11+11",
        "Answer: 7*4-6",
        "Answer: 7*4-(9-3)+0",
        "Answer: 7*4-(9-3)-(7-7)",
        "Answer: --22",
        "7*4=28\n28-9=19\n19+3=22",
        "9-9=0\n7*3=21\nAnswer: 22",
        "7/0=22\nAnswer: 22",
        "3-7=4\nAnswer: 22",
        "Answer: __import__('os')",
        "Answer: 7*4-(9-3) # yes\nAnswer: 22",
        "Answer: 22.0",
        "Answer: 7*True",
    ):
        assert not task.check(game, wrong), wrong


def test_the_same_numbers_in_another_order_stay_in_one_split():
    task = load_task("countdown:max_number=6,max_numbers=3")

    def games(split):
        return {
            tuple(sorted(map(int, re.findall(r"\d+", asked(p).split("from")[1])))) + (re.findall(r"\d+", asked(p))[0],)
            for p in task.problems(split, 0, 150)
        }

    assert not games("train") & games("test")


# ----------------------------------------------------------------------------------------------------------------- path


def shortest(question: str, *, both: bool) -> list[list[str]]:
    """Every shortest way, by growing all ways one road at a time."""
    roads = [road.split(" ") for road in question.removeprefix("Roads: ").split(".")[0].split(", ")]
    roads += [road[::-1] for road in roads] if both else []
    start, goal = re.search(r"from (\w+) to (\w+)", question).groups()
    ways = [[start]]
    while not any(way[-1] == goal for way in ways):
        ways = [[*way, b] for way in ways for a, b in roads if a == way[-1] and b not in way]
        assert ways
    return [way for way in ways if way[-1] == goal]


@pytest.mark.parametrize(
    "spec",
    ["path", "path:extra=8", "path:form=star", "path:form=star,arms=7,max_depth=3", "path:min_depth=5,max_depth=5"],
)
def test_the_way_is_the_only_shortest_one(spec):
    task = load_task(spec)
    depths = collections.Counter()
    for problem in task.problems("test", 0, 80):
        ways = shortest(asked(problem), both="star" not in spec)
        assert [" ".join(way) for way in ways] == [problem.answer] and len(ways[0]) - 1 == problem.difficulty
        depths[problem.difficulty] += 1
        roads = asked(problem).split(".")[0].removeprefix("Roads: ").split(", ")
        assert len({frozenset(road.split(" ")) for road in roads}) == len(roads)
    assert set(depths) == set(range(task.config.min_depth, task.config.max_depth + 1)), "all lengths are asked"
    assert min(depths.values()) > 80 / len(depths) / 3


def test_a_star_has_arms_of_equal_length_and_is_solved_from_the_leaf():
    for problem in load_task("path:form=star,arms=4").problems("test", 1, 20):
        roads = [road.split(" ") for road in asked(problem).split(".")[0].removeprefix("Roads: ").split(", ")]
        centre = problem.answer[0]
        assert sum(a == centre for a, _ in roads) == 4 and len(roads) == 4 * problem.difficulty
        back = problem.solution.split("\n")[0].removeprefix("Back: ").split(" ")
        assert back[::-1] == problem.answer.split(" ")


# ---------------------------------------------------------------------------------------------------------------- facts


@pytest.mark.parametrize("spec", ["facts:think=yes", "facts:think=no,max_hops=6", "facts:min_facts=50,max_facts=100"])
def test_facts_are_followed_through_the_store(spec):
    task = load_task(spec)
    for problem in task.problems("test", 0, 50):
        store, question = asked(problem).removeprefix("Facts: ").split(". Who is ")
        facts = dict(fact.split(" is ") for fact in store.split("; "))
        assert len(facts) == len(store.split("; ")), "no two facts about one thing"
        assert task.config.min_facts <= len(facts) <= task.config.max_facts
        *links, person = question.split("?")[0].split(" of ")
        trail = []
        for link in reversed(links):
            who = f"{link.removeprefix('the ')} of {person}"
            person = facts[who]
            trail.append(f"{who} is {person}")
        assert person == problem.answer and len(links) == problem.difficulty
        think = not question.endswith("Answer at once.")
        assert problem.solution == "\n".join([*(trail if think else []), f"Answer: {person}"])
        assert think or task.config.think != "yes"


# --------------------------------------------------------------------------------------------------------------- needle


@pytest.mark.parametrize("filler", ["prose", "pairs"])
@pytest.mark.parametrize("length, depth", [(300, 0.0), (600, 0.5), (2000, 1.0), (4096, 0.25)])
def test_the_needle_lies_as_deep_and_the_text_is_as_long_as_asked(filler, length, depth):
    tokenizer = shipped_tokenizer()
    for problem in load_task(f"needle:min_length={length},length={length},depth={depth},filler={filler}").problems(
        "test", 0, 3
    ):
        size = len(tokenizer.encode(problem.prompt, add_special_tokens=False).ids)
        assert length - 30 < size <= length == problem.difficulty
        body = asked(problem)
        secret = (
            body.rsplit("\n", 1)[1].removeprefix("Tell the secret number of ").removeprefix("Tell key ").rstrip(".")
        )
        needle = (
            f"secret number of {secret} is {problem.answer}."
            if filler == "prose"
            else f"Key {secret} is {problem.answer}."
        )
        assert (
            body.count(needle) == 1 and body.count(f"of {secret} is" if filler == "prose" else f"Key {secret} is") == 1
        )
        at = body.index(needle) / len(body)
        assert abs(at - depth) < 60 / length + 0.07, (at, depth)


def test_several_secrets_are_asked_for_and_all_differ():
    seen = set()
    for problem in load_task("needle:asks=4,keys=8,min_length=400,length=400").problems("test", 0, 30):
        secrets = dict(re.findall(r"secret number of (\w+) is (\d{5})\.", asked(problem)))
        names = asked(problem).rsplit(" of ", 1)[1].rstrip(".").split(", ")
        assert len(secrets) == 8 == len(set(secrets.values()))
        assert problem.answer == ", ".join(secrets[name] for name in names)
        seen.add(len(names))
    assert seen == {1, 2, 3, 4}


# ---------------------------------------------------------------------------------------------------------------- state


def test_swaps_are_followed_and_written_as_often_as_asked():
    for problem in load_task("state").problems("test", 0, 80):
        row, swaps, often = re.fullmatch(
            r"Row ([A-Z ]+)\. Swap ([\d, ]+)\. Write the row after every (\d) swaps\.", asked(problem)
        ).groups()
        state, lines = row.split(" "), []
        pairs = [tuple(int(n) - 1 for n in pair.split(" ")) for pair in swaps.split(", ")]
        for k, (a, b) in enumerate(pairs, 1):
            assert a != b
            state[a], state[b] = state[b], state[a]
            if k % int(often) == 0 and k < len(pairs):
                lines.append(" ".join(state))
        assert (
            problem.solution == "\n".join([*lines, "Answer: " + " ".join(state)]) and len(pairs) == problem.difficulty
        )


def test_parity_is_counted():
    for problem in load_task("state:kind=parity").problems("test", 0, 60):
        bits = [int(b) for b in asked(problem).split(".")[0].split(" ")[1:]]
        often = int(re.search(r"every (\d+)", asked(problem)).group(1))
        lines = [("even", "odd")[sum(bits[:k]) % 2] for k in range(often, len(bits), often)]
        assert problem.solution == "\n".join([*lines, "Answer: " + ("even", "odd")[sum(bits) % 2]])


# -------------------------------------------------------------------------------------------------------------- reflect


def test_every_step_of_a_reflection_has_its_true_label():
    task = load_task("reflect:slip=0.4,needless=0.4")
    kinds = collections.Counter()
    for problem in task.problems("test", 0, 80):
        before = None  # the last step's left side, and whether it is right
        linear = 0
        for step in task.steps(problem, problem.solution):
            left, result = step.text.removeprefix("Wait, ").split("=")
            truth = eval(left) % 97 == int(result)  # noqa: S307
            assert step.right == truth
            if step.text.startswith("Wait, "):
                assert left == before[0] and truth and step.kind == ("needless" if before[1] else "useful")
            else:
                assert step.kind == "linear"
                linear += 1
            kinds[step.kind, step.right] += 1
            before = (left, truth)
        assert linear == problem.difficulty
    assert min(kinds.values()) > 50 and set(kinds) == {
        ("linear", True),
        ("linear", False),
        ("useful", True),
        ("needless", True),
    }
    assert kinds["linear", False] == kinds["useful", True]


def test_reflections_slip_and_recheck_at_the_dialled_rates():
    """The rates over 3,000 training traces lie within four standard errors."""
    task = load_task("reflect:min_steps=8,max_steps=8,slip=0.2,repair=0.8,needless=0.1")
    tokenizer = shipped_tokenizer()
    made = task.documents(tokenizer, np.random.default_rng(0), 3000)
    texts = tokenizer.decode_batch(
        [made.ids[a:b].tolist() for a, b in zip(made.bounds, made.bounds[1:], strict=False)], skip_special_tokens=False
    )
    kinds, wrong, linear = collections.Counter(), 0, 0
    for text in texts:
        steps = task.steps(None, text.split("assistant\n")[1].removesuffix("<|im_end|>"))
        kinds.update(step.kind for step in steps)
        linear += sum(step.kind == "linear" for step in steps)
        wrong += any(
            not step.right and (i + 1 == len(steps) or steps[i + 1].kind != "useful") for i, step in enumerate(steps)
        )
    assert linear == 3000 * 8

    def near(seen: float, rate: float, trials: int) -> bool:
        return abs(seen - rate) < 4 * math.sqrt(rate * (1 - rate) / trials)

    left = 1 - (1 - 0.2 * 0.2) ** 8  # traces that keep a slip
    assert near(wrong / 3000, left, 3000)
    assert near(kinds["useful"] / linear, 0.16 * (1 - left / 8), linear)
    assert near(kinds["needless"] / linear, 0.1 * (1 - 0.16) * (1 - left / 8), linear)


def test_labels_of_a_models_own_reply():
    task = load_task("reflect")
    problem = task.problems("test", 0, 1)[0]
    steps = task.steps(
        problem, "1+1=2\n\nWait, 1+1=2\n\n2*3=7\n\nWait, 2*3=7\n\nWait, 2*3=6\n\nhm\n\nWait\n\nAnswer: 6"
    )
    assert [(s.kind, s.right) for s in steps] == [
        ("linear", True),
        ("needless", True),
        ("linear", False),
        ("useful", False),
        ("useful", True),
        ("linear", False),
        ("useful", False),
    ]
    assert task.steps(problem, "") == [type(steps[0])("", "linear", False)]


# ------------------------------------------------------------------------------------------------------------- template


@pytest.mark.parametrize("choices", [3, 16])
def test_the_entropy_in_closed_form_is_the_empirical_one(choices):
    """Compare the closed form with the mean surprisal of 6,000 sentences.

    Also compare it with a count of all sentences.
    """
    task = load_task(f"template:choices={choices}")
    bits = [task.surprisal(s) for p in task.problems("longer", 0, 700) for s in p.solution.split("\n")]
    assert None not in bits and len(bits) > 5000
    assert abs(np.mean(bits) - task.entropy()) < 4 * np.std(bits) / math.sqrt(len(bits))


def test_words_of_a_template_are_drawn_evenly():
    """Chi-square of the patterns and of one gap (df 7 and 15, far tails) would show wrong weights."""
    from kvasir_lab.tasks.template import PATTERNS, PLACES

    task = load_task("template")
    lines = [s for p in task.problems("longer", 1, 800) for s in p.solution.split("\n")]
    firsts = collections.Counter(
        next(
            i
            for i, t in enumerate(PATTERNS)
            if s.split(" ")[0].rstrip(",") == t.split(" ")[0]
            and (t.split(" ")[0] != "The" or ("met at" in s) == ("met at" in t))
        )
        for s in lines
    )
    places = collections.Counter(re.match(r"At the (\w+)", s).group(1) for s in lines if s.startswith("At the"))
    assert set(places) == set(PLACES) and len(firsts) == len(PATTERNS)
    for counts, limit in ((firsts, 30), (places, 45)):
        expected = sum(counts.values()) / len(counts)
        assert sum((n - expected) ** 2 / expected for n in counts.values()) < limit


def test_the_probabilities_of_all_sentences_sum_to_one():
    """List every sentence of a pattern, which 3 choices a gap allow.

    Their probabilities must sum to the pattern's share.
    """
    from kvasir_lab.tasks.template import GAP, PATTERNS, WORDS

    task = load_task("template:choices=3")
    total = 0.0
    for text in PATTERNS:
        parts = GAP.split(text)
        for words in itertools.product(*(WORDS[kind][:3] for kind in parts[1::2])):
            sentence = "".join(f" {words[i // 2]}" if i % 2 else part for i, part in enumerate(parts))
            bits = task.surprisal(sentence)
            total += 0.0 if bits is None else 2.0**-bits
    assert total == pytest.approx(1.0)


def test_only_sentences_of_the_source_pass():
    task = load_task("template")
    problem = task.problems("test", 0, 1)[0]
    assert task.check(problem, problem.solution)
    for wrong in (
        "",
        problem.solution + "\nThe king slept.",
        problem.solution.rsplit("\n", 1)[0],
        problem.solution.replace(".", "!"),
    ):
        assert not task.check(problem, wrong)
    assert task.surprisal("The king, the king and the wolf met at the river.") is None
    assert task.scored == "loss" and task.answer(problem.solution) is None


# --------------------------------------------------------------------------------------------------------------- schema


def test_the_json_schema_of_a_record_fits_its_solution():
    task = load_task("schema")
    for problem in task.problems("test", 0, 30):
        schema = task.schema(problem)
        record = json.loads(problem.solution)
        kinds = {field["type"] for field in schema["properties"].values()}
        assert schema["required"] == list(record) and kinds <= {"string", "integer", "boolean", "array"}
        assert not task.check(problem, "[" * 100000) and task.answer("[" * 100000) is None
        assert task.answer(problem.solution) == task.answer(json.dumps(dict(reversed(record.items()))))


def test_countdowns_mistakes_do_not_give_the_right_way_away():
    """Few wrong solutions are one sign from reaching the target.

    All are wrong and use the numbers of the question.
    """
    task = load_task("countdown:min_numbers=4")
    rng = np.random.default_rng(8)
    drawn = task.drawn(rng, "train", 400)
    near = 0
    for problem, text in zip(
        task.as_problems(drawn, rng), task.written(drawn, rng, np.ones(400, dtype=bool)), strict=True
    ):
        assert not task.check(problem, text)
        target = int(problem.messages[-1]["content"].split(" ")[1])
        *before, last, _ = text.split("\n")
        a, b = (int(n) for n in re.split(r"[-+*/]", last.split("=")[0]))
        ends = [
            (sign, value) for sign, value in (("+", a + b), ("-", a - b), ("*", a * b), ("/", a / b)) if value == target
        ]
        near += any(
            task.check(problem, "\n".join([*before, f"{a}{sign}{b}={target}", f"Answer: {target}"])) for sign, _ in ends
        )
    assert near < 0.3 * 400
