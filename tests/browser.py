"""A headless browser, in which tests open pages."""

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (400, 1280)
"""Screens of a phone and a laptop, in pixels."""
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser is installed to open the page in; on Debian: apt install chromium")


def browse(folder: Path, *words: str) -> str:
    """Run the browser with a profile in ``folder`` and these further words; returns its standard output."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
               f"--user-data-dir={folder / 'profile'}", *words]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def content_width(html: str, width: int, folder: Path) -> int:
    """How many pixels wide the content of a page is on a screen of ``width``."""
    return _measured("page.documentElement.scrollWidth", html, width, folder)


def hidden_width(html: str, width: int, folder: Path) -> int:
    """By how many pixels the widest table of a page is wider than its place on a screen of ``width``, so it scrolls."""
    tables = "[...page.querySelectorAll('.wide')]"
    return _measured(f"Math.max(0, ...{tables}.map(one => one.scrollWidth - one.clientWidth))", html, width, folder)


def _measured(number: str, html: str, width: int, folder: Path) -> int:
    """The value of a JavaScript expression about ``page``.

    The screen is a frame: a headless window is at least 500 pixels wide.
    """
    outer = folder / "frame.html"
    measure = f"const page = this.contentDocument; document.body.dataset.found = {number}"
    outer.write_text(f'<body><iframe style="width: {width}px; height: 900px; border: 0" onload="{escape(measure)}" '
                     f'srcdoc="{escape(html)}"></iframe></body>')
    (found,) = re.findall(r'data-found="(\d+)"', browse(folder, "--dump-dom", outer.as_uri()))
    return int(found)
