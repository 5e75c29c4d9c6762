"""From the files of a data JSON to the microbatches of every rank.

The path of a record, top to bottom, with the rooms that handle each step:

    a line of JSON or JSONL, a row of Parquet
        |   read/     records: one raw record;  formats, content, roots: turns and media
        v
    Sample            turns of text, images and videos (sample.py), in one form for all file formats
        |   index/    before a run: every record checked and measured (gauge), cached (store), numbered (dataset)
        |   order/    from lengths alone: which samples form a microbatch, for which replica, in which step
        |   media/    images, and selected frames of videos, as patches for the ViT
        |   encode/   text as token ids and labels (chat), and a position for each (encoder)
        v
    Microbatch        token ids, labels, positions and patches, first of one sample, then of all samples packed together
        |   feed/     loader: worker processes prepare steps ahead
        v
    ReadStep          one replica's microbatches of one step, on the one rank that reads for the replica
        |   feed/     owner: token ids to every rank of the replica, patches only to those that embed them
        v
    StepPlan          the same step on every rank

Modules shared by all rooms are in this folder: ``sample``, ``lengths``, ``record_name``, ``workers``.  A room imports
only rooms below it; docs/architecture.md shows their floors.
"""
