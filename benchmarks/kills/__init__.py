"""Kills and stops the ranks of real runs in each phase, and compares every loss and weight with an undisturbed run.

``python -m benchmarks.kills PART`` with one of these parts:

    phases    a random rank is killed (or stopped) in each phase of a launch; the same command resumes
    stops     SIGTERM at random moments: which step is saved, and does the run continue to the bit?
    restarts  ``--max-restarts 3`` under random kills, and a run that goes from 4 ranks to 2 to 3
    writes    kills while a background save writes, and what the writing takes from the steps

Ranks run ``worker``, the program with marks: one line in a FIFO as each phase begins and ends.  So the driver can wait
for a phase of a rank, and knows afterwards in which phase the signal arrived.
"""
