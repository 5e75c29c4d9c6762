"""A headless browser, in which tests open pages."""

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser is installed to open the page in; on Debian: apt install chromium")


def browse(folder: Path, *words: str) -> str:
    """Run the browser with a profile in ``folder`` and these further words; returns its standard output."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
               f"--user-data-dir={folder / 'profile'}", *words]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def content_width(html: str, width: int, folder: Path) -> int:
    """How many pixels wide the content of a page is on a screen of ``width``.

    The screen is a frame: a headless window is at least 500 pixels wide.
    """
    outer = folder / "frame.html"
    measure = "document.body.dataset.width = this.contentDocument.documentElement.scrollWidth"
    outer.write_text(f'<body><iframe style="width: {width}px; height: 900px; border: 0" onload="{measure}" '
                     f'srcdoc="{escape(html)}"></iframe></body>')
    (found,) = re.findall(r'data-width="(\d+)"', browse(folder, "--dump-dom", outer.as_uri()))
    return int(found)
