"""The page of a what-if in headless Chromium: charts, values under the pointer, zoom; and the command."""

import html
import json
import re
import subprocess
from pathlib import Path

import pytest

from pagecore.cli import main
from pagecore.serving.whatif import WhatIfOptions, save_page, what_if
from tests.capabilities import require, require_chromium
from tests.serving.whatif.traffic import mooncake

SVG = "http://www.w3.org/2000/svg"
# Moves the pointer, drags, double-clicks, and reports what the page shows in an element of its own.
PROBE = """
<script>
function send(kind, share) {
  const svg = document.querySelector("#rate svg"), box = svg.getBoundingClientRect();
  const x = box.left + box.width * (64 + share * (960 - 80)) / 960;
  svg.dispatchEvent(new PointerEvent(kind, { clientX: x, clientY: box.top + 50, bubbles: true }));
}
const legend = () => document.querySelector("#rate .legend").textContent;
const path = () => document.querySelector("#rate path.line").getAttribute("d");
const seen = { charts: document.querySelectorAll("svg").length, whole: path(), quiet: legend() };
send("pointermove", 1.0);
seen.right = legend();
send("pointermove", 0.0);
seen.left = legend();
send("pointerdown", 0.5);
send("pointermove", 0.9);
seen.drag = document.querySelectorAll("#rate .drag").length;
send("pointerup", 0.9);
seen.zoomed = path();
seen.hash = location.hash;
send("pointermove", 0.0);
seen.zoomed_left = legend();
document.querySelector("#rate svg").dispatchEvent(new MouseEvent("dblclick"));
seen.again = path();
seen.ticks = [...document.querySelectorAll("#rate text")].map((each) => each.textContent);
const out = document.createElement("pre");
out.id = "seen";
out.textContent = JSON.stringify(seen);
document.body.append(out);
</script>
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = mooncake(tmp_path_factory.mktemp("trace") / "a <b>&c.jsonl", 3)
    options = WhatIfOptions(
        memory="8MiB..64MiB", points=13, bytes_per_token=1000, block_sizes=(512,), policies=("lru", "lfu"),
        tiers={"GPU": "8MiB", "CPU": "64MiB"},
    )  # fmt: skip
    return what_if(path, options)


def in_chromium(page, tmp_path):
    """Return the document after its scripts have run."""
    ran = subprocess.run(
        [
            *(require_chromium(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user"),
            *("--virtual-time-budget=1000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout


@pytest.mark.slow
def test_the_page_shows_values_and_zooms(result, tmp_path):
    page = tmp_path / "page.html"
    save_page(result, page)
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    document = in_chromium(page, tmp_path)
    assert 'data-drawn="4"' in document
    seen = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', document, re.DOTALL)[1]))
    assert seen["charts"] == 4
    rates = result.curves[0].hit_rate
    assert seen["quiet"] == "lrulfu (simulated)"
    assert seen["right"].startswith(f"lru: {rates[-1]:.1%} at 64 MiB")
    assert seen["left"].startswith(f"lru: {rates[0]:.1%} at 8 MiB")
    assert seen["drag"] == 1
    assert seen["zoomed"] != seen["whole"] == seen["again"]
    low, high = (float(value) for value in seen["hash"].removeprefix("#rate=").split("-"))
    assert low == pytest.approx(8 * 2**20 * 8**0.5, rel=0.01)
    assert high == pytest.approx(8 * 2**20 * 8**0.9, rel=0.01)
    middle = result.curves[0].memory[6]
    assert f"at {middle / 2**20:.1f} MiB" in seen["zoomed_left"]
    assert {"8 MiB", "64 MiB", "without eviction", "0.00%"} <= set(seen["ticks"])


def test_the_page_needs_no_network_and_escapes_names(result, tmp_path):
    page = tmp_path / "page.html"
    save_page(result, page)
    text = page.read_text()
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {SVG}
    assert not re.search(r"<(?:link|img|iframe)|src=|@import|url\((?!#)", text)
    assert "a &lt;b&gt;&amp;c.jsonl" in text
    assert "{{" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [chart["id"] for chart in data] == ["rate", "saved", "blocks", "over_time"]
    assert data[0]["lines"][0]["y"] == result.curves[0].hit_rate


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_all_files(tmp_path, capsys):
    require("rich")
    require("matplotlib")
    path = mooncake(tmp_path / "trace.jsonl", 3)
    out = {kind: tmp_path / f"out.{kind}" for kind in ("html", "png", "json")}
    options = ["--memory", "8MiB..64MiB", "--points", "9", "--bytes-per-token", "1000", "--block-size", "512", "128"]
    options += ["--evict", "lru", "slru", "--tier", "GPU=8MiB", "--tier", "CPU=64MiB", "--requests", "60"]
    assert main(["whatif", str(path), *options, *(f"--{kind}={file}" for kind, file in out.items())]) == 0
    printed = capsys.readouterr().out
    for expected in ("hit rate without eviction", "slru (simulated), blocks of 128", "tokens found here", "64.0 MiB"):
        assert expected in printed
    assert out["png"].read_bytes().startswith(b"\x89PNG")
    assert "What if: trace.jsonl" in out["html"].read_text()
    kept = json.loads(out["json"].read_text())
    assert kept["num_requests"] == 60
    assert len(kept["curves"]) == 4
    assert [tier["medium"] for tier in kept["tiers"]] == ["GPU", "CPU"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1GiB..1GiB"], "expected a range from a smaller to a larger"),
        (["--memory", "1GiB.."], "memory"),
        (["--memory", "1kB"], "1kB"),
        (["--block-size", "0"], "block_size is 0"),
        (["--points", "1"], "points is 1"),
        (["--sample", "0"], "sample is 0.0"),
        (["--sample", "0.5", "--evict", "lfu"], "only the curve of 'lru' supports"),
        (["--tier", "GPU"], "expected NAME=SIZE"),
        (["--tier", "A=2GiB", "--tier", "B=1GiB"], "ascending sizes"),
        (["--tier", "A=1GiB", "--tier", "A=2GiB"], "tier A is given twice, with 1GiB and 2GiB"),
        (["--bytes-per-token", "0"], "bytes_per_token is 0; it must be at least 1"),
        (["--memory", "9" * 30], "use at most 2,305,843,009,213,693,952 bytes"),
        (["--memory", "8GiB..9000PiB"], "memory is '9000PiB'; use at most"),
        (["--tier", "CPU=" + "9" * 30], "tier CPU is '999999999999999999999999999999'; use at most"),
        (["--tier", "CPU=2XB"], "tier CPU is '2XB'"),
        (["--prefill-rate", "0"], "prefill_rate is 0.0"),
        (["--prefill-rate", "inf"], "prefill_rate is inf; expected a finite number of tokens a second"),
        (["--prefill-rate", "1e-308"], "prefill_rate is 1e-308; expected a finite number of tokens a second above 0"),
        (["--requests", "0"], "requests is 0"),
        (["--html", "out", "--json", "./out"], "--html and --json are both out; give each a file of its own"),
        (["--json", "trace.jsonl"], "the trace and --json are both trace.jsonl; give each a file of its own"),
        (["--html", "missing/out.html"], "folder missing does not exist"),
        (["--png", "out.svg"], "--png out.svg: the picture is a PNG file; use a name that ends in .png"),
    ],
)
def test_the_command_refuses_wrong_options(tmp_path, monkeypatch, capsys, options, message):
    require("rich")
    monkeypatch.chdir(tmp_path)
    path = mooncake(tmp_path / "trace.jsonl", 3)
    before = path.read_bytes()
    assert main(["whatif", str(path), *options]) == 2
    assert message in capsys.readouterr().err
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], before)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is missing")
@pytest.mark.parametrize("kind", ["html", "png", "json"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, capsys, kind):
    require("rich")
    if kind == "png":
        require("matplotlib")
    path = mooncake(tmp_path / "trace.jsonl", 3)
    assert main(["whatif", str(path), "--points", "2", f"--{kind}=/dev/full"]) == 2
    assert f"--{kind} /dev/full cannot be written: No space left on device" in capsys.readouterr().err


def test_samples_have_no_timeline(tmp_path, capsys):
    require("rich")
    path = mooncake(tmp_path / "trace.jsonl", 3)
    out = tmp_path / "out.html"
    assert main(["whatif", str(path), "--memory", "1GiB..4GiB", "--sample", "0.5", f"--html={out}"]) == 0
    assert "lru (sampled)" in capsys.readouterr().out
    assert '"over_time"' not in out.read_text()
