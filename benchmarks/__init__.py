"""Measurements: ratios between this trainer and its peers, measured in turn in one run.

Each command answers one question: ``python -m benchmarks.COMMAND --help`` says how.  docs/performance.md has the
answers; those of ``plan`` are in docs/planning.md, and those of ``faults`` in docs/reliability.md.

    step         Does a training step compute what transformers computes, and how fast is it, on a device and a CPU?
    pipeline     How close does the pipeline come to its ideal?
    balance      How evenly do samplers distribute the cost of a step?
    plan         How right are predictions?  .shipped: how good are MindSpeed-MM's layouts?  .fits: what fits where?
    data         How fast are images loaded?  .index: how fast are samples checked?  .feature_cache: how much time does
                 the cache of the ViT's features save?
    convert      How long does mm-convert take compared with a plain copy, and what do ranks read at startup?
    save         How much faster is a save in overlapping blocks?
    states       What do optimizer states in 16 bits change about a training?
    kernels      Which form of attention is fastest on a device, and what are the device's ceilings?
    faults       Does a run lose nothing under kills, stops and signals, and does its memory grow?
    device_hour  Runs all measurements on a device; .render writes them into docs/performance.md.

They share ``measure`` (clocks, ratios, ranks), ``records`` (files of results) and ``sides`` (both trainers).
Counts that tests check (kernels and bytes of a step, messages, requests to the store) are in ``tests/meta`` and
``tests/parallel``.  Nothing in ``tests/`` imports from here; tests run these commands.
"""
