"""What was verified, where and by whom: a card for each size, device and job, and the commands that fill and check it.

A card (``<size>-<device>-<job>.yaml``) has the commands of a job.  A verified card has also what came out: losses or
answers, versions, commit, date, and who ran it.  ``python -m verified.fill`` writes these, ``python -m verified.check``
runs a card again and compares, and ``python -m verified.page`` writes the table of ``docs/verified.md``.
"""
