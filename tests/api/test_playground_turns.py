"""Conversations in the playground: examples, reload, copy, edit, regenerate, curl, coloured tokens."""

# ruff: noqa: F811  (fixtures of the other file)
from __future__ import annotations

import json
import math
import shlex

import pytest

from tests.api import test_playground
from tests.api.test_playground import browser, needs_chromium, page, server, text_of  # noqa: F401


def token(text: str | bytes, p: float, drafter: str | None = None, **top: float) -> dict:
    raw = text.encode() if isinstance(text, str) else text
    return {
        "token": raw.decode(errors="replace"),
        "logprob": math.log(p),
        "bytes": list(raw),
        "top_logprobs": [{"token": t, "logprob": math.log(q), "bytes": list(t.encode())} for t, q in top.items()],
        "drafter": drafter,
    }


EVIL = test_playground.EVIL
TOKENS = [
    {"content": text, "logprobs": {"content": entries}}
    for text, entries in (
        ("It is ", [token("It", 0.9, None, It=0.9, Is=0.05), token(" is ", 0.5, "ngram")]),
        ("é", [token(b"\xc3", 0.2, "suffix"), token(b"\xa9", 1.0, "suffix")]),
        (EVIL, [token(EVIL, 0.001, EVIL)]),
    )
]
FORCED = [
    {"content": "so ", "logprobs": {"content": [token("so ", 0.9)]}},
    {"content": "it is", "logprobs": {"content": [token("it", 0.1), token(" is", 0.2)]}, "kvasir": {"forced": [1, 2]}},
]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.setitem(test_playground.SCRIPTS, "tokens", TOKENS)
    monkeypatch.setitem(test_playground.SCRIPTS, "forced", FORCED)


def say(browser, text, state="stop"):
    browser.js(f"delete document.body.dataset.state; send({json.dumps(text)})")
    browser.until(f"document.body.dataset.state === {json.dumps(state)}")


def press(browser, article, label):
    """Press a small button below the message number ``article``."""
    browser.js(
        f"[...document.querySelectorAll('#log > article')[{article}].querySelectorAll('.acts button, .curl button')]"
        f".find(b => b.textContent === {json.dumps(label)}).click()"
    )


def reload(browser):
    browser.js("window.old = true")
    browser.command("Page.reload")
    browser.until("window.old === undefined && document.readyState === 'complete' && typeof send === 'function'")


def bodies(server):
    return [[(m["role"], m["content"]) for m in body["messages"]] for body in server.bodies]


# ------------------------------------------------------------------------------------------------------------- examples


@needs_chromium
def test_three_examples_can_be_sent(page, server):
    browser = page()
    browser.until("document.querySelectorAll('#examples button').length === 3")
    browser.js("document.querySelectorAll('#examples button')[1].click()")
    browser.until("document.body.dataset.state === 'stop'")
    [body] = server.bodies
    assert body["messages"][0]["content"].startswith("Roads: ") and body["temperature"] == 0
    assert browser.js("document.getElementById('temperature').value") == "", "later answers are drawn as set"
    assert browser.js("document.getElementById('hello').hidden")


# --------------------------------------------------------------------------------------------- reload, copy, edit, redo


@needs_chromium
def test_a_conversation_survives_a_reload(page, server):
    browser = page()
    browser.js("document.getElementById('system').value = 'Be brief.'; document.getElementById('seed').value = '7'")
    say(browser, "think")
    say(browser, "tool", "tool_calls")
    before = browser.js("document.getElementById('log').innerText")
    reload(browser)
    after = browser.js("document.getElementById('log').innerText")
    assert after.splitlines() == before.splitlines() and "Done." in before
    assert browser.js("document.getElementById('system').value") == "Be brief."
    browser.js(
        "document.querySelector('.call input').value = 'rain';"
        "document.querySelector('article.assistant > button').click()"
    )
    browser.until("document.body.dataset.state === 'stop'")
    body = server.bodies[-1]
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user", "assistant", "tool", "tool"]
    assert body["messages"][2]["reasoning_content"] == "Let me see." and body["seed"] == 7
    assert [c["function"]["name"] for c in body["messages"][4]["tool_calls"]] == ["get_weather", "add"]
    browser.js("document.getElementById('clear').click()")
    reload(browser)
    assert browser.js("document.querySelectorAll('article').length") == 0
    assert not browser.js("document.getElementById('hello').hidden")


@needs_chromium
def test_a_reload_during_an_answer_loses_nothing(page, server):
    """The browser breaks the answer off before it leaves the page, or after: then what was said is there, or the
    message is back in its box."""
    browser = page()
    browser.js("send('slow')")
    browser.until("document.querySelector('article.assistant .body')?.textContent.length > 10")
    reload(browser)
    if browser.js("document.getElementById('prompt').value") == "slow":
        assert browser.js("document.querySelectorAll('article').length") == 0
    else:
        [answer] = text_of(browser, "article.assistant > .body")
        assert text_of(browser, "article.user > .body") == ["slow"] and answer.startswith("0 1 2 3 4 ")


@needs_chromium
def test_an_answer_is_made_again(page, server):
    browser = page()
    say(browser, "hello")
    say(browser, "think")
    browser.js("delete document.body.dataset.state")
    press(browser, 1, "Regenerate")
    browser.until("document.body.dataset.state === 'stop'")
    assert bodies(server)[-1] == bodies(server)[0] == [("user", "hello")]
    assert text_of(browser, "article.user > .body") == ["hello"], "what came after it is gone"


@needs_chromium
def test_a_message_is_edited(page, server):
    browser = page()
    say(browser, "hello")
    say(browser, "think")
    press(browser, 2, "Edit")
    press(browser, 2, "Cancel")
    assert text_of(browser, "article.user > .body") == ["hello", "think"]
    press(browser, 2, "Edit")
    browser.js("delete document.body.dataset.state; document.querySelector('article.user textarea').value = 'better'")
    press(browser, 2, "Send")
    browser.until("document.body.dataset.state === 'stop'")
    assert bodies(server)[-1] == [("user", "hello"), ("assistant", "Hello there."), ("user", "better")]
    assert browser.js("document.querySelectorAll('article').length") == 4


@needs_chromium
def test_messages_are_copied(page):
    browser = page()
    browser.js(
        "window.copied = []; Object.defineProperty(navigator, 'clipboard', "
        "{value: {writeText: async text => window.copied.push(text)}})"
    )
    say(browser, "hello")
    press(browser, 0, "Copy")
    press(browser, 1, "Copy")
    browser.until("window.copied.length === 2")
    assert browser.js("window.copied") == ["hello", "Hello there."]


@needs_chromium
def test_the_curl_line_sends_the_same_request(page, server):
    server.key = "secret"
    browser = page()
    browser.js(
        "document.getElementById('key').value = 'secret'; document.getElementById('system').value = \"It's me.\""
    )
    browser.js("document.getElementById('temperature').value = '0.5'")
    say(browser, "hello")
    say(browser, "it's $HOME")
    press(browser, 3, "curl")
    line = browser.js("document.querySelector('.curl').firstChild.data")
    words = shlex.split(line)
    assert words[:2] == ["curl", f"http://127.0.0.1:{server.server_port}/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1]) == server.bodies[-1]
    assert "secret" not in line and '-H "Authorization: Bearer $KVASIR_API_KEY"' in line
    press(browser, 3, "curl")
    assert not browser.js("!!document.querySelector('.curl')")


# --------------------------------------------------------------------------------------------------------------- tokens


def shades(browser):
    return browser.js("[...document.querySelectorAll('.tokens span')].map(s => s.style.getPropertyValue('--shade'))")


def view(browser, name):
    browser.js(
        f"var v = document.getElementById('tokens-view'); v.value = {json.dumps(name)};"
        "v.dispatchEvent(new Event('change'))"
    )


@needs_chromium
def test_tokens_are_coloured_by_probability_and_by_drafter(page, server):
    browser = page()
    say(browser, "hello")
    assert not {"logprobs", "return_drafters"} & server.bodies[-1].keys(), "plain text costs no log-probabilities"
    view(browser, "probability")
    say(browser, "tokens")
    assert server.bodies[-1]["logprobs"] is True and server.bodies[-1]["return_drafters"] is True
    assert text_of(browser, ".tokens span") == ["It", " is ", "", "é", EVIL], "half a character waits for the other"
    visible = "[...document.querySelectorAll('article.assistant .body')].map(body => getComputedStyle(body).display)"
    assert browser.js(visible) == ["block", "none"], "an answer without tokens stays as text"
    alphas = [float(s.rpartition("/")[2].strip(" )")) for s in shades(browser)]
    assert alphas == sorted(alphas[:3]) + [0, 0.75], "the less likely, the stronger"
    title = browser.js("document.querySelector('.tokens span').title")
    assert '"It" 90 %, drawn' in title and '"Is" 5 %' in title
    view(browser, "drafter")
    colours = shades(browser)
    assert colours[0] == "transparent" and colours[2] == colours[3] and len(set(colours)) == 4
    assert text_of(browser, "article.counted .legend > span") == [
        "drawn by the model: 1", "ngram: 1", "suffix: 2", f"{EVIL}: 1",
    ]  # fmt: skip
    reload(browser)
    assert shades(browser) == colours, "tokens survive a reload"
    view(browser, "")
    assert browser.js(visible) == ["block", "block"]
    assert (
        browser.js("document.title") == "Kvasir playground"
        and browser.js("document.querySelector('article img')") is None
    )


@needs_chromium
def test_forced_tokens_are_marked(page, server):
    browser = page()
    view(browser, "drafter")
    say(browser, "forced")
    assert text_of(browser, ".tokens .forced") == ["it", " is"]
    assert ", forced" in browser.js("document.querySelector('.tokens .forced').title")
    assert text_of(browser, "article.counted .legend > span") == ["forced: 2", "drawn by the model: 1"]
    reload(browser)
    assert text_of(browser, ".tokens .forced") == ["it", " is"]
