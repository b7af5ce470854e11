"""The report: from rows to verdicts to a self-contained page, and the report that is committed to the repository."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from adptnet_lab import cli
from adptnet_lab.paper import compare, report, reproduce, rows
from adptnet_lab.paper.recipe import Outcome
from adptnet_lab.paper.registry import load_results
from adptnet_lab.paper.rows import RowStore
from support.paper import run_smoke

PROJECT = Path(__file__).parents[3]
CHEAP = (
    "fig:ortho_gd",
    "table:conv_forward_flops",
    "table:error_summary",
    "fig:beta_effect_interactions",
    "fig:tradeoffs",
)


class Page(HTMLParser):
    """Parser that collects the tags, ids, addresses and scripts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.urls, self.scripts = Counter(), [], [], []
        self.open = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        values = dict(attributes)
        self.ids.append(values.get("id"))
        self.urls += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action", "data")]
        self.open = (tag, values.get("type"))

    def handle_data(self, data):
        if self.open and self.open[0] == "script":
            self.scripts.append((self.open[1], data))
            self.open = None


def test_from_rows_to_verdicts_to_the_page(tmp_path, capsys):
    assert run_smoke(tmp_path, *CHEAP) > 0
    assert run_smoke(tmp_path, *CHEAP) == 0  # finished points are skipped
    check_verdicts(tmp_path)
    assert cli.main(["report", "--rows", str(tmp_path), "--output", str(tmp_path / "report")]) == 0
    check_page_is_self_contained(tmp_path / "report")
    check_dial_data(tmp_path / "report")
    check_markdown_is_complete(tmp_path / "report")


def check_verdicts(folder):
    counts = compare.run(compare.Compare(rows=folder))
    assert sum(counts.values()) == sum(len(result.claims) for result in load_results().values())
    assert counts[Outcome.NOT_RUN] > counts[Outcome.HOLDS] > counts[Outcome.FAILS] > 0
    found = {
        (name, claim.id): verdict.outcome
        for name in CHEAP
        for claim, verdict in compare.judge(load_results()[name], RowStore(folder)).verdicts
    }
    assert found["table:conv_forward_flops", "forward"] == Outcome.HOLDS
    assert found["table:error_summary", "derivative"] == Outcome.HOLDS
    assert found["fig:beta_effect_interactions", "grows"] == Outcome.HOLDS
    # the points of docs/explanation/deviations.md
    assert found["fig:beta_effect_interactions", "every-beta"] == Outcome.FAILS  # 5
    assert found["table:error_summary", "derivative-acts"] == Outcome.FAILS  # 15
    assert found["fig:ortho_gd", "printed"] == Outcome.FAILS  # 1


def check_page_is_self_contained(folder):
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert all(url.startswith(("#", "data:")) for url in page.urls)
    assert not re.search(r"@import|url\((?!['\"]?(#|data:))", text)
    figures = list((folder / "figures").glob("*.svg"))
    assert len(figures) == 5
    assert page.tags["svg"] == len(figures) + 3  # the slider has three
    ids = [name for name in page.ids if name]
    assert {url[1:] for url in page.urls if url.startswith("#")} <= set(ids)
    assert len(set(ids)) == len(ids)
    assert all(name.replace(":", "-") in ids for name in load_results())
    assert "default-src 'none'" in text  # the browser enforces it, too
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def check_dial_data(folder):
    scripts = dict(Page((folder / "index.html").read_text()).scripts)
    data = json.loads(scripts["application/json"])
    assert len(data["exponents"]) == len(data["betas"]) == len(data["certified"]) == len(data["iterations"]["Conv"])
    assert data["betas"][0] == 0
    assert data["accuracy"] is None  # the word problem was not run
    assert all(f'"dial-{name}"' in scripts[None] for name in ("rotation", "spectrum", "iterations", "accuracy"))


def test_the_content_of_rows_cannot_inject_markup(tmp_path, capsys):
    name = "fig:beta_effect_interactions"
    run_smoke(tmp_path, name)
    path = RowStore(tmp_path).path(load_results()[name], "smoke")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["numbers"]["iterations"]["<img src=x onerror=alert(1)>"] = [1, 1]
        row["numbers"]["exponents"][-1] = "-inf"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.run(report.Report(rows=tmp_path, output=tmp_path / "report"))
    text = (tmp_path / "report" / "index.html").read_text()
    assert "onerror" not in text
    data = json.loads(dict(Page(text).scripts)["application/json"])
    assert [exponents[-1] for exponents in data["exponents"]] == [None] * len(rows)


def check_markdown_is_complete(folder):
    text = (folder / "index.md").read_text()
    for result in load_results().values():
        assert f"## {result.name}: " in text
        assert all(claim.says in text for claim in result.claims)
    images = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(images) == 5
    assert all((folder / image).is_file() for image in images)


def test_a_report_without_matplotlib_names_the_package_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run_smoke(tmp_path, "fig:tradeoffs")
    assert cli.main(["report", "--rows", str(tmp_path), "--output", str(tmp_path)]) == 1
    assert "pip install 'adptnet[plots]'" in capsys.readouterr().err


PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("load", () => {
  const captions = ["dial-share", "dial-interval", "dial-counts"].map((id) => document.getElementById(id));
  const words = () => captions.map((part) => part.textContent);
  const before = words(), slider = document.getElementById("beta");
  slider.value = "1";
  slider.dispatchEvent(new Event("input"));
  const figures = [...document.querySelectorAll("figure svg, figure canvas")];
  const boxes = figures.map((figure) => figure.getBoundingClientRect());
  const style = getComputedStyle(document.body);
  const observed = JSON.stringify({
    errors,
    moved: words().map((text, i) => text !== before[i]),
    figures: boxes.length,
    smallest: Math.min(...boxes.map((box) => Math.min(box.width, box.height))),
    overflow: document.documentElement.scrollWidth - innerWidth,
    width: innerWidth,
    colours: [style.color, style.backgroundColor],
  });
  if (parent === window) document.title = observed;
  else parent.postMessage(observed, "*");
});
</script>"""
# A window is never narrower than 500 pixels; a frame in it may be.
PHONE = """<!doctype html><title></title><iframe src="index.html" width="390" height="844" style="border: 0"></iframe>
<script>addEventListener("message", (event) => { document.title = event.data; });</script>"""


def observe_in_browser(page, *options):
    """Open a page in a headless browser and return what the probe in it observed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("Chromium is not installed; another test checks the source of the page")
    always = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]
    dumped = subprocess.run(
        [browser, *always, *options, page.as_uri()], capture_output=True, text=True, check=True, timeout=100
    )
    assert "CONSOLE" not in dumped.stderr
    return json.loads(unescape(re.search(r"<title>(.*?)</title>", dumped.stdout)[1]))


@pytest.fixture(scope="module")
def probed_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    run_smoke(folder, *CHEAP)
    assert cli.main(["report", "--rows", str(folder), "--output", str(folder)]) == 0
    page = folder / "index.html"
    page.write_text(page.read_text().replace("<head>", "<head>" + PROBE))
    (folder / "phone.html").write_text(PHONE)
    return folder


def lightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765


@pytest.mark.parametrize(
    ("name", "options", "width"),
    [
        ("index.html", [], 1200),
        ("index.html", ["--blink-settings=preferredColorScheme=0"], 1200),
        ("phone.html", [], 390),
    ],
    ids=["light", "dark", "phone"],
)
def test_in_a_browser_every_figure_is_visible_and_the_slider_works(probed_report, name, options, width):
    observed = observe_in_browser(probed_report / name, "--window-size=1200,900", *options)
    assert observed["errors"] == []
    assert observed["moved"] == [True, True, True]
    assert observed["figures"] == 5 + 4  # with those of the slider
    assert observed["smallest"] > 100
    assert observed["width"] == width
    assert observed["overflow"] <= 0  # wide figures and tables scroll in themselves
    text, ground = map(lightness, observed["colours"])
    assert (text > 0.8 and ground < 0.2) if options else (text < 0.2 and ground > 0.8)


@pytest.mark.slow
def test_everything_runs_at_the_scale_smoke_in_two_minutes(tmp_path):
    start = time.monotonic()
    run_smoke(tmp_path, all=True)
    assert time.monotonic() - start < 120
    assert cli.main(["report", "--rows", str(tmp_path), "--output", str(tmp_path / "report")]) == 0
    counts = compare.run(compare.Compare(rows=tmp_path))
    assert counts[Outcome.HOLDS] > 20


def test_the_readme_and_the_committed_report_have_the_verdicts_of_the_committed_rows(capsys):
    counts = compare.run(compare.Compare(rows=PROJECT / "results"))
    holds, fails, untestable = (counts[outcome] for outcome in (Outcome.HOLDS, Outcome.FAILS, Outcome.NOT_TESTABLE))
    total = counts.total()
    assert holds + fails + untestable == total
    readme = " ".join((PROJECT / "README.md").read_text().split())
    assert f"{total} claims that we test, {holds} hold, {fails} fail and {untestable} cannot be tested" in readme
    report_line = (
        f"{total} claims: ✓ holds {holds}, ✗ fails {fails}, – not testable at this scale {untestable}, · not run 0."
    )
    assert report_line in (PROJECT / "docs" / "report" / "index.md").read_text()


def test_the_committed_report_stays_small():
    files = [PROJECT / "docs" / "report" / "index.md", *(PROJECT / "docs" / "report" / "figures").iterdir()]
    assert sum(path.stat().st_size for path in files) < 2e6


def test_a_fresh_clone_shows_the_committed_rows_until_there_are_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adptnet_lab.paper.rows.COMMITTED_FOLDERS", (Path("results"),))
    options = compare.Compare(("fig:ortho_gd",))
    compare.run(options)
    assert "No rows in runs/paper/{smoke,laptop,paper}" in capsys.readouterr().out
    Path("results").symlink_to(PROJECT / "results")
    counts = compare.run(options)
    assert counts[Outcome.NOT_RUN] == 0
    assert capsys.readouterr().out.startswith("Rows from results.\n")
    reproduce.run(reproduce.Reproduce(("fig:ortho_gd",), scale="smoke"))
    assert list(Path("runs/paper/smoke").glob("*.jsonl"))
    capsys.readouterr()
    compare.run(options)
    assert capsys.readouterr().out.startswith(
        "Rows from runs/paper. For the rows that are committed to the repository: --rows results."
    )
    compare.run(compare.Compare(("fig:ortho_gd",), rows=Path("results")))
    assert capsys.readouterr().out.startswith("Rows from results.\n")


def test_a_clone_finds_its_rows_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    committed = rows.COMMITTED_FOLDERS[-1]
    if not committed.is_dir():
        pytest.skip("installed without the repository")
    assert rows.open_row_store(None).folder == committed
