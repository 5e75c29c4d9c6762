"""From the files of a data JSON to the microbatches of every rank.

The path of a record, top to bottom, with the rooms that handle each step:

    a line of JSON or JSONL, a row of Parquet
        |   records/   records: one raw record;  formats, roots: its turns and media
        v
    Sample             turns of text, images and videos (sample.py), in one form for all file formats
        |   index/     before a run: every record checked, measured and cached (index), and numbered (dataset)
        |   sampler/   from lengths alone: which samples form a microbatch, for which replica, in which step
        |   media/     headers, then pixels: images and frames of videos as patches for the ViT
        |   encode.py  text as token ids and labels, and a position for each
        v
    Microbatch         token ids, labels, positions and patches, of one sample, then of all that are packed together
        |   loader/    loader: worker processes (workers.py) prepare steps ahead
        v
    ReadStep           one replica's microbatches of one step, on the data owner of the replica
        |   loader/    broadcast: token ids to every rank of the replica, patches only to those that embed them
        v
    StepPlan           the same step on every rank

A room imports only rooms below it; docs/architecture.md lists them in order.
"""
