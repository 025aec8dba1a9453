"""The proof that decisions keep their promises: the functions that production calls, on generated worlds.

Read ``world`` (what a world gives), ``gate`` (the offline test's worlds), ``planted`` (honest gains and hacks),
``live`` (worlds of traffic and judges), ``__main__`` (plays them all).
"""
