"""The garbage collector rests while modules are imported, and leaves them out afterwards."""

import subprocess
import sys

_PROGRAM = """
import gc
from mm.environment import without_collection

with without_collection():
    assert not gc.isenabled()
    import decimal
assert gc.isenabled() and gc.get_freeze_count() > 0
gc.unfreeze()
with without_collection():
    import decimal
assert gc.isenabled() and gc.get_freeze_count() == 0, "nothing was imported"
try:
    with without_collection():
        import no_such_module
except ImportError:
    assert gc.isenabled()
gc.disable()
with without_collection():
    import fractions
assert not gc.isenabled(), "as before"
"""


def test_collection_pauses_and_leaves_out_what_was_imported() -> None:
    """In a process of its own, because what is there afterwards is never collected."""
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)
