"""The single controller: worker groups, called as if each were one object.

The driver holds the dataflow. A group is SPMD: one worker per rank. The groups of one pool share its processes, and so
their devices. A rule on each worker method says how its arguments are split over the ranks and its results joined::

    class ActorWorker(Worker):
        @dispatch(per_token)
        def log_probs(self, batch): ...

    pool = ResourcePool(ranks=2, threads=1)
    actor = pool.group("actor", "train.workers.actor:ActorWorker", policy=path)
    log_probs = actor.log_probs(batch)              # [T], in the order of the batch
    pending = actor.log_probs.start(batch)          # the same without waiting
    log_probs = pending.result(timeout_s=60)

Read ``worker_group`` (calls from the driver, their answers and failures) with ``failure_kinds`` (what kinds of them
there are), ``dispatch`` (the rules), ``worker`` (what runs in a rank) and ``usage`` (its device, its memory, what it
has computed). How ranks are reached, which rules and groups don't know: ``ray_pool`` (through Ray: a placement group,
an actor process per rank), ``torchrun`` (through torch.distributed, without Ray) with ``torchrun_guard`` (torchrun that
ends when its parent does), ``rendezvous`` (how ranks find each other,
and which failures follow from another rank's), ``heartbeat`` (signs of life of ranks and driver, and who misses them).
Of processes that stay: ``imported_files`` (the code that they have, and whether it has changed).
"""
