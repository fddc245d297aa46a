"""The pages of `decentfn report` in headless Chromium: everything is drawn, hovering shows values, names are text."""

import html
import json
import re
import shutil
import subprocess

import pytest

import decentfn as df
from decentfn.plots.report import page
from tests.plots.test_report import HOSTILE, row, write

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")]

PROBE = """
<script>
const seen = {errors: [], figures: []};
window.onerror = message => seen.errors.push(message);
window.alert = () => seen.errors.push("an alert");
const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));
addEventListener("load", async () => {
  for (const figure of document.querySelectorAll(".js-plotly-plot")) {
    const paths = figure.querySelectorAll(".trace path, .heatmaplayer image, .barlayer path").length, labels = [];
    for (const area of figure.querySelectorAll(".nsewdrag")) {
      area.scrollIntoView();
      const box = area.getBoundingClientRect();
      search: for (let y = 0.06; y < 1; y += 0.05) for (let x = 0.06; x < 1; x += 0.05) {
        const at = {clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true};
        area.dispatchEvent(new MouseEvent("mousemove", at));
        await wait(60);
        const label = figure.querySelector(".hoverlayer .hovertext");
        if (label) { labels.push(label.textContent); break search; }
      }
    }
    seen.figures.push({paths, labels});
  }
  const said = document.createElement("pre");
  said.id = "seen";
  said.textContent = JSON.stringify(seen);
  document.body.append(said);
});
</script>"""


def opened(tmp_path, *paths, dark=False):
    """What a reader's browser has drawn, and the text of the page."""
    file = tmp_path / "page.html"
    file.write_text(page(paths) + PROBE, encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,900", "--timeout=120000"]
    command += [
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=600000",
        "--dump-dom",
    ]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=300)
    seen = json.loads(html.unescape(re.search('<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    assert not seen["errors"]
    return seen, done.stdout


def many(n, rows, name="w"):
    links = [[i, (i + 2**k) % n, 10**6, k < 3] for i in range(n) for k in range(6)] if n > 1 else []
    waited = [[i, (i + 2**k) % n, 0.01 * (1 + k)] for i in range(n) for k in range(6)] if n > 1 else []
    return [row(t, [1 / (1 + t) + 0.01 * i for i in range(n)], links=links, waited=waited) for t in range(rows)]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("n", [1, 4, 64])
def test_each_plot_is_drawn_and_hovering_shows_values(n, dark, tmp_path):
    seen, _ = opened(tmp_path, write(tmp_path / "log.jsonl", many(n, 50)), dark=dark)
    curves, *rest = seen["figures"]
    assert len(curves["labels"]) == (4 if n > 1 else 3)  # one worker sends nothing
    assert all(re.search(r"log, (mean|worker \d+|distance).*: \d", label) for label in curves["labels"])
    assert len(rest) == (n > 1) and all(figure["paths"] for figure in seen["figures"])
    for figure in rest:
        heat, link = figure["labels"]
        assert re.fullmatch(r"\d+ waited [\d.]+ s for (\d+|all)", heat) and re.fullmatch(r"\d+ to \d+: .* MB", link)


def test_timelines_are_drawn_and_tell_of_steps_and_messages(tmp_path):
    clock = df.clock([0.1, 0.1, 0.1, 0.3], df.planning.Cluster(4, df.planning.Link(1)))
    topology = df.topology("one-peer-exp", 4)
    clock.timeline(df.timing.Exchange(topology, 4e6), 20).save(tmp_path / "timeline.json")
    clock.timeline(df.timing.Exchange(topology, 4e6, is_awaited=False), 20).trace.save(tmp_path / "trace.json")
    seen, _ = opened(tmp_path, tmp_path)
    assert len(seen["figures"]) == 2
    for figure in seen["figures"]:
        [label] = figure["labels"]
        assert figure["paths"] > 80 and re.search(r"worker \d, step \d+|\d to \d", label)


def test_hostile_names_are_text(tmp_path):
    links, waited = [[HOSTILE, "b", 10, True], ["b", HOSTILE, 10, True]], [[HOSTILE, "b", 9.0], ["b", HOSTILE, 9.0]]
    lines = [row(t, [1.0, 2.0], workers=[HOSTILE, "b"], links=links, waited=waited) for t in range(3)]
    folder = tmp_path / HOSTILE.replace("/", "|")
    seen, dom = opened(tmp_path, write(folder / f"{folder.name}.jsonl", [{"config": {HOSTILE: HOSTILE}}, *lines]))
    assert dom.count(html.escape(HOSTILE, quote=False)) >= 2  # the setting and its value
    assert "<b>" not in dom.partition("<body>")[2].replace(PROBE, "").partition("<pre id")[0].replace(
        "\\u003cb\\u003e", ""
    )
    assert any("<script>alert(1)" in label for figure in seen["figures"] for label in figure["labels"])


def test_twenty_megabytes_of_logs_open_within_five_seconds(tmp_path):
    log = write(tmp_path / "log.jsonl", many(64, 1200))
    assert log.stat().st_size > 20e6
    file = tmp_path / "page.html"
    file.write_text(page([log]) + "<script>document.title = performance.now()</script>", encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert float(re.search("<title>(.*?)</title>", done.stdout)[1]) < 5000
