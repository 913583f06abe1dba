"""The playground page in headless Chromium, against a small HTTP server that speaks the API."""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources

import pytest

from kvasir.api.admin import routes_playground

FOLDER = resources.files("kvasir.api").joinpath("playground")
PAGE = FOLDER.joinpath("index.html").read_text(encoding="utf-8")
SCRIPT_TEXTS = {f.name: f.read_text(encoding="utf-8") for f in FOLDER.iterdir() if f.name.endswith(".js")}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
METRICS = """# HELP kvasir:num_pages Pages
# TYPE kvasir:num_pages gauge
kvasir:num_requests_running{model="m"} 2.0
kvasir:num_requests_waiting 3.0
kvasir:num_pages 1000.0
kvasir:pages_free 600.0
kvasir:pages_cached 250.0
kvasir:tier_bytes{tier="host"} 4294967296.0
kvasir:tier_used_bytes{tier="host"} 1073741824.0
kvasir:tier_hit_tokens_total{tier="device"} 9.0
kvasir:tier_hit_tokens_total{tier="host"} 12000.0
kvasir:tier_evicted_pages_total{cause="lost",tier="host"} 3.0
"""
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 6,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH; install it (Debian, Ubuntu: apt-get install chromium)"
)


def call(index, name=None, arguments=""):
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {
        "tool_calls": [
            {"index": index, "function": function} | ({"id": f"call_{index}", "type": "function"} if name else {})
        ]
    }


SCRIPTS = {
    "hello": [{"content": "Hello "}, {"content": "there."}],
    "think": [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "Done."}],
    "tool": [
        {"content": "Looking."},
        call(0, "get_weather", '{"city": '),
        call(0, arguments='"Oslo"}'),
        call(1, "add", "{}"),
    ],
    "evil": [{"content": EVIL}, {"reasoning_content": EVIL}, call(0, EVIL, EVIL)],
    "slow": [{"content": f"{i} "} for i in range(400)],
    "break": [{"content": "begun"}],
}


class Api(BaseHTTPRequestHandler):
    """A server that answers by the last user message, which names a script above. ``key``: the API key, if any."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, text, kind="application/json", **extra):
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": len(data), **extra}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(data)

    def error(self, status, message, **extra):
        self.reply(
            status,
            json.dumps({"error": {"message": message, "type": "x", "param": extra.pop("param", None), "code": None}}),
            **extra,
        )

    def allowed(self):
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.error(401, "wrong key")
            return False
        return True

    def do_GET(self):
        if file := routes_playground.files().get(self.path.split("?")[0]):
            headers = dict(file.headers)
            self.reply(200, file.data.decode(), headers.pop("content-type"), **headers)
        elif self.server.loading and self.path != "/metrics":
            self.error(503, "the model is loading", Retry_After=1)
        elif self.allowed() and self.path == "/v1/models":
            self.reply(200, json.dumps({"object": "list", "data": [{"id": "one", "packaged": True}, {"id": "two"}]}))
        elif self.path == "/metrics":
            self.reply(200, METRICS, "text/plain")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if self.server.loading:
            self.server.early += 1
            return self.error(503, "the model is loading", Retry_After=1)
        self.server.bodies.append(body)
        last = body["messages"][-1]["content"]
        if last == "full":
            self.error(429, "the queue is full", Retry_After=7)
        elif last == "bad":
            self.error(400, "must be between 0 and 10", param="temperature")
        else:
            self.stream(SCRIPTS.get(last, SCRIPTS["hello"]), last)

    def stream(self, deltas, script):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            for delta in [{"role": "assistant", "content": ""}, *deltas]:
                choice = {"index": 0, "delta": dict(delta), "finish_reason": None}
                choice["logprobs"] = choice["delta"].pop("logprobs", None)
                choice |= {"kvasir": choice["delta"].pop("kvasir")} if "kvasir" in delta else {}
                self.event({"choices": [choice], "usage": USAGE})
                if script == "slow":
                    time.sleep(0.02)
            if script == "break":
                self.event({"error": {"message": "the engine gave up"}})
                return
            reason = "tool_calls" if script in ("tool", "evil") else "stop"
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
            self.event({"choices": [], "usage": USAGE})
            self.wfile.write(b"data: [DONE]\n\n")
            return
        self.server.aborted.set()

    def event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a page that closes resets its connections
    server.key, server.bodies, server.aborted = "", [], threading.Event()
    server.loading, server.early = False, 0
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Browser:
    """Chromium through its debugging pipe: no extra packages, no port."""

    def __init__(self, profile):
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--disable-extensions",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        # The pipe is file descriptors 3 and 4 by definition.
        start = (
            f"import os, sys; os.dup2({to_child}, 3); os.dup2({from_child}, 4); os.execvp(sys.argv[1], sys.argv[1:])"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, CHROMIUM, *options, "about:blank"],
            pass_fds=(to_child, from_child),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._count, self._session, self._target, self._rest = 0, None, None, b""

    def command(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._read, 1 << 16)
                assert data, "Chromium ended"
                self._rest += data
            text, _, self._rest = self._rest.partition(b"\0")
            reply = json.loads(text)
            if reply.get("id") == self._count:
                assert "error" not in reply, reply
                return reply["result"]

    def open(self, url, width=1280, height=800, dark=False, mobile=False):
        self.leave()
        self._target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        self.command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.command("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && typeof send === 'function'")
        return self

    def leave(self):
        """Close the page, if one is open, so that it stops asking a server that ends."""
        self._session = None
        if self._target is not None:
            target, self._target = self._target, None
            self.command("Target.closeTarget", targetId=target)

    def js(self, expression):
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, condition, seconds=120):
        end = time.monotonic() + seconds
        while not self.js(condition):
            assert time.monotonic() < end, (
                f"never true: {condition}\n{self.js('document.body && document.body.innerText')}"
            )
            time.sleep(0.03)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))

    def close(self):
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.command("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser, server):
    def open_page(query="", **options):
        return browser.open(f"http://127.0.0.1:{server.server_port}/{query}", **options)

    yield open_page
    browser.leave()


def text_of(browser, selector):
    return browser.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent)")


# ---------------------------------------------------------------------------------------------------- without a browser


def test_the_page_needs_nothing_from_elsewhere():
    assert not re.search(
        r"(?:src|href|action)\s*=\s*[\"']?(?!data:)(?:https?:)?//|@import|\burl\(\s*[\"']?(?!data:)"
        r"|\bimport\b\s*[({\"']",
        PAGE,
    )


def test_html_is_made_in_one_place_and_cleaned_there():
    """The content policy enforces it in browsers: text becomes HTML through the sanitiser's policy alone."""
    wrong = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|createPolicy"
        r"|createContextualFragment"
    )
    assert {name for name, text in SCRIPT_TEXTS.items() if wrong.search(text)} == set()
    assert wrong.search("node.innerHTML = text")
    assert {name for name, text in SCRIPT_TEXTS.items() if "DOMPurify" in text or "markdown.js" in text} == {
        "render.js"
    }
    assert "require-trusted-types-for 'script'; trusted-types dompurify" in routes_playground.POLICY
    assert "unsafe" not in routes_playground.POLICY


def test_every_control_has_a_name():
    for tag in re.findall(r"<(?:input|select|textarea)\b[^>]*>", PAGE):
        before = PAGE[: PAGE.index(tag)]
        inside_label = before.rfind("<label") > before.rfind("</label>")
        assert inside_label or f'for="{re.search("id=.([a-z_]+)", tag)[1]}"' in PAGE, tag


# ------------------------------------------------------------------------------------------------------- with a browser


@needs_chromium
def test_a_demo_message_streams(page, server):
    browser = page("?demo=hello")
    browser.until("document.body.dataset.state === 'stop'")
    assert text_of(browser, "article.user > .body") == ["hello"] and text_of(browser, "article.assistant .body") == [
        "Hello there."
    ]
    foot = text_of(browser, "article.assistant .foot")[0]
    assert "first token" in foot and "12 prompt tokens (8 cached)" in foot and "6 made (2 thinking)" in foot
    assert text_of(browser, "#model option") == ["one", "two"]
    [body] = server.bodies
    assert body["messages"] == [{"role": "user", "content": "hello"}] and body["model"] == "one" and body["stream"]
    assert (
        not {"temperature", "top_p", "top_k", "seed", "max_tokens", "stop", "tools"} & body.keys()
    )  # what is not set is not sent


@needs_chromium
def test_controls_and_history_are_sent(page, server):
    browser = page()
    browser.until("document.querySelectorAll('#model option').length === 2")
    values = {
        "system": "Be brief.",
        "temperature": "0",
        "top_p": "0.9",
        "top_k": "40",
        "max_tokens": "5",
        "seed": "7",
        "stop": "END\\n\nX",
        "thinking": "off",
        "model": "two",
        "tools": '[{"type": "function", "function": {"name": "add"}}]',
    }
    for name, value in values.items():
        browser.js(f"document.getElementById('{name}').value = {json.dumps(value)}")
    browser.js("document.getElementById('prompt').value = 'think'")
    browser.js(
        "document.getElementById('prompt').dispatchEvent(new KeyboardEvent('keydown', "
        "{key: 'Enter', bubbles: true, cancelable: true}))"
    )
    browser.until("document.body.dataset.state === 'stop'")
    assert text_of(browser, ".thought .body") == ["Let me see."]
    browser.js("delete document.body.dataset.state; send('hello')")
    browser.until("document.body.dataset.state === 'stop'")
    body = server.bodies[-1]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "think"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "Let me see."},
        {"role": "user", "content": "hello"},
    ]
    assert {k: body[k] for k in ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "model")} == {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 5,
        "seed": 7,
        "stop": ["END\n", "X"],
        "model": "two",
    }
    assert body["tools"][0]["function"]["name"] == "add" and body["chat_template_kwargs"] == {"enable_thinking": False}
    browser.js("document.getElementById('clear').click()")
    assert browser.js("document.querySelectorAll('article').length") == 0


@needs_chromium
def test_tool_calls_and_their_results(page, server):
    browser = page("?demo=tool")
    browser.until("document.body.dataset.state === 'tool_calls'")
    assert text_of(browser, ".call > b") == ["get_weather", "add"] and text_of(browser, ".call > pre") == [
        '{"city": "Oslo"}',
        "{}",
    ]
    browser.js(
        "delete document.body.dataset.state; document.querySelector('.call input').value = 'rain';"
        "document.querySelector('article.assistant > button').click()"
    )
    browser.until("document.body.dataset.state === 'stop'")
    assistant, *results = server.bodies[-1]["messages"][1:]
    assert assistant["content"] == "Looking." and [c["function"] for c in assistant["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"name": "add", "arguments": "{}"},
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
    ]


@needs_chromium
def test_stop_aborts(page, server):
    browser = page("?demo=slow")
    browser.until(
        "document.querySelector('article.assistant .body')?.textContent.length > 10 && "
        "document.getElementById('speed').textContent"
    )
    assert "tokens/s" in browser.js("document.getElementById('speed').textContent")
    browser.js("document.getElementById('stop-button').click()")
    browser.until("document.body.dataset.state === 'stopped'")
    assert server.aborted.wait(60), "the server still streams"
    assert "stopped by you" in text_of(browser, "article.assistant .foot")[0]
    assert browser.js("!document.getElementById('send').hidden && document.getElementById('stop-button').hidden")


@needs_chromium
def test_nothing_the_model_says_becomes_html(page):
    browser = page("?demo=evil")
    browser.until("document.body.dataset.state === 'tool_calls'")
    time.sleep(0.2)
    assert browser.js("document.title") == "Kvasir playground"
    assert browser.js("document.querySelectorAll('article img, article script').length") == 0
    assert text_of(browser, "article.assistant > .body") == [EVIL] and text_of(browser, ".call > b") == [EVIL]


@needs_chromium
@pytest.mark.parametrize(
    "script, message",
    [
        ("full", "the queue is full. Try again in 7 s."),
        ("bad", "must be between 0 and 10 (temperature)."),
        ("break", "the engine gave up."),
    ],
)
def test_errors_are_shown(page, script, message):
    browser = page(f"?demo={script}")
    browser.until("document.body.dataset.state === 'error'")
    assert text_of(browser, ".error") == [message]
    # A message that came to nothing goes back into the box; an answer that broke off stays on the page.
    assert browser.js("document.getElementById('prompt').value") == ("" if script == "break" else script)
    assert text_of(browser, "article.assistant .body") == (["begun"] if script == "break" else [])


@needs_chromium
def test_a_value_out_of_range_is_not_sent(page, server):
    browser = page()
    browser.js("document.getElementById('temperature').value = '99'; send('hello')")
    browser.until("!!document.querySelector('.error')")
    assert "Temperature" in text_of(browser, ".error")[0] and server.bodies == []


@needs_chromium
def test_api_key(page, server):
    server.key = "secret"
    browser = page("?demo=hello")
    browser.until("!!document.querySelector('.error')")
    assert "API key" in text_of(browser, ".error")[0]
    browser.js(
        "const box = document.getElementById('key'); box.value = 'secret';"
        "box.dispatchEvent(new Event('change')); delete document.body.dataset.state"
    )
    browser.until("document.querySelectorAll('#model option').length === 2")
    browser.js("send('hello')")
    browser.until("document.body.dataset.state === 'stop'")
    assert browser.js("sessionStorage.getItem('kvasir-key')") == "secret"
    assert "secret" not in browser.js("JSON.stringify(localStorage)")


@needs_chromium
def test_engine_picture(page):
    browser = page()
    browser.until("document.getElementById('running').textContent === '2'")
    assert [
        browser.js(f"document.getElementById('{i}').textContent") for i in ("waiting", "used", "cached", "free")
    ] == ["3", "400", "250", "350"]
    cells = browser.js("[...document.querySelectorAll('#pool i')].map(c => c.className)")
    assert [cells.count(k) for k in ("used", "cached", "")] == [58, 36, 50]  # 40 %, 25 % and the rest of 144
    assert "40 % in use" in browser.js("document.getElementById('pool-title').textContent")
    told = browser.js("document.getElementById('tiers').textContent")
    assert told == "host: 1.00 of 4.00 GiB, 12,000 tokens came back"


@needs_chromium
@pytest.mark.parametrize(
    "width, height, dark", [(1280, 800, False), (1280, 800, True), (390, 844, False), (390, 844, True)]
)
def test_looks(page, tmp_path, width, height, dark):
    """Nothing overflows sideways, and text contrasts with its background; the screenshot is kept for inspection."""
    browser = page("?demo=tool", width=width, height=height, dark=dark, mobile=width < 500)
    browser.until(
        "document.body.dataset.state === 'tool_calls' && document.getElementById('running').textContent === '2'"
    )
    assert browser.js("document.documentElement.scrollWidth") <= width
    for selector in ("body", "article.user .body", "article.assistant .foot", "#send"):
        assert browser.js(CONTRAST.replace("SELECTOR", selector)) >= 4.5, selector
    browser.screenshot(tmp_path / "page.png")
    if width < 500:
        browser.js("document.getElementById('settings-button').click()")
        assert browser.js("document.getElementById('side').getBoundingClientRect().width") <= width
        browser.screenshot(tmp_path / "settings.png")


CONTRAST = """(() => {
  const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const node = document.querySelector('SELECTOR');
  let ground = node;
  while (ground && /, 0\\)$|transparent/.test(getComputedStyle(ground).backgroundColor)) ground = ground.parentElement;
  const a = light(getComputedStyle(node).color), b = light(getComputedStyle(ground || document.body).backgroundColor);
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
})()"""
