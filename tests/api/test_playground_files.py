"""The files of the playground: how they are served and packaged, and the logic of the page that needs no browser."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess

import httpx
import pytest

from kvasir.api.admin import routes_playground
from tests.api.fake_client import FakeClient
from tests.api.running import running
from tests.api.test_playground import FOLDER

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")
VENDOR = FOLDER / "vendor"


def test_the_files_are_served_without_a_key():
    with running(FakeClient(), api_key=("secret",)) as server:
        for path in routes_playground.files():
            r = httpx.get(server.url + path, timeout=60)
            assert r.status_code == 200 and r.headers["content-security-policy"] == routes_playground.POLICY, path
            lasting = "immutable" in r.headers["cache-control"]
            assert lasting == path.startswith("/playground/vendor/"), path
            again = httpx.get(server.url + path, headers={"If-None-Match": r.headers["etag"]}, timeout=60)
            assert again.status_code == 304 and not again.content
        assert httpx.get(server.url + "/v1/models", timeout=60).status_code == 401
        for path in ("/playground/", "/playground/../auth.py", "/playground/%2e%2e/auth.py", "/playground/vendor"):
            assert httpx.get(server.url + path, timeout=60).status_code == 401, path
            known = {"Authorization": "Bearer secret"}
            assert httpx.get(server.url + path, headers=known, timeout=60).status_code == 404, path


def test_every_file_that_the_page_names_is_served():
    served = routes_playground.files()
    for path, file in served.items():
        text = file.data.decode()
        names = re.findall(r'(?:src|href)="(playground/[^"]+)"', text) if path == "/" else []
        if path.endswith(".js") and "vendor" not in path:
            names = ["playground/" + name for name in re.findall(r'(?:from|import) "\./([^"]+)"', text)]
        assert all("/" + name in served for name in names), (path, names)
    assert {"/", "/playground/style.css", "/playground/chat.js"} <= served.keys()


def test_the_libraries_are_those_of_the_list():
    rows = dict(re.findall(r"^\| (\S+\.js) \|.*\| ([0-9a-f]{64}) \|$", (VENDOR / "README.md").read_text(), re.M))
    found = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in VENDOR.iterdir() if f.name.endswith(".js")}
    assert rows == found and len(found) == 3
    assert all((VENDOR / f"LICENSE-{name.split('-')[0]}").is_file() for name in found)
    assert sum(len(file.data) for file in routes_playground.files().values()) < 600 << 10


def test_models_say_whether_they_are_packaged():
    for packaged in (True, False):
        with running(FakeClient(packaged=packaged)) as server:
            [model] = httpx.get(server.url + "/v1/models", timeout=60).json()["data"]
            assert model["packaged"] is packaged


@pytest.fixture
def node(tmp_path):
    def run(code):
        copy = tmp_path / "page"
        shutil.copytree(FOLDER, copy, dirs_exist_ok=True)
        (copy / "package.json").write_text('{"type": "module"}')
        (copy / "test.js").write_text("globalThis.self = globalThis;\n" + code)
        done = subprocess.run(["node", copy / "test.js"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@needs_node
def test_markdown_becomes_html(node):
    cases = {
        "# A\n\n- b\n- c": "<h1>A</h1>\n<ul>\n<li>b</li>\n<li>c</li>\n</ul>\n",
        "3*4 and 5*6, ~5 and ~6, $5 and $6": "<p>3*4 and 5*6, ~5 and ~6, $5 and $6</p>\n",
        "a *b* **c** ~~d~~": "<p>a <em>b</em> <strong>c</strong> <del>d</del></p>\n",
        "x <script>alert(1)</script>": "<p>x &lt;script&gt;alert(1)&lt;/script&gt;</p>\n",
        "![p](http://evil.example/p.png)": '<p><a href="http://evil.example/p.png">p</a></p>\n',
        "```py x\n1 < 2\n```": '<pre><code data-lang="py">1 &lt; 2</code></pre>',
        "$\\notacommand$": "<p><code>$\\notacommand$</code></p>\n",
    }
    formulas = ["so $x^2$.", "so \\(x^2\\).", "so\n\\[\nx^2\n\\]\nand", "$$x^2$$"]
    out = node(
        'const { blocks, html } = await import("./markdown.js");\n'
        f"console.log(JSON.stringify({json.dumps([*cases, *formulas])}.map(text => html(blocks(text)))))"
    )
    assert out[: len(cases)] == list(cases.values())
    assert all("<math" in text and "<msup>" in text for text in out[len(cases) :])
    assert all(('display="block"' in text) == (i > 1) for i, text in enumerate(out[len(cases) :]))


@needs_node
def test_settled_blocks_lose_no_text(node):
    text = "# A\n\nb\nc\n\n- d\n\n  e\n- f\n\n```\ng\n\nh\n```\n\n| a | b |\n|---|---|\n| c | d |\n\n$$\nx\n$$\nend"
    out = node(
        'const { blocks, settled } = await import("./markdown.js");\n'
        f"const text = {json.dumps(text)}, whole = blocks(text).map(t => t.raw), out = [];\n"
        "for (let i = 0; i <= text.length; i++) { const some = blocks(text.slice(0, i)), n = settled(some);\n"
        "  out.push([some.map(t => t.raw).join('') === text.slice(0, i), "
        "text.startsWith(some.slice(0, n).map(t => t.raw).join('')), n]); }\n"
        "console.log(JSON.stringify(out))"
    )
    assert all(starts for _, starts, _ in out) and out[-1][0] and out[-1][2] > 3


STORE = """
const { Conversations } = await import("./conversations.js");
class Storage {
  constructor(room) { this.map = new Map(); this.room = room; }
  get length() { return this.map.size; }
  key(i) { return [...this.map.keys()][i]; }
  getItem(k) { return this.map.get(k) ?? null; }
  removeItem(k) { this.map.delete(k); }
  setItem(k, v) {
    let used = v.length;
    for (const [key, value] of this.map) if (key !== k) used += value.length;
    if (used > this.room) throw new Error("full");
    this.map.set(k, v);
  }
}
let time = 0;
const say = (text, tokens) => [{ message: { role: "user", content: text }, tokens }];
"""


@needs_node
def test_conversations_are_bounded(node):
    out = node(
        STORE + "const many = new Conversations(new Storage(1e9), () => ++time);\n"
        "for (let i = 0; i < 60; i++) many.save('c' + i, say('hello ' + i));\n"
        "const tight = new Conversations(new Storage(1000), () => ++time);\n"
        "for (let i = 0; i < 5; i++) tight.save('t' + i, say('x'.repeat(300)));\n"
        "const kept = tight.list().map(c => c.id), room = tight.save('big', say('y'.repeat(200), 'z'.repeat(2000)));\n"
        "const lost = tight.save('huge', say('y'.repeat(2000))), turns = tight.turns('big');\n"
        "console.log(JSON.stringify([many.list().map(c => c.title), kept, room, turns, lost, many.turns('none')]))"
    )
    titles, kept, room, turns, lost, none = out
    assert titles == [f"hello {i}" for i in range(59, 9, -1)], "the 50 newest, newest first"
    assert kept == ["t4", "t3"] and room is True and none == []
    assert turns == [] or turns == [{"message": {"role": "user", "content": "y" * 200}}], "tokens go first"
    assert lost is False
