"""The built pages in a browser: narrow screens, the dark theme, the interactive pieces. Skipped where there is no Chromium."""

from __future__ import annotations

import pytest
from browser import CHROMIUM, Browser

from nanoqwen.book.contents import pages
from nanoqwen.book.palette import PAGE

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: the pages are not looked at in a browser")

# Contrast of every text against what is behind it, by WCAG's formula: [ratio, text, where] of the worst that miss 4.5:1.
LOW_CONTRAST = """(() => {
  const parse = (c) => { const m = c.match(/[\\d.]+/g); if (!m) return null; const n = m.map(Number);
    return c.startsWith("color(") ? [n[0]*255, n[1]*255, n[2]*255, n[3] ?? 1] : [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { const layers = []; for (let p = e; p; p = p.parentElement) { const c = parse(getComputedStyle(p).backgroundColor);
    if (c && c[3] > 0) { layers.push(c); if (c[3] === 1) break; } } return layers.reverse().reduce((b, c) => over(c, b), [255, 255, 255, 1]); };
  const bad = [];
  const walk = document.createTreeWalker(document.querySelector(".bd-article"), NodeFilter.SHOW_TEXT);
  for (let n = walk.nextNode(); n; n = walk.nextNode()) {
    const e = n.parentElement, box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!n.data.trim() || !box.width || style.visibility !== "visible" || e.closest("style, script, .headerlink, .nq-score thead")) continue;
    const svg = e.closest("svg"); let ground = behind(svg ? svg.parentElement : e);
    if (svg) for (const r of svg.querySelectorAll("rect")) {  // what is painted before the label and lies under its middle
      const q = r.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2, paint = getComputedStyle(r);
      if (r.compareDocumentPosition(e) & 4 && q.left <= x && x <= q.right && q.top <= y && y <= q.bottom && paint.fill !== "none") {
        const c = parse(paint.fill); ground = over([c[0], c[1], c[2], c[3] * paint.fillOpacity], ground); } }
    const ink = over(parse(svg ? style.fill : style.color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push([Math.round(ratio * 100) / 100, n.data.trim().slice(0, 40), e.tagName + "." + (e.getAttribute("class") || "")]);
  }
  return bad.sort((x, y) => x[0] - y[0]).slice(0, 8);
})()"""

# Elements of the article that stick out of the screen without a box of theirs that scrolls.
STICKING_OUT = """(() => { const wide = document.documentElement.clientWidth + 0.5, out = [];
  for (const e of document.querySelectorAll(".bd-article *")) { if (e.getBoundingClientRect().right <= wide) continue;
    let p = e; while (p && !["auto", "scroll", "hidden"].includes(getComputedStyle(p).overflowX)) p = p.parentElement;
    if (!p || p === document.body || p === document.documentElement) out.push(e.tagName + "." + (e.getAttribute("class") || "")); }
  return out.slice(0, 8); })()"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as page:
        yield page


@pytest.mark.parametrize("page", pages())
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_the_whole_page(browser, built, page, theme):
    browser.open(built / f"{page}.html", 360, theme)
    assert browser.run("document.scrollingElement.scrollWidth") <= 360
    assert browser.run(STICKING_OUT) == []


@pytest.mark.parametrize("page", pages())
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_is_readable(browser, built, page, theme):
    browser.open(built / f"{page}.html", 1280, theme)
    red, green, blue = (int(PAGE[theme][i : i + 2], 16) for i in (1, 3, 5))
    assert browser.run("getComputedStyle(document.body).backgroundColor") == f"rgb({red}, {green}, {blue})"
    assert browser.run(LOW_CONTRAST) == []
    assert browser.errors() == []


@pytest.mark.parametrize("width, layout", [(360, "narrow"), (1280, "wide")])
def test_the_token_path_shows_one_layout(browser, built, width, layout):
    browser.open(built / "book/intro.html", width)
    shown = browser.run('[...document.querySelectorAll("svg[class*=nq-path]")].filter((e) => e.getBoundingClientRect().width).map((e) => e.getAttribute("class"))')
    assert shown == [f"nq-drawing nq-path-{layout}"]


def test_labels_of_drawings_stay_large_enough_on_a_phone(browser, built):
    for page in pages():
        browser.open(built / f"{page}.html", 360)
        sizes = browser.run(
            '[...document.querySelectorAll("figure.nq-figure svg text")].map((t) => t.ownerSVGElement).filter((s, i, all) => all.indexOf(s) === i && s.getBoundingClientRect().width)'
            ".map((s) => s.getBoundingClientRect().width / s.viewBox.baseVal.width * Math.min(...[...s.querySelectorAll('text')].map((t) => parseFloat(getComputedStyle(t).fontSize))))"
        )
        assert all(size >= 8.5 for size in sizes), (page, sizes)


SET = "(s, v) => {{ const e = document.querySelector(s); e.value = v; e.dispatchEvent(new Event('{}', {{bubbles: true}})) }}"


def test_the_sliders_answer(browser, built):
    browser.open(built / "book/intro.html", 1280)
    answer = 'document.querySelector(".nq-answer").textContent'
    assert browser.run(answer).startswith("4.48 GB a token: at least 1.34 ms")
    browser.run(f"({SET.format('input')})('.nq-slider input[aria-label=\"layers\"]', 14)")
    assert browser.run(answer).startswith("2.79 GB a token: at least 0.832 ms")
    assert browser.run('document.querySelector(".nq-slider select").value') == "", "no longer a known model"
    browser.run('[...document.querySelectorAll(".nq-cards button")].find((b) => b.textContent.startsWith("H200")).click()')
    assert browser.run(answer).startswith("2.79 GB a token: at least 0.581 ms")
    assert browser.errors() == []


def test_pieces_have_names_for_those_who_do_not_see_them(browser, built):
    browser.open(built / "book/intro.html", 1280)
    unnamed = browser.run(
        '[...document.querySelectorAll(".nq-piece :is(input, select, button)")].filter((e) => !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim())).length'
    )
    assert unnamed == 0 and browser.run('document.querySelectorAll(".nq-piece input").length') > 5


def test_the_nibble_map_follows_weights_bits_and_steps(browser, built, tmp_path):
    """On a page of its own, so that it is tested whichever chapters a build has."""
    from nanoqwen import book

    static = (built / "_static").as_uri()
    scripts = "".join(f'<script defer src="{static}/{name}.js"></script>' for name in ("widgets", "nibble_map"))
    page = tmp_path / "nibbles.html"
    page.write_text(f"<!doctype html><meta charset=utf-8>{scripts}{book.widget('nibble-map')._repr_html_()}", encoding="utf-8")
    browser.open(page, 360)
    word, outcome = (f'document.querySelector("{s}").textContent' for s in (".nq-hex", ".nq-outcome"))
    for i, value in enumerate([1, -1, 2, -2, 3, -3, 4, -4]):
        browser.run(f"({SET.format('input')})('.nq-weights label:nth-child({i + 1}) input', {value})")
    assert browser.run(word) == "0xCDEF4321"
    browser.run('document.querySelector(".nq-steps input[value=\'2\']").click()')
    assert "w4 = 3, high half w5 = \u22123" in browser.run(outcome)
    browser.run('document.querySelector("button[aria-label=\'bit 0, of w0\']").click()')
    assert browser.run(word) == "0xCDEF4320"
    assert browser.run('document.querySelector(".nq-weights input").value') == "0"
    browser.run(f"({SET.format('input')})('.nq-weights input', 8)")
    assert browser.run(word) == "0xCDEF4320" and browser.run('document.querySelector(".nq-weights input").getAttribute("aria-invalid")') == "true"
    assert browser.errors() == []
