"""Measurements: ratios between this trainer and its peers, taken side by side in one run.

Each door answers one question; ``python -m benchmarks.DOOR --help`` says how, docs/performance.md has the answers.

    step         Is a training step transformers' step, and how fast is it, on a device and on the CPU?
    pipeline     How close does the pipeline come to its ideal?  .messages: what do messages gain that are posted early?
    balance      How evenly do samplers deal the cost of a step?  .lists: how well do pipeline lists use the stages?
    data         How fast do pictures become numbers?  .index, .loader and .feature_cache ask the same of these.
    convert      What does mm-convert cost beside a plain copy, and what do ranks read at the start?
    save         What does a save in overlapping blocks gain?
    kernels      Which form of each kernel is fastest on a device?
    device_hour  Everything that is measured on a device, in one go; .render writes it into docs/performance.md.

They share ``measure`` (clocks, ratios, tables, ranks), ``records`` (files of results) and ``sides`` (both trainers).
Counts that tests hold (kernels and bytes of a step, messages, calls of the store) live in ``tests/meta`` and
``tests/parallel``.  Nothing in ``tests/`` imports from here; tests run these commands.
"""
