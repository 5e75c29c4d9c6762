"""All kinds of files that come from elsewhere, or from a run that was killed."""

from benchmarks.fuzz.answers import ANSWERS_KINDS
from benchmarks.fuzz.chat import CHAT_KINDS
from benchmarks.fuzz.samples import SAMPLES_KINDS
from benchmarks.fuzz.settings import SETTINGS_KINDS

KINDS = (*SETTINGS_KINDS, *SAMPLES_KINDS, *ANSWERS_KINDS, *CHAT_KINDS)
