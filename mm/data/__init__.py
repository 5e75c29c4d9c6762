"""From the files of a data JSON to the microbatches of every rank.

The way of a record, from the top to the bottom; beside each arrow the room that takes it on:

    a line of JSON or JSONL, a row of Parquet
        |   read/     records, spans, parquet: one raw record;  formats, parts, roots: what it says and shows
        v
    Sample            turns of text, pictures and videos (sample.py), in one form whatever the file's
        |   index/    before a run: each checked and measured (gauge), kept on disk (store), numbered (dataset)
        |   order/    from the lengths alone: which samples are a microbatch, of which replica, in which step
        |   media/    pictures, and chosen frames of videos, as patches for the ViT
        |   encode/   text as token ids and labels (chat), and a position for each (encoder)
        v
    Microbatch        token ids, labels, positions, patches: of one sample, then of all that share it
        |   feed/     loader: worker processes prepare steps ahead, as the planner says
        v
    ReadStep          the microbatches of one replica in one step, on the one rank that reads for it
        |   feed/     owner: ids to every rank of the replica, patches to those that embed them
        v
    StepPlan          the same step on every rank

Words that all rooms share stand beside them: ``sample``, ``lengths``, ``record_name``, ``workers``.  A room imports
only those below it; docs/architecture.md has their floors.
"""
