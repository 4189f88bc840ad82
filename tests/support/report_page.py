"""What a machine can see of a report in a browser: its width, its smallest letters, and what charts tell."""

from typing import Any

from tests.support.browser import Browser

SHOWN = "Array.from(document.querySelectorAll('svg')).filter(e => e.getBoundingClientRect().width)"
READABLE = f"{SHOWN}.filter(e => e.dataset.axes)"


def width(browser: Browser) -> int:
    """Return how wide the page is, in CSS pixels; more than the window when something sticks out."""
    return int(browser.run("document.documentElement.scrollWidth"))


def crowded_cards(browser: Browser) -> list[str]:
    """Return the texts of the cards that are wider than their place."""
    wide = "Array.from(document.querySelectorAll('.card')).filter(e => e.scrollWidth > e.clientWidth)"
    return list(browser.run(f"{wide}.map(e => e.innerText)"))


def smallest_letters(browser: Browser) -> tuple[float, str]:
    """Return the size of the smallest text in any chart that is shown, in CSS pixels, and the text."""
    scale = "e.getBoundingClientRect().width / e.viewBox.baseVal.width"
    size = f"[parseFloat(getComputedStyle(t).fontSize) * ({scale}), t.textContent]"
    texts = f"{SHOWN}.flatMap(e => Array.from(e.querySelectorAll('text'), t => {size}))"
    found: list[Any] = browser.run(f"{texts}.sort((a, b) => a[0] - b[0])[0]")
    return float(found[0]), str(found[1])


def point_at_charts(browser: Browser, pointer: str = "mouse") -> dict[str, str]:
    """Point at the middle of the first axes of each chart; return what each of them tells, by its label."""
    middle = "clientX: r.x + k * (b[0] + b[2]) / 2, clientY: r.y + k * (b[1] + b[3]) / 2"
    event = f"new PointerEvent('pointermove', {{bubbles: true, pointerType: '{pointer}', {middle}}})"
    return dict(
        browser.run(
            f"{READABLE}.map(e => {{ const r = e.getBoundingClientRect(), b = JSON.parse(e.dataset.axes)[0]; "
            f"const k = r.width / e.viewBox.baseVal.width; e.dispatchEvent({event}); "
            "const told = e.closest('figure').querySelector('.told'); "
            "return [e.getAttribute('aria-label'), told.hidden ? '' : told.innerText]; })"
        )
    )


def press_in_first_chart(browser: Browser, key: str) -> str:
    """Press a key while the first chart has the focus; return what the chart tells then."""
    return str(
        browser.run(
            f"(e => {{ e.focus(); e.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}})); "
            "const told = e.closest('figure').querySelector('.told'); "
            f"return told.hidden ? '' : told.innerText; }})({READABLE}[0])"
        )
    )
