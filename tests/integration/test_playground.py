"""The real server's playground page in headless Chromium: its content policy does not break it, and it shows the
engine's answers."""

from __future__ import annotations

import json

import pytest

from tests.api.test_playground import Browser, needs_chromium, text_of
from tests.integration.serving import served

PROBLEM = "Compute modulo 97: start 12; +45; *3; -7; *2; +30"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server")) as it:
        yield it


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@needs_chromium
def test_the_page_talks_to_the_real_server(server, browser, tmp_path):
    reply = server.http.get("/")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    browser.open(f"{server.url}/")
    browser.js(
        "window.violations = []; document.addEventListener('securitypolicyviolation', e => "
        "window.violations.push(e.violatedDirective))"
    )
    browser.until("document.querySelectorAll('#model option').length === 1")
    assert text_of(browser, "#model option") == ["nano"]
    for name, value in {"temperature": "0", "max_tokens": "150"}.items():
        browser.js(f"document.getElementById('{name}').value = {json.dumps(value)}")
    browser.js(f"send({json.dumps(PROBLEM)})")
    browser.until("document.body.dataset.state === 'stop'")
    [answer] = text_of(browser, "article.assistant .body")
    assert answer.endswith("Answer: 67")
    foot = text_of(browser, "article.assistant .foot")[0]
    assert "first token" in foot and "prompt tokens" in foot
    pool = server.metrics()["kvasir:num_pages"]
    browser.until("Number(document.getElementById('cached').textContent.replace(/\\D/g, '')) > 0")
    shown = [
        browser.js(f"Number(document.getElementById('{i}').textContent.replace(/\\D/g, ''))")
        for i in ("used", "cached", "free")
    ]
    assert sum(shown) == pool
    assert browser.js("window.violations") == []
    # The style and the script are inline: had the policy refused them, nothing above would run, and this would be
    # unstyled.
    assert browser.js("getComputedStyle(document.body).margin") != "8px"
    browser.screenshot(tmp_path / "page.png")
    browser.leave()


@needs_chromium
def test_a_refusal_is_shown(server, browser):
    browser.open(f"{server.url}/")
    browser.until("document.querySelectorAll('#model option').length === 1")
    browser.js("send('word '.repeat(5000))")
    browser.until("document.body.dataset.state === 'error'")
    assert "messages" in text_of(browser, ".error")[0] or "context" in text_of(browser, ".error")[0]
    browser.leave()
