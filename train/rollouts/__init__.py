"""Responses and episodes that go on while training learns, over changes of the weights. This file imports no torch.

Read ``schedule`` (which groups may begin, and which a step learns from: pure functions), ``group`` (the responses to
one prompt, and how a checkpoint has them), ``stream`` (the driver's side: the queue, and what fills it), then
``request`` (one response to sample) and ``responses`` (a rank's side: many of them on one engine).
"""
