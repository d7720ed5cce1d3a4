"""Chromium without a window and without a network: what a page does when its scripts have run, and how it looks.

python -m tests.browser report.html FOLDER    # a picture of each view of a report, to be looked at
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Virtual time: the browser leaps over waiting, so the page's own pauses cost nothing and never are too short.
VIRTUAL_MS = 60_000

LISTEN = """
window.faults = [];
window.addEventListener('error', event => faults.push(String(event.message)));
window.addEventListener('unhandledrejection', event => faults.push(String(event.reason)));
window.pause = ms => new Promise(resolve => setTimeout(resolve, ms));
"""

# As a person does it: open a category by its name in the menu, then each of its results by its eye.
CLICK = """
const links = () => [...document.querySelectorAll('nav a')];
const named = name => links().find(a => a.innerText.trim() === name);
const rows = () => [...document.querySelectorAll('nav tbody tr')];
const open = async name => {
    app.setView({navbarMode: 'menu'});
    await pause(200);
    named(name).click();
    await pause(500);
};
const look = async number => { rows()[number].querySelector('a').click(); await pause(500); };
"""

WALK = """
const views = {};
const view = name => { views[name] = {
    text: document.querySelector('#app').innerText,
    images: [...document.querySelectorAll('#app img')].filter(i => !i.closest('nav')).map(i => i.naturalWidth),
    frames: [...document.querySelectorAll('iframe')].map(f => f.src.slice(0, 14)),
    drawn: document.querySelectorAll('canvas, svg.marks').length,
}; };
await pause(1000);
view('home');
for (const name of ['Statistics', ...Object.keys(categories)]) {
    await open(name);
    view(name);
    if (name === 'Statistics') continue;
    for (let number = 0; number < rows().length; number++) {
        const labels = [...rows()[number].cells].map(cell => cell.innerText.trim()).filter(text => text);
        if (rows()[number].querySelector('a').hasAttribute('download')) continue;
        await look(number);
        view([name, ...labels].join(' | '));
    }
}
const pages = Object.fromEntries(Object.entries(results).map(([path, one]) => [path, one.data_uri]));
const asked = performance.getEntriesByType('resource').map(one => one.name).filter(name => !name.startsWith('data:'));
return {views, pages, asked, captions: Object.fromEntries(Object.entries(results).map(([p, r]) => [p, r.caption]))};
"""


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def evaluate(page: Path, script: str, width: int = 1280) -> tuple[Any, list[str]]:
    """What the body of an async function returns when it runs in a page, and the page's errors."""
    answer = (
        "let value = null;"
        f"try {{ value = await (async () => {{ {script} }})(); }} catch (error) {{ faults.push(String(error)); }}"
        "const pre = document.createElement('pre'); pre.id = 'answer';"
        "pre.textContent = JSON.stringify([value, faults]); document.body.replaceChildren(pre);"
    )
    done = _chromium(page, answer, ["--dump-dom", f"--window-size={width},900"])
    match = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, f"{page}: no answer\n{done.stderr[-3000:]}"
    value, faults = json.loads(html.unescape(match[1]))
    return value, faults


def screenshot(page: Path, picture: Path, script: str = "", size: tuple[int, int] = (1280, 900)) -> None:
    """A picture of a page after `script` has run in it."""
    _chromium(page, script, [f"--screenshot={picture}", f"--window-size={size[0]},{size[1]}"])
    assert picture.exists()


def _chromium(page: Path, script: str, arguments: list[str]) -> subprocess.CompletedProcess:
    """Open a copy of the page that has our listeners first and runs `script` last."""
    text = page.read_text(encoding="utf-8")
    text = text.replace("<head>", f"<head><script>{LISTEN}</script>", 1)
    before, _, after = text.rpartition("</body>")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "page.html")
        copy.write_text(f"{before}<script>(async () => {{ {CLICK} {script} }})();</script></body>{after}", "utf-8")
        command = [find(), "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--virtual-time-budget={VIRTUAL_MS}"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        command += [*arguments, copy.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


def main(report: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (found, faults) = evaluate(report, WALK)
    print("errors of the page:", faults or "none")
    screenshot(report, folder / "home.png")
    for name in found["views"]:
        category, *labels = name.split(" | ")
        if category == "home":
            continue
        go = f"await pause(500); await open({json.dumps(category)});"
        if labels:
            go += f"""const labels = {json.dumps(labels)};
                const meant = row => labels.every((text, i) => row.cells[i].innerText.trim() === text);
                await look(rows().findIndex(meant));"""
        path = folder / (re.sub(r"\W+", "_", name) + ".png")
        screenshot(report, path, go)
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
