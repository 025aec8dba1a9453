"""The web pages below /console: what serves and why, what the loop does, what was answered, and what people say of it.

Read ``app`` (the ASGI application that serve mounts: login, who may do what, live events), then ``worker`` (what
reads and renders, in a child of ``serve.reading.reader``, so that no query stalls a token), ``pages`` (one file per
page: what is read for it) and ``rendering`` (templates and what they share).
"""
