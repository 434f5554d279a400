"""player.js in a real browser: by keyboard alone, a spoken sentence a step, no answer in the page before."""

import shutil

import pytest

from kvlab.watch import views

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright, and a Chromium")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """opened(player) -> the page, offline, with the focus on the player; an error on the page fails the test."""
    wrong, pages = [], []

    def go(player, **options):
        context = browser.new_context(offline=True, viewport={"width": 1200, "height": 560}, **options)
        page = context.new_page()
        pages.append(context)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.goto(player.save(tmp_path / "view.html").as_uri())
        page.locator(".kw-root").focus()
        return page

    yield go
    for context in pages:
        context.close()
    assert wrong == []


def now(page) -> str:
    return page.locator(".kw-now").inner_text()


def drawn(page) -> str:
    return page.locator(".kw-picture svg").get_attribute("aria-label")


def test_by_keyboard_back_and_forth_and_not_past_the_question(opened):
    player = views.pool("fragmented")
    frames, asked = player.frames, player.question.step
    page = opened(player)
    assert now(page) == frames[asked].say and drawn(page) == frames[asked].alt
    for key, step in (("ArrowRight", asked), ("End", asked), ("ArrowLeft", asked - 1), ("Home", 0), ("ArrowRight", 1)):
        page.keyboard.press(key)
        assert (now(page), drawn(page)) == (frames[step].say, frames[step].alt)
    assert page.locator(".kw-slider").get_attribute("max") == str(asked)
    assert page.locator(".kw-now").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("name", views.NAMES)
def test_before_the_commit_the_page_holds_nothing_of_what_comes(opened, name):
    player = views.show(name)
    page = opened(player)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    held = page.locator("#watch").evaluate("e => e.outerHTML")
    shown = page.locator("#watch").inner_text()
    for frame in player.frames[player.question.step + 1 :]:
        assert frame.say not in shown and frame.alt not in held
    assert player.answer()[1] not in held
    earlier = {mark for frame in player.frames[: player.question.step + 1] for mark in frame.marks}
    late = {mark for frame in player.frames for mark in frame.marks} - earlier
    in_page = page.locator(".kw-picture svg").evaluate("e => e.innerHTML")
    as_browser = page.evaluate(
        "marks => marks.map(m => { const s = document.createElementNS('http://www.w3.org/2000/svg', 'svg');"
        " s.innerHTML = m; return s.innerHTML; })", sorted(late))  # fmt: skip
    assert late and not any(mark in in_page for mark in as_browser)


def test_a_choice_is_kept_beside_the_outcome_and_reset_asks_again(opened):
    player = views.fork("half_full")
    right, why = player.answer()
    page = opened(player)
    page.keyboard.press("4")
    assert now(page) == f"{player.frames[player.question.reveal].say} You said: 4 copies. Not so. {why}"
    page.keyboard.press("End")
    assert now(page) == player.frames[-1].say
    page.locator(".kw-reset").click()
    assert page.locator(".kw-option").count() == 4 and now(page) == player.frames[player.step].say
    page.keyboard.press(str(right + 1))
    assert "Right." in now(page)


def test_the_drop_down_leads_to_the_other_runs_and_each_asks_its_own_question(opened):
    half_full, full = views.fork("half_full"), views.fork("full")
    page = opened(half_full)
    page.keyboard.press("1")
    assert "You said" in now(page)
    runs = page.locator(".kw-runs")
    assert runs.locator("option").all_inner_texts() == ["half full", "full"]
    runs.focus()
    page.keyboard.press("ArrowDown")  # the keys of a drop-down stay its own
    assert now(page) == full.frames[full.step].say and full.ask()[0] in page.locator(".kw-ask").inner_text()
    page.locator(".kw-root").focus()
    page.keyboard.press("1")
    assert full.answer()[1] in now(page)
    runs.select_option("half full")
    assert now(page) == half_full.frames[half_full.step].say and page.locator(".kw-option").count() == 4


def test_nobody_is_locked_out_and_a_later_frame_opens_without_a_question(opened):
    player = views.pool("tight")
    page = opened(player)
    page.keyboard.press("r")
    assert player.answer()[1] in now(page) and "You said" not in now(page)
    page = opened(views.pool("tight", step=12))
    assert page.locator(".kw-option").count() == 0 and now(page) == player.frames[12].say
    page.keyboard.press("Home")
    page.locator(".kw-reset").click()
    assert now(page) == player.frames[12].say and "step=12" in page.locator(".kw-line").inner_text()


def test_real_buttons_with_names_all_reached_by_tab(opened):
    page = opened(views.fork("full"))
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert {"one step back", "back to the opening frame", "step", "projector mode", "answer 1: no copy"} <= set(reached)
    page.locator(".kw-option").first.focus()
    page.keyboard.press("Enter")
    assert "Right." in now(page)


@pytest.mark.parametrize("name", views.NAMES)
def test_on_a_projector_it_fits_and_letters_are_large(opened, name):
    for scenario in views.show(name).view.scenarios:
        page = opened(views.show(name, scenario, projector=True))
        for key in (None, "1"):
            if key:
                page.keyboard.press(key)
            box = page.locator(".kw-root").bounding_box()
            assert box["y"] + box["height"] <= 560 and box["x"] + box["width"] <= 1200
            sizes = page.evaluate(
                "[...document.querySelectorAll('.kw-root *')].filter(e => e.getClientRects().length && e.textContent"
                " && !e.children.length && !(e instanceof SVGElement))"
                ".map(e => parseFloat(getComputedStyle(e).fontSize))")  # fmt: skip
            scale = page.locator(".kw-picture svg").evaluate("e => e.getBoundingClientRect().width / 1200")
            assert min(sizes) >= 20 and 20 * scale >= 19.5


def test_nothing_moves_by_itself_and_play_stops_at_the_question(opened):
    player = views.fork("half_full")
    page = opened(player)
    page.clock.install()
    page.clock.run_for(5000)
    assert now(page) == player.frames[player.question.step].say
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    page.clock.run_for(10_000)
    assert now(page) == player.frames[player.question.step].say
    assert page.locator(".kw-play").get_attribute("aria-label") == "play"


def test_reduced_motion_has_no_transition(opened):
    for setting, moves in (("reduce", "0s"), ("no-preference", "0.15s")):
        page = opened(views.pool(), reduced_motion=setting)
        assert page.locator(".kw-picture rect").first.evaluate("e => getComputedStyle(e).transitionDuration") == moves


def test_marks_of_one_block_light_up_together(opened):
    page = opened(views.pool("fragmented"))
    page.locator('[data-link="1"]').last.hover()
    assert page.locator('.kw-linked[data-link="1"]').count() == 2 == page.locator(".kw-linked").count()
