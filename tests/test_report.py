"""The report of a finished run in a browser without a network: every result is there, opens, and is drawn."""

import base64
import re
import shutil

import browser
import pytest

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium here: `make chromium` installs it")

DRAFT = "tiny / talk / draft"
FIGURES = {
    "1 samples | lengths",
    "1 samples | rejected lines",
    "2 hidden states | storage",
    "3 training | loss and accuracy",
    "4 acceptance | by position",
    "5 whole chain | throughput",
}
PAGES = {"1 samples | sources, ten samples", "3 training | GPUs before it", "5 whole chain | lineage, versions"}


@pytest.fixture(scope="module")
def report(finished, tmp_path_factory):
    workspace = finished.copy(tmp_path_factory.mktemp("report") / "copy")
    path = workspace.run_folder / "report.html"
    workspace.snakemake("--report", str(path))
    yield path
    shutil.rmtree(workspace.folder)


@pytest.fixture(scope="module")
def walked(report):
    found, faults = browser.evaluate(report, browser.WALK)
    assert not faults
    return found


def test_nothing_is_asked_of_a_network(report, walked):
    assert walked["asked"] == []
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="?https?:', report.read_text())


def test_it_opens_with_what_it_is_and_the_workflow(walked):
    home = walked["views"]["home"]
    assert "From conversations to a draft model" in home["text"]
    assert home["drawn"] >= 1, "the graph of rules"
    assert walked["views"]["Statistics"]["drawn"] >= 2, "runtimes and timeline"


def test_every_figure_is_drawn_and_every_page_opens(walked):
    views = {name.removeprefix(f"{DRAFT} | "): v for name, v in walked["views"].items() if name.startswith(DRAFT)}
    assert views.keys() == FIGURES | PAGES | {DRAFT}
    for name in FIGURES:
        assert len(views[name]["images"]) == 1 and views[name]["images"][0] > 400, name
    for name in PAGES:
        assert views[name]["frames"] == ["data:text/html"], name
    assert walked["views"]["All drafts | summary.html | tables"]["frames"] == ["data:text/html"]
    assert {f"summary.{kind}" for kind in ("md", "html", "json")} < set(walked["views"]["All drafts"]["text"].split())


def test_every_result_says_what_is_to_be_seen(walked):
    silent = [path for path, caption in walked["captions"].items() if not re.sub(r"<.*?>|\s", "", caption)]
    assert silent == []


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("lineage.html", ["target fingerprint", "talk.jsonl", "train_draft_model", "logs/train_draft_model", "torch"]),
        ("dataset.html", ["Sources", "talk.jsonl", "share of an epoch", "Rejected", "supervised in 1 reply"]),
        ("gpu_release.html", ["NVML", "GPUs needed", "proved free"]),
        ("summary.html", ["How good", "acceptance length", "hours per million tokens", "hidden states", "snakemake"]),
    ],
)
def test_pages_of_tables_fit_the_window(walked, tmp_path, name, texts):
    (uri,) = (uri for path, uri in walked["pages"].items() if path.endswith(name))
    page = tmp_path / name
    page.write_bytes(base64.b64decode(uri.partition("base64,")[2]))
    # Beside the menu of the report a page has some 900 of the 1280 pixels.
    found, faults = browser.evaluate(
        page,
        "return {text: document.body.innerText, wide: document.documentElement.scrollWidth - innerWidth,"
        " cut: [...document.querySelectorAll('div')].filter(d => d.scrollWidth > d.clientWidth).map(d => d.innerText),"
        " asked: performance.getEntriesByType('resource').map(one => one.name),"
        " tables: [...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().height)}",
        width=900,
    )
    assert not faults
    assert found["asked"] == []
    assert found["wide"] <= 0 and found["cut"] == []
    assert found["tables"] and all(height > 20 for height in found["tables"])
    for text in texts:
        assert text in found["text"], text
