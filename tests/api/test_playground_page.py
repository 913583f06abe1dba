"""The playground's Markdown, its waiting for a model, its list of conversations, and what it says of the model."""

# ruff: noqa: F811  (fixtures of the other file)
from __future__ import annotations

import pytest

from tests.api import test_playground
from tests.api.test_playground import EVIL, browser, needs_chromium, page, server, text_of  # noqa: F401
from tests.api.test_playground_turns import reload, say

RICH = """# Title

Some **bold** text, a [link](https://example.org/), a formula $x^2$ and `code`.

| a | b |
|---|---|
| 1 | 2 |

```python
print("hi")
```

\\[ \\frac{a}{b} \\]
"""
ATTACKS = "\n\n".join(
    [
        EVIL,
        "[a](javascript:document.title='owned') [b](data:text/html,x) ![c](http://127.0.0.1:9/c.png)",
        "<a href=x onclick=\"document.title='owned'\">d</a> <svg onload=\"document.title='owned'\">",
        "$\\href{javascript:alert(1)}{x}$ $\\includegraphics{http://127.0.0.1:9/e.png}$",
        "<math><mtext><table><mglyph><style><img src=x onerror=\"document.title='owned'\">",
        "```\"><img src=x onerror=document.title='owned'>\ncode\n```",
    ]
)


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    for name, text in (("rich", RICH), ("attacks", ATTACKS)):
        pieces = [{"content": text[i : i + 7]} for i in range(0, len(text), 7)]
        monkeypatch.setitem(test_playground.SCRIPTS, name, pieces)


@needs_chromium
def test_an_answer_is_shown_as_markdown(page):
    browser = page()
    say(browser, "rich")
    for tag in ("h1", "strong", "a[target=_blank]", "table td", "msup", "mfrac", ".code pre code"):
        assert text_of(browser, f"article.assistant .body {tag}"), tag
    assert text_of(browser, ".code-head span") == ["python"] and text_of(browser, ".code pre") == ['print("hi")']
    assert "monospace" in browser.js("getComputedStyle(document.querySelector('.code code')).fontFamily")
    browser.js(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async text => window.copied = text}})"
    )
    browser.js("document.querySelector('.code-head button').click()")
    browser.until("window.copied === 'print(\"hi\")'")


@needs_chromium
def test_nothing_in_an_answer_runs_or_loads(page):
    browser = page()
    browser.js("window.bad = []; document.addEventListener('securitypolicyviolation', e => bad.push(e.blockedURI))")
    say(browser, "attacks")
    assert browser.js("document.title") == "Kvasir playground" and browser.js("bad") == []
    inside = "[...document.querySelectorAll('article.assistant .body *')]"
    assert browser.js(f"{inside}.filter(n => /^(img|script|style|svg|iframe)$/i.test(n.tagName)).length") == 0
    assert (
        browser.js(f"{inside}.flatMap(n => [...n.attributes]).filter(a => /^on|^style$|^src$/.test(a.name)).length")
        == 0
    )
    assert browser.js(f"{inside}.filter(n => n.href && !/^http/.test(n.href)).length") == 0
    # The control: without the sanitiser the same text is refused by the content policy.
    assert browser.js("try { document.body.innerHTML = '<b>x</b>'; false } catch { true }")


@needs_chromium
def test_a_message_waits_for_the_model(page, server):
    server.loading = True
    browser = page()
    browser.until("document.getElementById('model').textContent === 'loading…'")
    browser.js("void send('hello')")
    browser.until("document.getElementById('speed').textContent.includes('is sent when it is ready')")
    assert server.early and not server.bodies
    server.loading = False
    browser.until("document.body.dataset.state === 'stop'")
    browser.until("document.querySelectorAll('#model option').length === 2")
    assert text_of(browser, ".error") == [] and text_of(browser, "article.assistant .body") == ["Hello there."]


@needs_chromium
def test_old_errors_go_with_a_good_answer(page):
    browser = page()
    say(browser, "bad", "error")
    say(browser, "full", "error")
    assert len(text_of(browser, ".error")) == 1
    say(browser, "hello")
    assert text_of(browser, ".error") == []


@needs_chromium
def test_examples_fit_the_model(page, server):
    browser = page()
    browser.until("document.querySelectorAll('#examples button').length === 3")
    ours = text_of(browser, "#examples button")
    assert "modulo" in ours[0] and browser.js("!document.getElementById('toy').hidden")
    assert "kvasir serve path/to/checkpoint" in text_of(browser, "#toy")[0]
    browser.js("var m = document.getElementById('model'); m.value = 'two'; m.dispatchEvent(new Event('change'))")
    assert not set(ours) & set(text_of(browser, "#examples button"))
    assert browser.js("document.getElementById('toy').hidden")
    browser.js("document.querySelector('#examples button').click()")
    browser.until("document.body.dataset.state === 'stop'")
    assert "temperature" not in server.bodies[-1]


@needs_chromium
def test_conversations_are_listed_opened_and_deleted(page):
    browser = page()
    say(browser, "hello")
    browser.js("document.getElementById('clear').click()")
    say(browser, "think")
    assert text_of(browser, "#chats button:first-child") == ["think", "hello"]
    browser.js("document.querySelectorAll('#chats button:first-child')[1].click()")
    assert text_of(browser, "article.user > .body") == ["hello"]
    reload(browser)
    assert text_of(browser, "article.user > .body") == ["hello"]
    browser.js("document.querySelector('#chats .open button:last-child').click()")
    assert text_of(browser, "#chats button:first-child") == ["think"] and text_of(browser, "article") == []
