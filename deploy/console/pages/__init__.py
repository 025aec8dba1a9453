"""What each page shows, read in the reader's process.

Read ``visit`` (who looks, at what, and what comes of it), then ``now`` (what serves, the loop, what is wrong),
``policies`` (all of them, one of them, promotion and rollback), ``playground`` (a chat with the policy that serves),
``traffic`` (search, one interaction), ``labels`` (which response to judge next, agreement), ``compare`` (two answers to
one prompt, or to a suite's items), ``data`` (SQL, plots and exports, for admins), ``saved_queries`` (kept by name),
``keys`` (made and revoked), ``rows`` (interactions of a tenant, from lake and journal), ``tokens`` (a response's
tokens, coloured).
"""
