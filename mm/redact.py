"""Keeps secrets out of what a program writes: logs, reports, run records, model cards, and other processes."""

import re
from collections.abc import Mapping

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?<![A-Z])(API|ACCESS|PRIVATE)?_?KEY(?![A-Z])", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]*@")
"""``user:password@`` of a URL."""
_QUERY = re.compile(
    r"([?&][^=&#\s]*(?:token|secret|passw|credential|signature|key)[^=&#\s]*=)[^&#\s\"']+", re.IGNORECASE)
"""A secret in the query of a URL, such as a signed link."""
HIDDEN = "[hidden]"


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name may hold a password, a token or a key."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without variables that may hold a secret."""
    return {name: value for name, value in environment.items() if not is_secret(name)}


def redacted(text: str) -> str:
    """``text`` with the credentials in its URLs hidden."""
    return _QUERY.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", text))
