"""The web pages below /console: what serves and why, what the loop does, what was answered, and what people say of it.

Read ``app`` (the ASGI application that serve mounts: login, who may do what, live events), then ``reader`` (a child
process that reads and renders, so that no query stalls a token), ``worker`` (what runs in it), ``pages`` (one file per
page: what is read for it) and ``rendering`` (templates and what they share).
"""
