"""All kinds of files that come from elsewhere, or from a run that was killed."""

from benchmarks.fuzz.answers import ANSWERS_KINDS
from benchmarks.fuzz.samples import SAMPLES_KINDS
from benchmarks.fuzz.settings import SETTINGS_KINDS
from benchmarks.fuzz.weights import WEIGHTS_KINDS

KINDS = (*SETTINGS_KINDS, *WEIGHTS_KINDS, *SAMPLES_KINDS, *ANSWERS_KINDS)
